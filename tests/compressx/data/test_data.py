"""Datasets to documents, documents to token ids, token ids to windows."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import re
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressx.data.documents import UnreachableError, check_dataset, documents, rendered
from compressx.data.windows import (
    _encoded,
    beginning,
    calibration_sequences,
    evaluation_windows,
    fingerprint,
    prompt_ids,
    read_calibration,
    token_ids,
)
from compressx.recipe.sources import DatasetSource, Draw, Generate
from compressx.runtime.errors import CalibrationError


def source(**values: Any) -> DatasetSource:
    return DatasetSource.model_validate(values)


@pytest.fixture
def tokenizer() -> Any:
    """Words by number, with a beginning-of-sequence token, for models of four positions."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "\n\n": 1, "one": 2, "two": 3, "three": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Split("\n\n", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", model_max_length=4)  # noqa: S106


SQUEEZE = {"gz": gzip.compress, "bz2": bz2.compress, "xz": partial(lzma.compress, preset=0)}


class TestFiles:
    def test_a_glob_gives_one_document_for_each_file_in_sorted_order_and_a_name_is_no_glob(self, project: Path) -> None:
        (project / "deep").mkdir()
        for name, text in {"b.txt": "2", "a.txt": "1", "deep/c.txt": "3", "d.md": "no", "w[1].txt": "4"}.items():
            (project / name).write_text(text)
        assert documents(source(text="**/*.txt"), "calibration") == ["1", "2", "3", "4"]
        assert documents(source(text=str(project / "[ab].txt")), "calibration") == ["1", "2"]
        assert documents(source(text="w[1].txt"), "evaluation") == ["4"]

    def test_the_ends_of_lines_and_a_byte_order_mark_do_not_depend_on_where_a_file_was_written(self, project):
        (project / "windows.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\rthree\n")
        assert documents(source(text="windows.txt"), "calibration") == ["one\n\ntwo\nthree\n"]

    @pytest.mark.parametrize("suffix", SQUEEZE)
    def test_what_python_decompresses_is_read_as_it_was_and_a_damaged_archive_is_named(self, suffix, project) -> None:
        squeeze = SQUEEZE[suffix]
        (project / f"a.txt.{suffix}").write_bytes(squeeze(b"one\r\ntwo"))
        (project / f"a.jsonl.{suffix}").write_bytes(squeeze(b'{"text": "first"}\n\n{"text": "second"}'))
        (project / f"a.json.{suffix}").write_bytes(squeeze(b'\n [{"text": "third"},\n {"text": "fourth"}]'))
        assert documents(source(text=f"*.txt.{suffix}"), "calibration") == ["one\ntwo"]
        assert documents(source(json=f"*.json*.{suffix}"), "calibration") == ["third", "fourth", "first", "second"]
        whole = squeeze(b'{"text": "first"}\n' * 100)
        for content in (b"text", whole[:-9], whole[:20] + b"?" * 20 + whole[40:]):
            (project / f"a.jsonl.{suffix}").write_bytes(content)
            with pytest.raises(CalibrationError, match=rf"^cannot read a\.jsonl\.{suffix}: (?!None)"):
                documents(source(json=f"a.jsonl.{suffix}"), "calibration")

    def test_each_line_is_a_document_and_blank_lines_are_none(self, project: Path) -> None:
        (project / "b.jsonl").write_text('{"body": "third"}\n')
        (project / "a.jsonl").write_bytes(b'{"body": "first\\n", "id": 1}\r\n\n{"body": "second"}')
        assert documents(source(json="*.jsonl", field="body"), "calibration") == ["first\n", "second", "third"]

    @settings(max_examples=30)
    @given(st.lists(st.text(), min_size=1).filter(lambda texts: any(t.strip() for t in texts)))
    def test_any_text_comes_back_as_it_was(self, tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
        path = tmp_path_factory.mktemp("json") / "a.jsonl"
        lines = [json.dumps({"text": t}, ensure_ascii=not t.isprintable()) for t in texts]
        path.write_text("\n".join(lines), encoding="utf-8")
        assert documents(source(json=str(path), field="text"), "calibration") == texts


class TestWhatIsSeenWithoutReading:
    @pytest.mark.parametrize(
        ("given", "told"),
        [({"text": "none-*.txt"}, r"text: no file matches 'none-\*\.txt'; .*looked in /"),
         ({"text": "empty.txt"}, r"'empty\.txt' has no text: all 1 files are empty$"),
         ({"json": "empty*", "field": "text"}, r"'empty\*' has no text: all 2 files are empty$"),
         ({"text": "corpus"}, r"text: 'corpus' is a folder; name the files in it, such as 'corpus/\*\*/\*\.txt'$"),
         ({"text": "a.txt.zip"}, r"text: a\.txt\.zip is compressed; decompress it first"),
         ({"text": "a.JSONL.gz"}, r"text: a\.JSONL\.gz holds rows of fields; write \{json: FILE\}"),
         ({"text": "a.TSV"}, "text: a.TSV holds rows of fields; convert it, such as with pandas' read_csv and to_json"),
         ({"json": "a.parquet"}, r"json: a\.parquet holds rows of fields; parquet files are read by \{name: FOLDER\}"),
         ({"json": "a.jsonl"}, r"a\.jsonl:1: no field text, messages or conversations; .*body; name one as field"),
         ({"json": "a.jsonl", "field": "bodi"}, r"a\.jsonl:1: no field 'bodi'; did you mean 'body'\?"),
         *(({"name": x}, rf"dataset '{x}' is a file, not the name of a dataset; write \{{{key}: {x}\}}$")
           for x, key in (("a.txt", "text"), ("a.jsonl", "json"))),
         ({"name": "a.parquet"}, r".*parquet files are read by \{name: FOLDER\}, the folder"),
         *(({"name": x}, rf"dataset '{x}' is a path, not the name of a dataset; write \{{{key}: {x}\}}$")
           for x, key in (("./docs.txt", "text"), ("~/docs", "text"), ("a.json.gz", "json"))),
         *(({"name": x}, f"no dataset '{x}'; did you mean '{meant}'\\? valid: c4, prompts, python-d")
           for x, meant in (("wikitxt", "wikitext"), ("WikiText2", "wikitext"), ("C4", "c4"))),
         *(({"name": x}, "no dataset .*; .*valid: c4, p.*OWNER/NAME")
           for x in ("imdb", "a b/c", "org/name/part", "", "org/", "wiki\x1b[2J", "o/" + "n" * 97))],
    )  # fmt: skip
    def test_what_cannot_be_a_dataset_is_refused_with_what_to_write(self, given, told, project: Path) -> None:
        (project / "corpus").mkdir()
        for name in ("empty.txt", "empty.md"):
            (project / name).touch()
        for name in ("a.txt", "a.txt.zip", "a.JSONL.gz", "a.TSV", "a.parquet"):
            (project / name).write_bytes(b"\x1f\x8b")
        (project / "a.jsonl").write_text('{"body": "x"}\nnot read yet')
        with pytest.raises(CalibrationError, match=f"^{told}") as caught:
            check_dataset(source(**given))
        assert str(caught.value).isprintable()
        for fine in ({"json": "a.jsonl", "field": "body"}, {"name": "org/wikitxt"}, {"name": "Org_1/a.b-c"}):
            check_dataset(source(**fine))


CHATS = [
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
    [{"role": "user", "content": "three"}],
]


def stored(kind: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> DatasetSource:
    """Write rows in the working directory, and name them."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path.cwd() / "cache")
    lines = "\n".join(map(json.dumps, rows))
    if kind in ("saved", "folder of lines"):
        Path("set").mkdir()
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk("set")
    elif kind == "folder of lines":
        Path("set/a.jsonl").write_text(lines)
    else:
        Path("a.json").write_text(json.dumps(rows) if kind == "array" else lines)
        return source(json="a.json")
    return source(name="./set")


class TestHostileFiles:
    """What a stranger's file can be: each fails in one line that names it, before memory is exhausted."""

    def refused(self, purpose: str = "calibration", **given: Any) -> str:
        with pytest.raises(CalibrationError) as caught:
            documents(source(**given), purpose)
        assert str(caught.value).isprintable()
        return str(caught.value)

    @pytest.fixture
    def little_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Free memory of 3.2 MB, in which a piece may have 100,000 bytes, and text that is joined 40,000."""
        monkeypatch.setattr("compressx.data.documents.free_main_memory", lambda: 3_200_000)

    @pytest.mark.parametrize("suffix", SQUEEZE)
    @pytest.mark.parametrize(("name", "key"), [("a.txt", "text"), ("a.jsonl", "json"), ("a.json", "json")])
    def test_an_archive_is_read_no_further_than_memory_reaches(self, name, key, suffix, project, little_memory) -> None:
        begin = {"a.txt": b"", "a.jsonl": b'{"text": "', "a.json": b'[{"text": "'}[name]
        (project / f"{name}.{suffix}").write_bytes(SQUEEZE[suffix](begin + b"a" * 5_000_000))
        tracemalloc.start()
        told = self.refused(**{key: f"{name}.{suffix}"})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert told.startswith(f"{name}.{suffix}{':1' if name == 'a.jsonl' else ''}: 100001 bytes of text or more")
        assert "there is free memory for 100000; " in told
        assert peak < 3_000_000

    def test_many_documents_and_many_files_are_counted_together(self, project: Path, little_memory: None) -> None:
        (project / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": ""}\n{"text": "aaa"}\n' * 4000))
        assert self.refused(json="a.jsonl.gz") == (
            "json 'a.jsonl.gz': 40019 bytes of text or more, and there is free memory for 40000; name fewer files, "
            "or a part of them"
        )
        for i in range(5):
            (project / f"{i}.txt").write_text("a" * 10_000)
        assert self.refused(text="*.txt").startswith("text '*.txt': 40256 bytes of text or more")

    @pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
    def test_json_that_is_too_deep_or_has_a_number_of_too_many_digits_is_named(self, name: str, project: Path) -> None:
        for value in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000, "1" * 5000):
            before, after = ("[", "]") if name == "a.json" else ("", "")
            (project / name).write_text(f'{before}{{"text": {value}}}{after}')
            assert self.refused(json=name).startswith(f"{name}:1: not JSON (")

    @pytest.mark.parametrize(
        ("row", "told"),
        [('{"text": "a \\ud83d b"}', "a.jsonl:2: field 'text': character 2 is \\ud83d, half of a surrogate pair"),
         ('{"text": "\\ude00\\ud83d"}', "a.jsonl:2: field 'text': character 0 is \\ude00, half of"),
         ('{"text": [{"role": "user", "content": "ok"}, {"role": "user", "content": "cut \\ud83d"}]}',
          "a.jsonl:2: field 'text': message 1: 'content': character 4 is \\ud83d"),
         ('{"text": [{"from": "\\udc80", "value": "ok"}]}', "a.jsonl:2: field 'text': message 0: 'role': character 0"),
         ('{"\\ud83d": "a"}', "a.jsonl:2: no field 'text'; valid: \\ud83d"),
         ('{"text": {"a": "b"}}', "a.jsonl:2: field 'text' is dict, expected text"),
         ('{"a\\u001b[31m": 1}', "a.jsonl:2: no field 'text'; valid: a\\x1b[31m"),
         ('{"txt": "a"}', "a.jsonl:2: no field 'text'; did you mean 'txt'?"), ("{}", "a.jsonl:2: no field 'text'; it"),
         ("null", "a.jsonl:2: expected a JSON object, got NoneType"), ("\0", "a.jsonl:2: not JSON (Expecting value")],
    )  # fmt: skip
    def test_a_row_that_holds_no_text_is_named_with_its_line(self, row: str, told: str, project: Path) -> None:
        (project / "a.jsonl").write_text('{"text": "\\ud83d\\ude00 \\u0000 is text"}\n' + row)
        assert self.refused(json="a.jsonl").startswith(told)
        (project / "a.json").write_text('[{"text": "fine"}, ' + row + "]")
        if not row.startswith("\0"):
            assert self.refused(json="a.json").startswith(told.replace("a.jsonl:2", "a.json[1]"))

    def test_text_with_nul_bytes_is_text_and_other_encodings_are_not(self, project: Path) -> None:
        (project / "a.txt").write_bytes(b"a\0b")
        assert documents(source(text="a.txt"), "calibration") == ["a\0b"]
        for content in ("text".encode("utf-16"), b"\xed\xa0\xbd", b"\x80", b"\x7fELF\xff"):
            (project / "a.txt").write_bytes(content)
            assert self.refused(text="a.txt").startswith("a.txt: not UTF-8 at byte ")
        (project / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}')
        assert self.refused(json="a.jsonl").startswith("a.jsonl:2: not JSON ('utf-8' codec can't decode byte 0xff")
        (project / "a.json").write_text('[{"text": "x"},\n')
        assert re.match(r"a\.json:2: not JSON .*; expected one object per line, or one", self.refused(json="a.json"))

    def test_what_is_no_file_is_not_waited_for(self, project: Path) -> None:
        """A pipe blocks until something writes, a device may never end, and a link may lead nowhere or to itself."""
        os.mkfifo("pipe.txt")
        Path("loop.txt").symlink_to("loop.txt")
        Path("nowhere.txt").symlink_to("absent")
        for pattern in ("pipe.txt", "loop.txt", "nowhere.txt", "*.txt", "/dev/zero", "a\0b"):
            assert "no file matches" in self.refused(text=pattern)
        Path("real").write_text("text")
        Path("link.txt").symlink_to("real")
        assert documents(source(text="*.txt"), "calibration") == ["text"]


class TestChats:
    @pytest.fixture
    def instructed(self, tokenizer: Any) -> Any:
        """The tokenizer with a template that writes <s> before every message."""
        from tokenizers import Regex, pre_tokenizers

        split = pre_tokenizers.Split(Regex(r"<s>|\n\n"), "isolated")
        tokenizer.backend_tokenizer.pre_tokenizer = split
        tokenizer.chat_template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
        return tokenizer

    @pytest.mark.parametrize(("column", "field"), [("messages", None), ("turns", "turns")])
    def test_a_column_of_messages_is_a_column_of_chats(self, project, monkeypatch, column, field) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", project / "cache")
        (project / "set").mkdir()
        rows = datasets.Dataset.from_list([{"id": i, column: chat} for i, chat in enumerate(CHATS)])
        rows.to_parquet("set/a.parquet")
        found = source(name="./set", field=field)
        assert documents(found, "calibration") == CHATS
        assert not check_dataset(found), "a dataset that may be on the hub is not looked into"

    def test_the_conversations_of_sharegpt_are_chats_of_users_and_assistants(self, project) -> None:
        senders = ("system", "human", "gpt", "chatgpt")
        Path("a.jsonl").write_text(json.dumps({"conversations": [{"from": x, "value": x} for x in senders]}))
        roles = ("system", "user", "assistant", "assistant")
        expected = [{"role": role, "content": sender} for role, sender in zip(roles, senders, strict=True)]
        found = source(json="a.jsonl")
        assert documents(found, "calibration") == [expected]
        assert check_dataset(found)

    def test_a_prompt_is_a_chat_without_its_last_answer_or_text_that_begins_and_does_not_end(
        self, instructed, project
    ) -> None:
        from tokenizers import processors

        (project / "chats.json").write_text(json.dumps([{"messages": chat} for chat in CHATS]))
        (project / "text.jsonl").write_text('{"text": "two"}\n{"text": " "}\n')
        instructed.chat_template += "{% if add_generation_prompt %}<s>{% endif %}"
        ends = processors.TemplateProcessing(single="<s> $A three", special_tokens=[("<s>", 0), ("three", 4)])
        instructed.backend_tokenizer.post_processor = ends
        instructed.eos_token = "three"  # noqa: S105 - no secret
        chats, texts = (Generate(prompts=source(json=name)) for name in ("chats.json", "text.jsonl"))
        assert sorted(prompt_ids(chats, instructed, 9)) == [[0, 2, 0], [0, 4, 0]]
        assert prompt_ids(texts, instructed, 9) == [[0, 3]]
        orders = {str(prompt_ids(chats.model_copy(update={"seed": seed}), instructed, 1)) for seed in range(9)}
        assert orders == {"[[0, 2, 0]]", "[[0, 4, 0]]"}

    def test_prompts_without_a_token_are_refused(self, project: Path) -> None:
        class Mute:
            chat_template = eos_token_id = None

            def __call__(self, *_: object, **__: object) -> dict[str, list[int]]:
                return {"input_ids": []}

        with pytest.raises(CalibrationError, match="prompts have no tokens: they are unknown to the tokenizer"):
            prompt_ids(Generate(prompts=source(name="prompts")), Mute(), 3)

    def test_chats_follow_one_another_as_the_template_writes_them_without_more_special_tokens(self, instructed) -> None:
        assert token_ids(CHATS, instructed).tolist() == [0, 2, 0, 3, 0, 4]

    @pytest.mark.parametrize(
        ("value", "complaint"),
        [(3, "is int, expected text or a list of {role, content}"),
         (["hi"], "message 0 is str, expected {role, content}"),
         ([{"speaker": "human", "text": "hi"}], "message 0 has no text in 'role', expected .*; it has speaker, text"),
         ([{"role": "user", "contents": "hi"}], "message 0 has no text in 'content', .*; it has role, contents"),
         ([{"from": "human", "content": 3}], "no text in 'content', expected .*; it has from, content"),
         *(([{"role": "user", "content": [{"type": "text", "text": "a"}, x]}], "'content' has parts that are not {type")
           for x in ({"type": "text"}, {"type": "image"}, "a", None)),
         ("[{'role': 'user'}]", r"is not JSON \(Expecting property name.*; expected a list of {role, content}"),
         ('{"role": "user"}', "is dict, expected text or a list"),
         ('[{"role": 1}]', "message 0 has no text in 'role', expected")],
    )  # fmt: skip
    def test_what_is_no_chat_is_named_with_its_place(self, project: Path, value: object, complaint: str) -> None:
        Path("a.jsonl").write_text(json.dumps({"messages": value}))
        with pytest.raises(CalibrationError, match=rf"^a\.jsonl:1: field 'messages'.*{complaint}"):
            documents(source(json="a.jsonl"), "calibration")

    @pytest.mark.parametrize("kind", ["array", "lines", "saved", "folder of lines"])
    def test_a_template_gets_whatever_it_takes_of_a_row(self, kind, instructed, project, monkeypatch, caplog) -> None:
        """As JSON says it, and as Arrow does, where an absent key is None."""
        call = {"id": "c1", "function": {"name": "clock", "arguments": {"zone": "utc"}}}
        other = {"id": "c2", "function": {"name": "sum", "arguments": {"of": [1, 2]}}}
        tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
        says = [
            {"role": "user", "content": "one", "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call, other]},
            {"role": "tool", "content": "12", "tool_call_id": "c1"},
            {"role": "assistant", "content": "two", "reasoning_content": "three"},
        ]
        given = {
            "documents": [{"title": "a", "text": "b"}],
            "date": "today",
            "chat_template_kwargs": {"thinking": False},
        }
        row = {"id": 1, "messages": says, "tools": tools, **given, "bos_token": "no", "add_generation_prompt": "no"}
        bare = {"id": 2, "messages": [{"role": "user", "content": "three"}], "tools": [], "date": None}
        rows = [row, bare, {"id": 3, "messages": None}]
        found = stored(kind, rows, monkeypatch)
        instructed.chat_template = (
            "{{ {'m': messages, 't': tools, 'd': documents, 'on': date | default('none'), "
            "'k': thinking | default('none'), 'b': bos_token, 'g': add_generation_prompt} | tojson }}\n"
        )
        assert check_dataset(found) == (kind in ("array", "lines"))
        full, plain = map(json.loads, rendered(documents(found, "calibration"), instructed))
        assert full["m"][-1].pop("thinking", "three") == "three", "another name for it, of transformers"
        assert full["m"] == [{k: v for k, v in m.items() if v is not None} for m in says]
        assert (full["t"], full["d"], full["on"], full["k"]) == (tools, given["documents"], "today", False)
        assert plain["m"] == bare["messages"]
        assert (plain["t"], plain["d"], plain["on"], plain["k"]) == (None, None, "none", "none")
        assert {x[key] for x in (full, plain) for key in "bg"} == {"<s>", False}, "these are ours"
        assert ": 1 of 3 rows have no text and are left out" in caplog.text

    @pytest.mark.parametrize("kind", ["array", "lines", "saved", "folder of lines"])
    @pytest.mark.parametrize(
        ("column", "values", "read"),
        [("messages", [[{"role": "user", "content": [{"type": "text", "text": x} for x in ("a", "b")]}]], ["ab"]),
         ("messages", [[{"role": "user", "content": None}], [{"role": "user", "content": "a"}], []], ["a"]),
         ("messages", [json.dumps(CHATS[0]), "", "[]", None], ["one", "two"]),
         ("turns", [json.dumps(CHATS[1]), None], ["three"]),
         ("conversations", [[{"from": "human", "value": "a"}, {"from": "gpt", "value": None, "x": [1]}]], ["a", None]),
         ("text", [None, "", "a", '[{"role": "user"}]'], ["", "a", '[{"role": "user"}]']),
         ("body", ["a", None], ["a"])],
        ids=["parts", "null", "JSON", "JSON elsewhere", "ShareGPT", "text", "named text"],
    )  # fmt: skip
    def test_what_has_text_is_read_in_any_of_its_forms_and_the_rest_is_counted(
        self, kind, column, values, read, project, monkeypatch, caplog
    ) -> None:
        found = stored(kind, [{column: x} for x in values], monkeypatch)
        found = found.model_copy(update={"field": column if column in ("turns", "body") else None})
        got = documents(found, "calibration")
        assert [t for d in got for t in ([d] if isinstance(d, str) else [m.get("content") for m in d])] == read
        if gone := len(values) - len(got):
            assert f": {gone} of {len(values)} rows have no text and are left out" in caplog.text

    def test_of_two_usual_fields_the_one_that_is_not_null_is_read(self, project) -> None:
        Path("a.jsonl").write_text(json.dumps({"text": None, "messages": CHATS[0]}))
        assert documents(source(json="a.jsonl"), "calibration") == CHATS[:1]

    @pytest.mark.parametrize(
        ("beside", "told"),
        [({"tools": "[{"}, "refuses it (JSONDecodeError"), ({"tools": ["clock"]}, "Tools should either be"),
         ({"chat_template_kwargs": "{"}, "refuses it (JSONDecodeError"), ({"date": "\ud83d"}, "half of a surr")],
    )  # fmt: skip
    def test_what_a_template_cannot_take_is_refused_in_one_line(self, beside, told, instructed, project) -> None:
        Path("a.jsonl").write_text(json.dumps({"messages": CHATS[1], **beside}))
        read = documents(source(json="a.jsonl"), "calibration")
        if "tools" in beside:
            assert rendered(read, instructed) == ["<s>three"], "this template takes none"
        instructed.chat_template = "{{ date }}{{ tools }}{{ messages[0].content }}"
        with pytest.raises(CalibrationError, match=r"^chat 0 of 1") as caught:
            rendered(read, instructed)
        assert told in str(caught.value)
        Path("a.jsonl").write_text(json.dumps({"messages": CHATS[1], "tools": '[{"a": 1}]', "date": "d"}))
        assert rendered(documents(source(json="a.jsonl"), "calibration"), instructed) == ["d[{'a': 1}]three"]

    def test_chats_and_text_in_one_field_are_refused(self, project: Path) -> None:
        Path("a.json").write_text(json.dumps([{"x": CHATS[0]}, {"x": "text"}]))
        with pytest.raises(CalibrationError, match=r"^json 'a\.json': 1 of 2 documents are chats, the rest text"):
            documents(source(json="a.json", field="x"), "calibration")

    def test_a_tokenizer_without_a_template_and_a_template_that_refuses_are_named(self, instructed: Any) -> None:
        instructed.chat_template = "{{ raise_exception('no system role') }}"
        with pytest.raises(CalibrationError, match=r"^chat 0 of 2 \(roles user, assistant\).*no system role"):
            token_ids(CHATS, instructed)
        instructed.chat_template = None
        with pytest.raises(CalibrationError, match="tokenizer has no chat template; use an instruct model"):
            token_ids(CHATS, instructed)


class TestPythonDocs:
    def test_calibration_and_evaluation_share_no_topic_and_no_paragraph(self) -> None:
        from pydoc_data.topics import topics

        read = {p: documents(source(name="python-docs"), p) for p in ("calibration", "evaluation")}
        assert len(read["calibration"]) + len(read["evaluation"]) == len(topics)
        paragraphs = {p: {x.strip() for d in read[p] for x in d.split("\n\n")} - {""} for p in read}
        assert paragraphs["evaluation"]
        assert not paragraphs["calibration"] & paragraphs["evaluation"]

    def test_the_side_of_a_topic_depends_on_its_name_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pydoc_data.topics.topics", {"with": "WITH", "if": "IF", "new": "NEW", "del": "DEL"})
        assert documents(source(name="python-docs"), "evaluation") == ["DEL", "WITH"]
        assert "IF" in documents(source(name="python-docs"), "calibration")


class TestDatasets:
    @pytest.fixture
    def folder(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A dataset as it lies in a folder of its own."""
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", project / "cache")
        (project / "set").mkdir()
        for split in ("train", "test"):
            rows = [{"text": f"{split} {i}" if i != 1 else "", "body": f"{split} body", "id": i} for i in range(3)]
            (project / "set" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return "./set"

    def test_calibration_reads_train_and_evaluation_reads_test_without_a_progress_bar(self, folder, capfd):
        assert documents(source(name=folder), "calibration") == ["train 0", "", "train 2"]
        assert documents(source(name=folder), "evaluation") == ["test 0", "", "test 2"]
        assert capfd.readouterr() == ("", "")

    def test_what_save_to_disk_wrote_is_read(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", project / "cache")
        parts = {name: datasets.Dataset.from_dict({"text": [f"{name} 1", f"{name} 2"]}) for name in ("train", "test")}
        parts["train"].save_to_disk("one")
        datasets.DatasetDict(parts).save_to_disk("several")
        for purpose in ("calibration", "evaluation"):
            assert documents(source(name="one"), purpose) == ["train 1", "train 2"]
        assert documents(source(name="several"), "evaluation") == ["test 1", "test 2"]
        with pytest.raises(CalibrationError, match=r"^dataset 'one' takes no split: it is one split, as save_to_disk"):
            check_dataset(source(name="one", split="train"))

    @pytest.mark.parametrize(
        ("given", "message"),
        [({"field": "txt"}, r"no field 'txt'; did you mean 'text'\? valid: body, id, text"),
         ({"field": "id"}, r"row 0: field 'id' is int, expected text"),
         ({"split": "valid"}, r"split 'valid'.*could not be fetched.*train.*test"),
         ({"name": "python-docs", "split": "train"}, "takes no split: it comes with Python"),
         ({"name": "c4", "config": "realnewslike"}, r"takes no config: for another .*allenai/c4")],
        ids=str,
    )  # fmt: skip
    def test_settings_that_a_dataset_does_not_have_are_refused(self, folder, given, message):
        with pytest.raises(CalibrationError, match=message):
            documents(source(**{"name": folder, **given}), "calibration")
        assert documents(source(name=folder, split="train[:2]", field="body"), "evaluation") == ["train body"] * 2

    @pytest.mark.parametrize("offline", [True, False])
    def test_an_unreachable_dataset_is_named_at_once_with_ways_out(self, offline: bool, project, monkeypatch) -> None:
        """Whether the user asked for no network, or there is none: nothing is tried again and again."""
        tried = []

        def head(*_: object, **__: object) -> None:
            tried.append("once")
            raise ConnectionError("no route to host")

        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", project / "cache")
        if not offline:
            monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
        with pytest.raises(UnreachableError) as caught:
            documents(source(name="org/nothing"), "calibration")
        assert tried == ["once"] * (not offline)
        reason = "offline mode is enabled" if offline else "ConnectionError: no route to host"
        assert "dataset 'org/nothing' (split 'train') is not in the cache, and the hub cannot" in str(caught.value)
        for told in (reason, "{text: PATH}", "{json: PATH}", "python-docs"):
            assert told in str(caught.value)
        assert str(caught.value).isprintable()
        assert datasets.config.HF_HUB_OFFLINE is offline

    def test_a_dataset_that_is_not_on_the_hub_is_no_failure_of_the_network(self, project, monkeypatch) -> None:
        def load_dataset(*_: object, **__: object) -> None:
            raise datasets.exceptions.DatasetNotFoundError("'org/nothing' doesn't exist on the Hub\nor elsewhere")

        monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=lambda *_, **__: None))
        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        with pytest.raises(
            CalibrationError, match=r"^dataset 'org/nothing' .* could not be fetched \(Dat[^\n]*$"
        ) as told:
            documents(source(name="org/nothing"), "calibration")
        assert not isinstance(told.value, UnreachableError)

    def test_wikitext_is_the_raw_wikitext_2(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        def load_dataset(*args: Any, **kwargs: Any) -> datasets.Dataset:
            calls.append((*args, kwargs["split"], kwargs["revision"]))
            return datasets.Dataset.from_dict({"text": ["", " = Title = \n"]})

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        assert documents(source(name="wikitext"), "calibration") == ["", " = Title = \n"]
        documents(source(name="wikitext", revision="abc"), "evaluation")
        documents(source(name="wikitext", config="wikitext-103-raw-v1", split="validation"), "evaluation")
        assert calls == [
            ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", None),
            ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "abc"),
            ("Salesforce/wikitext", "wikitext-103-raw-v1", "validation", None),
        ]

    def test_c4_streams_the_beginning_of_one_shard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def rows() -> Iterator[dict[str, Any]]:
            for i in range(9000):  # datasets looks a little ahead
                yield {"text": f"page {i}", "url": ""}
            raise AssertionError("read further than needed")

        calls = []

        def load_dataset(*args: Any, **kwargs: Any) -> datasets.IterableDataset:
            calls.append((args, kwargs["data_files"], kwargs["streaming"]))
            return datasets.IterableDataset.from_generator(rows)

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        assert documents(source(name="c4"), "calibration")[-1] == "page 8191"
        assert documents(source(name="c4"), "evaluation")[-1] == "page 1099"
        assert calls == [
            (("allenai/c4",), {"train": "en/c4-train.00000-of-01024.json.gz"}, True),
            (("allenai/c4",), {"validation": "en/c4-validation.00000-of-00008.json.gz"}, True),
        ]


class TestTokenIds:
    def test_documents_are_joined_by_blank_lines_and_tokenized_once(self, tokenizer: Any) -> None:
        ids = token_ids(["one", "two", "three"], tokenizer)
        assert ids.dtype == torch.int64
        assert ids.tolist() == [0, 2, 1, 3, 1, 4]  # one <s> at the very beginning

    @pytest.mark.parametrize("special", [True, False])
    @pytest.mark.parametrize("split", [True, False])
    def test_the_backend_is_asked_for_the_ids_that_a_call_of_the_tokenizer_gives(
        self, tokenizer: Any, special: bool, split: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer.split_special_tokens = split
        text = "\n\n".join(["one", "<s>", "two<s>three", "unknown", "", "é"])
        expected = tokenizer(text, add_special_tokens=special)["input_ids"]
        tokenizer.backend_tokenizer.enable_truncation(2)  # as some tokenizer.json say
        tokenizer.backend_tokenizer.enable_padding(length=50)
        tokenizer.backend_tokenizer.encode_special_tokens = not split
        convert, converted = type(tokenizer)._convert_encoding, []
        monkeypatch.setattr(
            type(tokenizer),
            "_convert_encoding",
            lambda *a, **k: converted.append(k["encoding"].ids) or convert(*a, **k),
        )
        assert _encoded(text, tokenizer, special=special).tolist() == expected
        assert expected not in converted, "with offsets the text takes twice the time"

    def test_a_tokenizer_that_does_more_than_its_backend_is_called(self, tokenizer: Any) -> None:
        class Upside(type(tokenizer)):  # type: ignore[misc]
            def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
                return {"input_ids": [len(text)]}

        upside = Upside(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")  # noqa: S106
        assert token_ids(["one"], upside).tolist() == [3]


class TestWindows:
    @settings(max_examples=40)
    @given(tokens=st.integers(20, 200), length=st.integers(2, 9), seed=st.integers(0, 2**32), part=st.floats(0.01, 1))
    def test_calibration_windows_are_distinct_pieces_of_the_text(self, tokens, length, seed, part):
        samples = max(1, int(part * (tokens // length)))
        windows = calibration_sequences(torch.arange(tokens), samples, length, seed)
        assert windows.shape == (samples, length)
        starts = windows[:, 0].tolist()
        assert len(set(starts)) == samples
        assert all(start % length == 0 for start in starts)
        assert torch.equal(windows, windows[:, :1] + torch.arange(length))

    def test_the_seed_decides_the_draw(self) -> None:
        before = torch.get_rng_state()
        first, again, other = (calibration_sequences(torch.arange(1000), 5, 10, seed) for seed in (3, 3, 4))
        assert torch.equal(torch.get_rng_state(), before), "and not the global random state"
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_evaluation_windows_are_the_first_in_order(self) -> None:
        assert evaluation_windows(torch.arange(11), 2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert evaluation_windows(torch.arange(11), None, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]

    def test_a_token_that_every_window_begins_with_takes_a_place_of_its_text(self) -> None:
        ids = torch.arange(1, 12)
        assert evaluation_windows(ids, None, 5, bos=0).tolist() == [[0, 1, 2, 3, 4], [0, 5, 6, 7, 8]]
        drawn = calibration_sequences(ids, 2, 5, seed=0, bos=0)
        assert sorted(drawn.tolist()) == [[0, 1, 2, 3, 4], [0, 5, 6, 7, 8]]

    def test_the_token_that_the_tokenizer_puts_before_the_whole_text_is_not_there_twice(self, tokenizer: Any) -> None:
        ids = token_ids(["one", "two", "three"], tokenizer)
        windows = evaluation_windows(ids, None, 3, bos=beginning(tokenizer, True))
        assert windows.tolist() == [[0, 2, 1], [0, 3, 1]]
        assert beginning(tokenizer, False) is None

    def test_of_its_own_accord_only_gemma_has_it(self, tokenizer: Any) -> None:
        from transformers import GemmaTokenizer

        assert beginning(tokenizer, "auto") is None
        assert beginning(GemmaTokenizer(vocab={"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}), "auto") == 2

    @pytest.mark.parametrize(
        ("windows", "told"),
        [(lambda _: calibration_sequences(torch.arange(11), 4, 3, 0),
          "^calibration needs 4 sequences of 3 tokens; the text has 11 tokens, which is 3 sequences"),
         (lambda _: evaluation_windows(torch.arange(2), None, 3), "^evaluation needs 1 sequences .* 2 tokens"),
         (lambda _: evaluation_windows(torch.arange(100), 1, 9, limit=8), "9 is longer than the model's 8 "
          "positions; set evaluate.token_perplexity.sequence_length to 8 or less"),
         (lambda tokenizer: beginning(tokenizer, True), "bos: the tokenizer has no BOS token"),
         (lambda tokenizer: token_ids([""], tokenizer), "the text has no tokens")],
    )  # fmt: skip
    def test_what_gives_no_window_is_refused(self, windows, told, tokenizer: Any) -> None:
        tokenizer.bos_token = tokenizer.backend_tokenizer.post_processor = None
        with pytest.raises(CalibrationError, match=told):
            windows(tokenizer)


class TestSeveralSources:
    @pytest.fixture
    def texts(self, project: Path) -> None:
        for word in ("one", "two", "three"):
            Path(f"{word}.txt").write_text("\n\n".join([word] * 100))

    def draw(self, *weights: float, **values: Any) -> Draw:
        named = zip(("one", "two", "three"), weights, strict=False)
        return Draw(datasets=[{"text": f"{word}.txt", "weight": float(weight)} for word, weight in named], **values)

    @pytest.mark.parametrize(
        ("weights", "samples", "shares"),
        [((0.7, 0.3), 10, [7, 3]), ((2, 1), 4, [3, 1]), ((1, 1, 1), 5, [2, 2, 1]), ((1, 9), 3, [0, 3]), ((5,), 3, [3])],
    )
    def test_windows_are_shared_by_weight_and_add_up(self, weights, samples, shares) -> None:
        assert self.draw(*weights, samples=samples).shares == shares

    @pytest.mark.usefixtures("texts")
    @pytest.mark.parametrize("seed", range(3))
    def test_each_source_gives_its_share_of_every_stretch(self, tokenizer: Any, seed: int) -> None:
        windows = read_calibration(self.draw(5, 2, samples=21, sequence_length=4, seed=seed), tokenizer)
        two = (windows == 3).any(dim=1)
        assert two.sum() == 6
        for start, end in itertools.combinations(range(22), 2):
            assert abs(two[start:end].sum() - (end - start) * 6 / 21) <= 1

    @pytest.mark.usefixtures("texts")
    def test_a_source_that_is_too_short_is_named(self, tokenizer: Any) -> None:
        Path("two.txt").write_text("two")
        with pytest.raises(CalibrationError, match=r"^datasets\[1\]: calibration needs 2 sequences of 4 tokens"):
            read_calibration(self.draw(1, 1, samples=4, sequence_length=4), tokenizer)

    @pytest.mark.usefixtures("texts")
    def test_the_models_own_text_can_be_one_of_them(self, tokenizer: Any) -> None:
        mixed = Draw(datasets=[{"text": "one.txt"}, {"generate": {"samples": 8}}], samples=4, sequence_length=5)
        windows = read_calibration(
            mixed, tokenizer, lambda asked, draw: torch.full((asked.samples, draw.sequence_length), 9)
        )
        assert (windows == 9).all(dim=1).sum() == 2


class TestFingerprint:
    def test_the_same_ids_have_the_same_fingerprint_in_any_integer_type_and_layout(self) -> None:
        ids = torch.arange(12).view(3, 4)
        assert fingerprint(ids) == fingerprint(ids.int()) == fingerprint(ids.T.contiguous().T)
        assert len(fingerprint(ids)) == 64

    def test_order_shape_and_values_all_change_it(self) -> None:
        ids = torch.arange(12)
        assert len({fingerprint(x) for x in (ids, ids.flip(0), ids.view(3, 4), ids.view(4, 3), ids[:-1], ids + 1)}) == 6
