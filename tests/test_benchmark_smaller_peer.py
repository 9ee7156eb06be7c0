"""What smaller_peer.py asks of torch-pruning and makes of its answer, with a stand-in that drops neurons as it does."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compressx.saved import save_tiny
from torch import nn
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow
SPARSITY = 0.3


class Pruner:
    """Drops neurons of the linears that are not ignored, `more` than asked."""

    more = 0

    def __init__(
        self, model: Any, *, example_inputs: Any, importance: Any, global_pruning: bool, pruning_ratio: float,
        ignored_layers: list[nn.Module],
    ) -> None:  # fmt: skip
        assert isinstance(model(example_inputs).logits, torch.Tensor)
        assert not global_pruning
        assert not model.config.use_cache
        taken = {m for m in model.modules() if isinstance(m, nn.Linear)} - set(ignored_layers)
        assert taken == {x for layer in model.model.layers for x in (layer.mlp.gate_proj, layer.mlp.up_proj)}
        self.mlps, self.by, self.ratio = [layer.mlp for layer in model.model.layers], importance, pruning_ratio

    def step(self, *, interactive: bool) -> Iterator[Any]:
        assert interactive
        for mlp in self.mlps:
            yield SimpleNamespace(prune=partial(self.prune, mlp))

    def prune(self, mlp: Any) -> None:
        inner = mlp.gate_proj.out_features
        left = int(inner * (1 - self.ratio)) - self.more
        keep = self.by(mlp).topk(left).indices.sort().values
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight, linear.out_features = nn.Parameter(linear.weight[keep]), left
        mlp.down_proj.weight, mlp.down_proj.in_features = nn.Parameter(mlp.down_proj.weight[:, keep]), left


def norm(mlp: Any) -> torch.Tensor:
    return mlp.gate_proj.weight.detach().norm(dim=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", "llama")


@pytest.fixture
def measure(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, float]]]:
    """Run smaller_peer.py with the stand-in in this process; gives its rows."""
    program, peer = importlib.import_module("smaller_peer"), importlib.import_module("torch_pruning_peer")

    def in_process(command: list[str], *, check: bool) -> None:
        task = json.loads(Path(command[2]).read_text())
        with torch.enable_grad():
            Path(task["result"]).write_text(json.dumps(peer.prune(task)))

    def run(*importances: str) -> dict[str, dict[str, float]]:
        importance = SimpleNamespace(
            GroupMagnitudeImportance=lambda **_: norm, GroupTaylorImportance=None, ActivationImportance=None
        )  # fmt: skip
        fake = SimpleNamespace(importance=importance, pruner=SimpleNamespace(MetaPruner=Pruner))
        monkeypatch.setitem(sys.modules, "torch_pruning", fake)
        monkeypatch.setattr(program.subprocess, "run", in_process)
        text = model.with_name("text.txt")
        monkeypatch.setattr(sys, "argv", [
            "smaller_peer.py", "--model", str(model), "--calibration", str(text), "--evaluation", f"prose={text}",
            "--output", str(tmp_path / "out"), "--peer", "python", "--samples", "8", "--sequence-length", "32",
            "--windows", "2", "--sparsity", str(SPARSITY), "--importances", *importances,
        ])  # fmt: skip
        program.main()
        rows: dict[str, dict[str, float]] = json.loads((tmp_path / "out/smaller-peer.json").read_text())
        return rows

    return run


def test_the_smaller_model_is_measured_as_the_dense_one_without_the_dropped_neurons(measure, model, tmp_path):
    rows = measure("magnitude")
    from quality import Settings, dense

    zeroed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inner, width = zeroed.config.intermediate_size, zeroed.config.hidden_size
    dropped = round(SPARSITY * inner)
    for layer in zeroed.model.layers:
        layer.mlp.down_proj.weight.data[:, norm(layer.mlp).topk(dropped, largest=False).indices] = 0.0
    folder = tmp_path / "out" / "dense"
    settings = Settings(str(folder), "", {"prose": str(model.with_name("text.txt"))}, 8, 32, 2, "float32")
    assert rows["dense"]["perplexity prose"] == dense(settings)["perplexity prose"]
    zeroed.save_pretrained(folder)
    expected = dense(replace(settings))["perplexity prose"]
    assert rows["magnitude"]["perplexity prose"] == pytest.approx(expected, rel=1e-5)
    assert rows["magnitude"]["gone"] == dropped * 3 * width * len(zeroed.model.layers)
    assert "| magnitude | " in (tmp_path / "out/smaller-peer.md").read_text()
