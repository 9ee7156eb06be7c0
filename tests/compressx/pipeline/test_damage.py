"""Models that are damaged and recipes that would leave nothing: each an error that names what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compressx.pipeline.runs import recipe

from compressx import ArtifactError, RecipeError, run

UP = "model.layers.1.mlp.up_proj.weight"
QUERY_KEY = ["*.q_proj", "*.k_proj"]


def tampered(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def prune(model: Path, tmp_path: Path) -> Callable[..., Any]:
    def prune(damaged: Path = model, *, streaming: bool = False, **rule: Any) -> Any:
        whole = {"targets": ["*"], "pruner": "wanda", "sparsity": 0.5, **rule}
        source = {"path": str(damaged), "streaming": streaming}
        return run({**recipe(model, whole), "model": source, "output": str(tmp_path / "out")}, replace=True)

    return prune


@pytest.mark.parametrize(
    ("pruner", "value", "streaming"),
    [("magnitude", "nan", True), ("wanda", "-inf", False), ("sparsegpt", "nan", False), ("alps", "-inf", True),
     ("attnprune", "nan", False)],
)  # fmt: skip
def test_a_weight_that_is_not_finite_is_named_whatever_the_pruner(pruner, value, streaming, model, prune, tmp_path):
    damaged = tampered(model, tmp_path / "damaged", lambda t: t[UP][3, 5].fill_(float(value)))
    with pytest.raises(ArtifactError, match=rf"^{UP} has NaN or infinite values"):
        prune(damaged, pruner=pruner, streaming=streaming, targets=QUERY_KEY if pruner == "attnprune" else ["*"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_weight_that_is_missing_or_of_another_shape_or_a_corrupt_file_is_named(streaming, model, prune, tmp_path):
    for name, change, told in (
        ("lacking", lambda t: t.pop(UP), f": the checkpoint lacks {UP}"),
        ("shorter", lambda t: t.update({UP: t[UP][:-1].contiguous()}), rf".*{UP}.*\[95, 64\]"),
        ("corrupt", lambda _: None, ".*header"),
    ):
        damaged = tampered(model, tmp_path / name, change)
        file = damaged / "model.safetensors"
        whole = file.read_bytes()
        contents = (whole[:-100], whole[:8] + b"xx" + whole[10:], b"") if name == "corrupt" else (whole,)
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(ArtifactError, match=f"{name}{told}"):
                prune(damaged, streaming=streaming)


@pytest.mark.parametrize("pruner", ["wanda", "sparsegpt", "alps", "attnprune"])
def test_inputs_that_are_all_zero_are_pruned_like_any_others(pruner, model, prune, tmp_path):
    silent = tampered(model, tmp_path / "silent", lambda t: t["model.layers.1.input_layernorm.weight"].zero_())
    assert prune(silent, pruner=pruner, targets=QUERY_KEY if pruner == "attnprune" else ["*"]).sparsity == 0.5


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"sparsity": 0.999, "group": "row"}, "none of the 64 weights in each row of .*; at most 0.984375 keeps"),
        ({"sparsity": 0.9999, "group": "layer"}, "none of the 4096 weights in all rows of .*q_proj; at most 0.999756"),
        ({"sparsity": 0.99995, "group": "joint", "targets": QUERY_KEY},
         r"none of the 6144 weights in the joint group of .*; at most 0\.9998"),
    ],
)  # fmt: skip
def test_a_sparsity_that_leaves_rows_empty_is_refused_with_the_highest_that_does_not(rule, message, prune):
    with pytest.raises(RecipeError, match=rf"prune\[0\]\.sparsity: sparsity 0\.999.* keeps {message}"):
        prune(**rule)


def test_the_highest_sparsity_that_is_named_is_accepted_and_may_leave_one_of_several_linears_empty(prune):
    assert prune(sparsity=0.984375, group="row", targets=["*.q_proj"]).sparsity == 0.984375
    report = prune(sparsity=0.9998, group="joint", targets=QUERY_KEY)
    assert any(x.sparsity == 1 for x in report.layers)
