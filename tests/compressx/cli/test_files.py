from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compressx.cli.commands import TEXT, invoke, printed, refused
from tests.compressx.saved import save_tiny
from tests.compressx.two_of_four import two_of_four

from compressx.testing import tiny_model


@pytest.fixture
def pruned(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a tiny model in bfloat16, two of four weights zero."""
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
    folder = save_tiny(project / "tiny", "llama", torch.bfloat16)
    model = tiny_model("llama", dtype=torch.bfloat16)
    two_of_four(model).apply(model)
    model.save_pretrained(folder)
    return folder


def test_pack_and_unpack_write_beside_the_model_and_print_the_sizes(pruned: Path, monkeypatch) -> None:
    monkeypatch.chdir(pruned)
    shown = printed("pack", ".")
    assert "written to " + str(pruned.with_name("tiny-packed")) in shown
    rows = {re.sub(r"\s{2,}.*", "", line.strip()): line.split()[-3:] for line in shown.splitlines() if "%" in line}
    assert float(rows["tensors with zeros"][2].rstrip("%")) < 56.25, "of masks and values as they are"
    for column, folder in enumerate((pruned, pruned.with_name("tiny-packed"))):
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert float(rows["the whole folder"][column]) == pytest.approx(size / 1e6, abs=0.05)
    printed("unpack", str(pruned.with_name("tiny-packed")))
    again = pruned.with_name("tiny-packed-unpacked")
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {p.name: p.read_bytes() for p in pruned.iterdir()}


def test_inspect_eval_and_plan_take_a_packed_folder_for_a_model(pruned: Path) -> None:
    printed("pack", str(pruned), "-o", "packed")
    shown = printed("inspect", "packed")
    assert "Packed: packed" in shown
    assert "sparsity 50.00% of 21 linears" in shown
    dense, packed = (json.loads(printed("inspect", name, "--json")) for name in ("tiny", "packed"))
    assert (dense["packed"], packed["linears"]) == (None, dense["linears"])
    assert packed["packed"]["bytes"] == (pruned / "model.safetensors").stat().st_size
    assert printed("eval", "tiny", "--json", "--set", TEXT) == printed("eval", "./packed", "--json", "--set", TEXT)
    Path("recipe.yaml").write_text(
        "model: ./packed\nprune: [{pruner: magnitude, targets: ['*'], sparsity: 0.5}]\noutput: out\n"
    )
    assert "model.layers" in printed("plan", "recipe.yaml")


@pytest.fixture
def tuned(pruned: Path) -> Path:
    """A fine-tune of the tiny model, packed against it in `small`; the model itself is in `tuned`."""
    folder = save_tiny(pruned.with_name("tuned"), "llama", torch.bfloat16)
    weights = load_file(pruned / "model.safetensors")
    for weight in weights.values():
        weight.view(-1)[::10] *= 1.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    shown = printed("pack", "tuned", "--base", "tiny", "-o", "small")
    assert "tensors that differ" in shown
    assert "to be unpacked with its base, tiny" in shown
    return folder


def test_a_fine_tune_is_packed_against_its_base_and_restored_with_it(tuned: Path) -> None:
    found = json.loads(printed("unpack", "small", "--base", "./tiny", "-o", "again", "--json"))
    assert Path("again/model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()
    assert found["base"] == "tiny"
    assert {tensor["differs"] for tensor in found["tensors"]} == {True}
    small = found["packed_bytes"] / json.loads(printed("pack", "tuned", "-o", "alone", "--json"))["packed_bytes"]
    assert small < 0.5  # most of it is the header of so small a model
    assert "small holds what differs" not in printed("unpack", "alone", "-o", "x")
    told = refused("unpack", "small", "-o", "y")
    assert (
        "holds what differs from a base model (packed against tiny); give that model's folder or hub id by --" in told
    )
    assert "tuned is not packed against a base; leave --base" in refused("eval", "tuned", "--base", "tiny")


def test_all_commands_take_a_fine_tune_with_its_base(tuned: Path) -> None:
    asked = {
        "eval": ["--set", TEXT, "--json"], "generate": ["--prompt", "first words", "--full", "--max-new-tokens", "3"],
        "init": [],
    }  # fmt: skip
    for command, options in asked.items():
        assert "give that model's folder or hub id by --base" in refused(command, "./small", *options)
        shown = printed(command, "./small", "--base", "./tiny", *options)
        if command != "init":
            assert shown == printed(command, "./tuned", *options)
    assert 'model: {path: small, base: "./tiny"}' in shown
    Path("recipe.yaml").write_text(shown)
    text = "calibration={dataset: {text: text.txt}, samples: 4, sequence_length: 16}"
    keys = ["--set", text, "--set", "evaluate=null"]
    assert "model.layers" in printed("plan", "recipe.yaml", *keys)
    with_base = {"model.base": "./tiny", "output": "./tiny"}
    overwriting = [part for key, value in with_base.items() for part in ("--set", f"{key}={value}")]
    assert "output" in refused("plan", "recipe.yaml", *keys, *overwriting)
    printed("run", "recipe.yaml", *keys, "--set", "output=out")
    printed("apply", "out/masks.safetensors", "./small", "--base", "./tiny", "--output", "masked")
    assert "sparsity 50.00% of 21 linears" in printed("inspect", "masked")


def test_what_is_packed_or_holds_a_pickle_is_refused(pruned: Path) -> None:
    printed("pack", "tiny")
    assert "tiny-packed exists; name a new folder with -o" in refused("pack", "tiny")
    assert "tiny-packed is packed already" in refused("pack", "tiny-packed")
    (pruned / "model.safetensors").rename(pruned / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle checkpoint" in refused("pack", "tiny", "-o", "out")


def test_ctrl_c_ends_a_pack_in_one_line_and_leaves_nothing(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compressx.models.packed_folder.pack_file", stopped)
    done = invoke("pack", "tiny")
    assert done.exit_code == 130
    assert done.stderr.strip() == "interrupted"
    assert not [p for p in pruned.parent.iterdir() if "partial" in p.name]
