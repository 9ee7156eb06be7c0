"""What the tests of whole runs share: a recipe for a tiny model, and what a run leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from compressx import hookimpl
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_model
from compressx.pipeline.run import run
from compressx.plugins.manager import load_plugins
from compressx.recipe.sources import ModelSource
from compressx.stages import store as journal

MAGNITUDE: dict[str, Any] = {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}
_PYTHON_DOCS = Path(__file__).parents[3] / "recipes/tasks/python_docs.yaml"
TASKS = {"lm_eval": {"tasks": [str(_PYTHON_DOCS)], "trust_task_code": True, "limit": 1}}
MIXED: tuple[dict[str, Any], ...] = (
    {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.6},
    {"targets": ["*.v_proj"], "pruner": "wanda", "sparsity": 0.5, "reconstruct": "sparsegpt"},
    {"targets": ["*"], "pruner": "sparsegpt", "pattern": "2:4"},
)


def recipe(
    model: Path, /, *rules: dict[str, Any], evaluated: bool = False, output: str = "out", **sections: Any
) -> dict[str, Any]:
    """Return a recipe for a saved model and the text beside it; without rules, wanda prunes half of everything."""
    text = {"text": str(model.with_name("text.txt"))}
    whole: dict[str, Any] = {
        "model": {"path": str(model)},
        "calibration": {"dataset": text, "samples": 8, "sequence_length": 32},
        "prune": list(rules) or [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}],
        "output": output,
    }
    if evaluated:
        whole["evaluate"] = {"token_perplexity": {"dataset": text, "sequence_length": 32, "samples": 4}}
    return whole | sections


def files(folder: str | Path) -> dict[Path, bytes]:
    """Return every file below a folder."""
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same weights to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loaded(folder: str | Path) -> Any:
    """Load a saved model."""
    return load_model(find_checkpoint(ModelSource(path=Path(folder))))


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a saved model."""
    return dict(loaded(folder).state_dict())


def artifacts(folder: str) -> dict[str, bytes]:
    """Return every file of an output; of its reports all but what is measured by the timing."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}
    report = json.loads(found.pop("report.json"))
    del found["report.md"], found["report.html"], found["run.log"]  # the same content for people, and times
    for name in ("seconds", "peak_memory_bytes", "peak_gpu_memory_bytes", "date"):
        del report[name]
    if report["arithmetic"]:
        report["arithmetic"]["rates"] = sorted(report["arithmetic"]["rates"])  # measured, as times are
    for block in report["blocks"]:
        for timed in (block, *block["layers"]):
            del timed["seconds"]
        if block["reconstruction"] is not None:
            del block["reconstruction"]["seconds"]
    for check in (report["finetune"] or {}).get("held_out", ()):
        del check["seconds"]
    found["recipe.yaml"] = found["recipe.yaml"].replace(folder.encode(), b"out")
    return {**found, "report": json.dumps(report).encode()}


def leftovers() -> list[Path]:
    """Return what interrupted runs into `out` have left."""
    return sorted(Path().glob(".out.partial-*"))


class _Stopping:
    """A plugin that stops a run after so many blocks."""

    def __init__(self, after: int) -> None:
        self.left = after

    @hookimpl
    def compressx_block_pruned(self, report: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def stopped(
    asked: dict[str, Any], after: int, modules: tuple[str, ...] = (), share: float = math.inf, **options: Any
) -> Path:
    """Interrupt a run after so many blocks; returns what it left. `share` is that of the time for hidden states."""
    plugins = load_plugins(modules=modules)
    plugins.manager.register(_Stopping(after), name="stopping")
    with patch.object(journal, "SHARE", share), pytest.raises(KeyboardInterrupt):
        run(asked, plugins=plugins, **options)
    (left,) = leftovers()
    return left


def stopped_at(asked: dict[str, Any], stage: str, step: int, **options: Any) -> Path:
    """Interrupt a run at a step of a stage; returns what it left."""

    def progress(name: str, done: int, *_: Any) -> None:
        if (name, done) == (stage, step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, progress=progress, **options)
    (left,) = leftovers()
    return left
