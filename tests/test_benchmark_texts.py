"""The texts behind the results: what `benchmarks/texts.py` makes of a data set's rows."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest

_ROWS = ["", " = Otter = \n", "", " It swims . It eats fish . \n", " It has <unk> . \n", "", "", " = <unk> = \n", ""]
_KNOWN = "\n = Otter = \n\n It swims . It eats fish . \n\n"
_CONFIGS = {"wikitext-2-v1": "validation", "wikitext-2-raw-v1": "test"}


@pytest.fixture(scope="module")
def texts() -> ModuleType:
    return importlib.import_module("texts")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """The rows as a data set of the same configurations and splits, in a folder."""
    folder = tmp_path / "wikitext"
    folder.mkdir()
    configs = ""
    for config, split in _CONFIGS.items():
        (folder / f"{config}.jsonl").write_text("".join(json.dumps({"text": r}) + "\n" for r in _ROWS))
        configs += f"- config_name: {config}\n  data_files: [{{split: {split}, path: {config}.jsonl}}]\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return folder


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (" A <unk> b . C d . \n", " C d . \n"),
        (" A ? <unk> ! B \n", " A ? B \n"),
        (" H. gammarus and No. 2 of <unk> . \n", ""),  # abbreviations end no sentence
        (" A [ ... ] <unk> ; b . \n", ""),
        (' A . " <unk> . " \n', ' A . " \n'),  # a closing quotation mark counts with what follows
    ],
)
def test_a_sentence_ends_with_a_mark_that_stands_alone(texts, row, kept):
    assert texts.without_unknown_words([row]) == kept


def test_both_texts_are_written_and_others_than_the_measured_ones_are_told(
    texts, dataset, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["texts.py", "--output", str(tmp_path / "out"), "--dataset", str(dataset)])
    with pytest.raises(SystemExit, match=r"valid\.txt and test\.txt: not the text"):
        texts.main()
    assert (tmp_path / "out/valid.txt").read_bytes() == _KNOWN.encode()
    assert (tmp_path / "out/test.txt").read_bytes() == "\n\n".join(_ROWS).encode()
    told = capsys.readouterr().out
    assert f"sha256   {sha256(_KNOWN.encode()).hexdigest()}\n  expected {texts.TEXTS[0].sha256}" in told

    found = [sha256((tmp_path / "out" / text.name).read_bytes()).hexdigest() for text in texts.TEXTS]
    expected = tuple(replace(text, sha256=digest) for text, digest in zip(texts.TEXTS, found, strict=True))
    monkeypatch.setattr(texts, "TEXTS", expected)
    texts.main()  # ends without complaint
