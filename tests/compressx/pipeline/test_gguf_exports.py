"""Runs and `compressx export` that write GGUF files: what is refused early, and what the report says of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from tests.compressx.cli.commands import printed, refused
from tests.compressx.gguf_files import tiny_of, write_gguf, write_like
from tests.compressx.llama_cpp import agrees, tokens_of
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compressx import CompressxError, plan, run
from compressx.models.checkpoint import Checkpoint
from compressx.models.gguf_header import GgufHeader
from compressx.models.loading import load_tokenizer
from compressx.recipe.document import dump_yaml
from compressx.testing.models import save_tiny_model, tiny_text


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a b c d e f g ab cd . " * 60)
    return write_gguf(tmp_path / "dense.gguf", scale=0.15)


def recipe(model: Path | str, **values: Any) -> dict[str, Any]:
    pruned = {"targets": ["*.mlp.*"], "pruner": "magnitude", "pattern": "neurons", "sparsity": 0.4}
    measured = {"dataset": {"text": "text.txt"}, "sequence_length": 16, "samples": 2}
    whole = {"model": str(model), "prune": [pruned], "evaluate": {"token_perplexity": measured}, "output": "out"}
    return {**whole, **values}


def test_the_report_has_the_perplexity_and_the_zeros_of_the_file_itself(dense: Path):
    written = {"format": "gguf", "options": {"type": "Q4_0"}}
    report = run(recipe(dense, export=["safetensors", written]))
    (_, found) = report.exports
    path = Path("out/exports/gguf/model.gguf")
    assert GgufHeader.of(path).shapes["blk.0.ffn_up.weight"] == (64, 64)
    assert found["bytes"] == path.stat().st_size
    Path("r.yaml").write_text(dump_yaml(recipe(dense)))
    assert json.loads(printed("eval", str(path), "--recipe", "r.yaml", "--json")) == found["evaluation"]
    assert found["evaluation"] != report.evaluation["pruned"]
    assert 0 < found["zeros"] < 0.3  # none of the dropped neurons, and what Q4_0 rounds to zero
    assert "Written files, read again" in Path("out/report.md").read_text()
    printed("export", "out", "--like", "r.yaml", "--type", "Q4_0", "-o", "again.gguf")  # like the file that it prunes
    assert Path("again.gguf").read_bytes() == path.read_bytes()
    printed("pack", "out", "-o", "packed")
    printed("export", "packed", "--like", str(dense), "--type", "Q4_0", "-o", "unpacked.gguf")
    assert Path("unpacked.gguf").read_bytes() == path.read_bytes()
    assert "output again.gguf exists" in refused("export", "out", "-o", "again.gguf")
    assert "--set type: type is 'Q4_K'" in refused("export", "out", "--type", "Q4_K", "-o", "x.gguf")
    assert "unknown option 'tpye'" in refused("export", "out", "--set", "tpye=F16", "-o", "x.gguf")
    assert "is a GGUF file, and packed is made of a folder" in refused(
        "export", str(dense), "--format", "packed", "-o", "x"
    )
    assert "written to copy, " in printed("export", "out", "--format", "safetensors", "-o", "copy")
    assert Path("copy/model.safetensors").read_bytes() == Path("out/model/model.safetensors").read_bytes()


def test_what_cannot_be_written_is_refused_before_weights_are_read(dense: Path, tmp_path: Path):
    folder = save_tiny_model(tmp_path / "model", "gemma2")
    Path("text.txt").write_text(tiny_text())
    model = tiny_of("gemma2")
    foreign = write_gguf(tmp_path / "foreign.gguf", keys={"general.architecture": "gpt-neo"})
    mute = write_gguf(tmp_path / "mute.gguf", keys={"tokenizer.ggml.tokens": None})
    for export, more, told in (
        ({}, {}, r"export\[0\]: format gguf: the token 'w0' takes spaces .* like: FILE under options, or after --like"),
        ({"like": "nowhere.gguf"}, {}, r"export\[0\]: .*nowhere.gguf does not exist"),
        ({"like": str(folder)}, {}, r"export\[0\]: like: .*model is a folder, expected a GGUF file"),
        ({"like": str(foreign)}, {}, r"export\[0\]: .*architecture gpt-neo is not supported"),
        ({"like": str(mute)}, {}, r"export\[0\]: .*mute.gguf has no tokenizer.ggml.tokens"),
        ({"like": str(dense)}, {}, r"export\[0\]: .*dense.gguf is of another model: its model_type is 'llama'"),
        ({"type": "IQ2_XS"}, {}, r"export\[0\].options.type: .*llama-quantize FILE IQ2_XS"),
    ):
        with pytest.raises(CompressxError, match=told):
            plan(recipe(folder, export=[{"format": "gguf", "options": export}], **more))
    with pytest.raises(CompressxError, match=r"unknown key 'type' in export\[0\]; valid: format, options"):
        plan(recipe(dense, export=[{"format": "gguf", "type": "Q8_0"}]))
    own = {"prune": [{"targets": ["*.mlp.*"], "pruner": "magnitude", "pattern": "neurons"}],
           "allocation": {"method": "divergence", "target": 0.4},
           "calibration": {"dataset": {"text": "text.txt"}}}  # fmt: skip
    model.save_pretrained(folder)
    like = write_like(tmp_path / "like.gguf", model, "gemma2")
    with pytest.raises(
        CompressxError, match=r"one width for all blocks of gemma2, .*drop allocation, and give each rule"
    ):
        plan(recipe(folder, export=[{"format": "gguf", "options": {"like": str(like)}}], **own))


@pytest.mark.parametrize("setting", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_a_like_file_of_a_model_with_another_softcap_is_refused(setting: str, tmp_path: Path):
    model = tiny_of("gemma2")
    caps = {name: float(getattr(model.config, name)) for name in ("final_logit_softcapping", "attn_logit_softcapping")}
    write_like(tmp_path / "like.gguf", model, "gemma2", caps)
    setattr(model.config, setting, 10.0)
    folder = save_tiny_model(tmp_path / "model", "gemma2")
    model.save_pretrained(folder)
    told = refused("export", str(folder), "--like", str(tmp_path / "like.gguf"), "-o", str(tmp_path / "x.gguf"))
    assert setting in told
    assert re.search(r"\b10(\.0)?\b", told), "the model's value is named"
    assert not (tmp_path / "x.gguf").exists()


def test_an_output_folder_that_holds_the_like_file_is_not_replaced(dense: Path):
    Path("out").mkdir()
    like = dense.rename("out/dense.gguf")
    other = write_gguf(Path("other.gguf"))
    with pytest.raises(CompressxError, match=r"output out would overwrite the file of export\[0\].options.like"):
        plan(recipe(other, export=[{"format": "gguf", "options": {"like": str(like)}}]))


def test_a_streamed_run_writes_the_file_and_says_that_it_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(tiny_text())
    folder = save_tiny_model(tmp_path / "model", "llama")
    model = tiny_of("llama")
    model.save_pretrained(folder)
    like = write_like(tmp_path / "like.gguf", model, "llama")
    given = {"path": str(folder), "streaming": True}
    report = run({**recipe(folder), "model": given, "export": [{"format": "gguf", "options": {"like": str(like)}}]})
    assert [{*x} for x in report.exports] == [{"format", "folder", "bytes"}]
    log = Path("out/run.log").read_text()
    assert "gguf: llama, 3 blocks, 64 neurons, 2 key/value groups" in log
    assert "gguf: not measured, since model.gguf would have to be read whole" in log


@pytest.mark.parametrize(
    ("pattern", "told"),
    [("neurons", "llama, 2 blocks, 64 neurons, 4 key/value groups"),
     ("kv-groups", "llama, 2 blocks, 96 neurons, 2 key/value groups"),
     ("blocks", "llama, 1 blocks, 96 neurons, 4 key/value groups")],
)  # fmt: skip
def test_llama_cpp_computes_what_the_smaller_model_of_a_run_does(dense: Path, pattern: str, told: str):
    pruned = {"targets": ["*"], "pruner": "depth" if pattern == "blocks" else "magnitude", "pattern": pattern,
              "sparsity": 0.5 if pattern != "neurons" else 0.4}  # fmt: skip
    written = [{"format": "gguf", "options": {"type": "F16"}}, "safetensors"]
    text = {"dataset": {"text": "text.txt"}, "samples": 2, "sequence_length": 16}
    run(recipe(dense, prune=[pruned], shrink=True, export=written, calibration=text, evaluate=None))
    assert f"gguf: {told}" in Path("out/run.log").read_text()
    model = AutoModelForCausalLM.from_pretrained("out/model").eval()
    assert agrees(model, Path("out/exports/gguf/model.gguf"), [5, 6, 7, 8, 9])


def test_widths_that_an_allocation_gave_each_block_are_written(dense: Path):
    pruned = {"targets": ["*.mlp.*"], "pruner": "magnitude", "pattern": "neurons"}
    sections = {"calibration": {"dataset": {"text": "text.txt"}, "samples": 4, "sequence_length": 16},
                "allocation": {"method": "divergence", "target": 0.5}}  # fmt: skip
    run(recipe(dense, prune=[pruned], evaluate=None, export=["safetensors", "gguf"], **sections))
    model = AutoModelForCausalLM.from_pretrained("out/model").eval()
    alive = [int((x.mlp.down_proj.weight != 0).any(dim=0).sum()) for x in model.model.layers]
    path = Path("out/exports/gguf/model.gguf")
    shapes = GgufHeader.of(path).shapes
    assert [shapes[f"blk.{i}.ffn_up.weight"][0] for i in (0, 1)] == alive
    assert alive[0] != alive[1]
    assert GgufHeader.of(path).values["general.architecture"] == "deci"
    printed("export", "out", "--like", "out/recipe.yaml", "--type", "F16", "-o", "f16.gguf")
    assert agrees(model, Path("f16.gguf"), [5, 6, 7, 8, 9])


TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"


def with_tokenizer(folder: Path) -> Any:
    """Save a tiny Llama whose byte-level tokenizer has 300 tokens; the last 20 rows of 320 are padding."""
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    special = ["<s>", "</s>", "<|spare|>", "<pad>"]
    made.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog and the rest of the text " * 9],
        BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False),
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **names, chat_template=TEMPLATE)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes, bos_token_id=0, eos_token_id=1)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_like(folder.parent / "base.gguf", model, "llama", {"rope.dimension_count": 16}, tokenizer)
    return tokenizer


def changed_file(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "tokenizer.json"
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))


def swapped(held: list[Any], i: int, j: int) -> None:
    held[i], held[j] = held[j], held[i]


def renamed(held: dict[str, Any]) -> None:
    held["added_tokens"][2]["content"] = "<|turn|>"
    held["model"]["vocab"]["<|turn|>"] = held["model"]["vocab"].pop("<|spare|>")


def permuted(held: dict[str, Any]) -> None:
    vocabulary = held["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def forgotten(held: dict[str, Any]) -> None:
    del held["added_tokens"][2], held["model"]["vocab"]["<|spare|>"]


def begun(held: dict[str, Any]) -> None:
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    held["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


CHANGES: dict[str, tuple[Callable[[Any], object], dict[str, Any] | str]] = {
    "nothing": (lambda _: None, {}),
    "tokens in rows of padding": (
        lambda t: (t.add_tokens(["<think>"]), t.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})),
        {"tokens[300]": "<think>", "tokens[301]": "<|turn|>", "token_type[300]": 4, "token_type[301]": 3},
    ),
    "a spare token with another name": (renamed, {"tokens[2]": "<|turn|>", "token_type[2]": 3}),
    "a token that is gone": (forgotten, {"tokens[2]": "[PAD2]", "token_type[2]": 5}),
    "the end of a text": (lambda t: setattr(t, "eos_token", "<|spare|>"), {"eos_token_id": 2, "eot_token_id": 1}),
    "its beginning": (lambda t: setattr(t, "bos_token", "<|spare|>"), {"bos_token_id": 2}),
    "padding": (lambda t: setattr(t, "pad_token", "<|spare|>"), {"padding_token_id": 2}),
    "a text begins with BOS": (begun, {"add_bos_token": True}),
    "where generation stops": ({"eos_token_id": [2, 300]}, {"eot_token_id": 2}),
    "the chat template": (lambda t: setattr(t, "chat_template", "{{ messages }}"), {"chat_template": "{{ messages }}"}),
    "no chat template": (lambda t: setattr(t, "chat_template", None), {"chat_template": None}),
    "two chat templates": (
        lambda t: setattr(t, "chat_template", {"default": TEMPLATE, "tools": "x"}),
        {"chat_template.tools": "x", "chat_template": TEMPLATE, "chat_templates": ["default", "tools"]},
    ),
    "a vocabulary in another order": (permuted, r"base.gguf is of another model: its token \d+ is 'a', and 'b' in"),
    "merges in another order": (
        lambda held: swapped(held["model"]["merges"], 3, 4),
        "base.gguf is of another model: its merge 3 is '.*', and '",
    ),
    "one merge less": (
        lambda held: held["model"]["merges"].pop(),
        r"its merge \d+ is '.*', and None in the one to export",
    ),
}


READ_BY_LLAMA_CPP = ("nothing", "tokens in rows of padding", "a spare token with another name")


def metadata(path: Path) -> dict[str, Any]:
    """Return the tokenizer's metadata in a file by key, without `tokenizer.ggml.`."""
    found = {key: x.contents() for key, x in GGUFReader(path).fields.items() if key.startswith("tokenizer.")}
    return {key.removeprefix("tokenizer.").removeprefix("ggml."): x for key, x in found.items()}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_has_the_tokenizer_of_the_model_and_never_that_of_the_like_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox " * 60)
    folder = tmp_path / "model"
    tokenizer, (change, expected) = with_tokenizer(folder), CHANGES[name]
    if isinstance(change, dict):
        (folder / "generation_config.json").write_text(json.dumps(change))
    elif change.__name__ in {"renamed", "permuted", "forgotten", "begun"} or "merge" in name:
        changed_file(folder, change)
    else:
        change(tokenizer)
        (folder / "chat_template.jinja").unlink()
        tokenizer.save_pretrained(folder)
    export = {"format": "gguf", "options": {"like": "base.gguf", "type": "F16"}}
    if isinstance(expected, str):
        with pytest.raises(CompressxError, match=rf"export\[0\]: .*{expected}"):
            plan(recipe(folder, export=[export]))
        assert re.search(expected, refused("export", str(folder), "--like", "base.gguf", "-o", "x.gguf"))
        return
    told = printed("export", str(folder), "--like", "base.gguf", "--type", "F16", "-o", "x.gguf")
    assert ("the model's own" in told) == bool(expected)
    base, found = metadata(Path("base.gguf")), metadata(Path("x.gguf"))
    for where, value in expected.items():
        key, _, place = where.partition("[")
        assert (found[key][int(place[:-1])] if place else found.get(key)) == value, key
    differ = {key for key in {*found} | {*base} if found.get(key) != base.get(key)}
    assert differ <= {key.partition("[")[0] for key in expected}, "and nothing else is another"
    if name in READ_BY_LLAMA_CPP:
        texts = ["the lazy dog", "<|turn|>the quick <think>fox<|turn|>", "Déjà\n\n  vu 123<|spare|>", "<s>x</s>"]
        read = load_tokenizer(Checkpoint(str(folder)))
        assert tokens_of(Path("x.gguf"), texts) == read(texts, add_special_tokens=False)["input_ids"]


def test_a_folder_is_written_without_a_file_of_the_dense_model_in_a_run_and_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox " * 60)
    with_tokenizer(Path("model"))
    Path("base.gguf").unlink()
    Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    own = {"prune": [{"targets": ["*.mlp.*"], "pruner": "magnitude", "pattern": "neurons"}],
           "calibration": {"dataset": {"text": "text.txt"}, "samples": 4, "sequence_length": 16},
           "allocation": {"method": "divergence", "target": {"bytes": 200_000}}}  # fmt: skip
    written = {"format": "gguf", "options": {"type": "F16"}}
    report = run(recipe("./model", export=["safetensors", written], **own))
    path = Path("out/exports/gguf/model.gguf")
    assert report.exports[1]["bytes"] == path.stat().st_size <= 200_000
    model = AutoModelForCausalLM.from_pretrained("out/model").eval()
    assert agrees(model, path, [5, 6, 7, 8, 9])
    assert report.exports[1]["evaluation"]["token_perplexity"] == pytest.approx(
        report.evaluation["pruned"]["token_perplexity"], rel=1e-3
    )
    told = printed("export", "out", "--type", "F16", "-o", "again.gguf")
    assert re.search(r"again.gguf, .* MB, in .* s: \w+, 2 blocks, .*4 key/value groups$", told.strip())
    assert Path("again.gguf").read_bytes() == path.read_bytes()
    found = metadata(path)
    assert (found["eos_token_id"], found["eot_token_id"], found["chat_template"]) == (1, 2, TEMPLATE)
    texts = ["the lazy dog", "the quick fox<|spare|>", "Déjà\n\n  vu 123", "<s>x</s>"]
    read = load_tokenizer(Checkpoint("model"))
    assert tokens_of(path, texts) == read(texts, add_special_tokens=False)["input_ids"]
