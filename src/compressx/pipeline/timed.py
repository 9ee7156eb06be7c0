"""`compressx plan --time`: one block is pruned by the code of a run, on the recipe's text, measured, and multiplied."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from compressx.allocation.methods import allocate, stored_windows
from compressx.blocks.base import open_base_of
from compressx.blocks.fisher import CHANNEL_WINDOWS, ROW_WINDOWS, FisherDiagonal, fisher_diagonal
from compressx.blocks.prune import prune_model, resumable
from compressx.models.architecture import survey
from compressx.models.blockwise import HiddenStates, advance, capture, each_block
from compressx.models.shards import OUTSIDE
from compressx.pipeline.inputs import choose_arithmetic, opened, read_calibration_text
from compressx.pipeline.stages import memory_advised
from compressx.planning.plan import Plan
from compressx.recipe.schema import Recipe
from compressx.runtime.modes import deterministic, reuse_freed_memory, torchs_own_modes
from compressx.runtime.ranks import ALONE
from compressx.runtime.timing import Timing, forget_peaks, peak_gpu_bytes, peak_resident_bytes, synchronize
from compressx.stages.log import run_log
from compressx.stages.state import Progress, RunState
from compressx.stages.store import InMemoryStore

_BEFORE = 2
"""Dense blocks that the text passes before the block that is timed, whichever that is: enough for plausible inputs."""


@dataclass(frozen=True)
class RunTime:
    """What a run will take on a device, from what one block of each kind took.

    Attributes:
        device: the device.
        seconds: by stage.
        blocks: to prune; the linears outside the blocks count as one.
        peak_memory_bytes: of the process.
        peak_gpu_memory_bytes: of tensors on GPUs; 0 without one.
        left_out: parts of the run that are not in these figures.
    """

    device: str
    seconds: dict[str, float]
    blocks: int
    peak_memory_bytes: int
    peak_gpu_memory_bytes: int
    left_out: tuple[str, ...]

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {**asdict(self), "total_seconds": self.total}


@reuse_freed_memory()
@torchs_own_modes()
def time_run(state: RunState, progress: Progress | None = None) -> RunTime:
    """Load the model and measure what a run does with one block of each kind. Nothing but temporary files is written.

    Args:
        state: of a planned run; its plan is left as it is.
        progress: as for a run.

    Raises:
        CompressxError: as a run.
    """
    forget_peaks()
    asked = state.plan
    with run_log(first=True, file=None) as log, TemporaryDirectory(prefix="compressx-") as folder:
        state = replace(state, log=log, timing=Timing("load"), progress=progress, replace=False)
        state.plan, state.store = _without_depth(asked), InMemoryStore(Path(folder))
        with deterministic(state.recipe.deterministic, state.device), memory_advised(state):
            _open(state)
            seconds = {"load": state.timing.seconds()["total"]}
            seconds["calibrate"] = _calibrate(state)
            if state.plan.allocation is not None:
                seconds["allocate"] = _allocate(state)
            kinds = _kinds(state.plan)
            seconds["prune"] = sum(count * _prune(state, fqn) for fqn, count in kinds.items())
            return RunTime(
                str(state.device), seconds, sum(kinds.values()), peak_resident_bytes(), peak_gpu_bytes(),
                tuple(_left_out(state.recipe, asked)),
            )  # fmt: skip


def _without_depth(planned: Plan) -> Plan:
    """Return a plan without the rule that drops whole blocks, which prunes no linear."""
    if planned.depth is None:
        return planned
    drops = planned.depth.rule
    linears = tuple(x for x in planned.linears if x.rule != drops)
    return replace(planned, linears=linears, rules=tuple(r for r in planned.rules if r != drops), depth=None)


def _open(state: RunState) -> None:
    """Read the calibration text and open the model, as a run does."""
    state.open = cache(lambda: opened(state))
    state.report_progress("load", 0, 2)
    read_calibration_text(state)
    state.report_progress("load", 1, 2)
    state.access = state.open()
    open_base_of(state)
    choose_arithmetic(state)


def _calibrate(state: RunState) -> float:
    """Measure gradients of two batches; return the seconds of all batches that a run measures."""
    names, batches = state.plan.sensitive, state.batches
    state.sensitivities = FisherDiagonal()
    if not state.plan.reads_gradients:
        return 0.0
    state.report_progress("calibrate", 0, 1)
    found, clock = survey(state.access.model), list[float]()
    some = batches if any(x.expert is not None for x in found.linears.values()) else batches[:2]  # reach all experts

    def progress(_done: int, _total: int) -> None:
        clock.append(_now(state.access.device))

    state.sensitivities = fisher_diagonal(state.calibrated, found, names, some, progress=progress)
    progress(0, 0)
    seen, wanted = sum(map(len, some)), ROW_WINDOWS if names else CHANNEL_WINDOWS
    left = max(0, min(sum(map(len, batches)), wanted) - seen)
    each = (clock[-1] - clock[-2]) * (len(clock) - 1) / seen  # of the last group: a GPU loads its kernels in the first
    return clock[-1] - clock[0] + left * each


class _EnoughError(Exception):
    """Ends an allocation once two blocks are measured."""


def _allocate(state: RunState) -> float:
    """Let the recipe's allocation measure two blocks; return the seconds of all."""
    plan, settings, device = state.plan, state.plan.allocation, state.access.device
    assert settings is not None  # noqa: S101 - the caller has looked
    clock = [_now(device)]

    def progress(done: int, total: int, note: str) -> None:
        state.report_progress("allocate", done, total, note)
        if done:
            clock.append(_now(device))
        if done == 2:
            raise _EnoughError

    windows = stored_windows(plan, settings, sum(map(len, state.batches)))
    with suppress(_EnoughError), state.loaded.at("allocation"):
        allocate(
            state.pruned_against, plan, settings, state.batches, state.sensitivities.linears, progress,
            state.keep("allocation", windows),
        )  # fmt: skip
    blocks = len({x.block for x in plan.linears if x.block})
    return clock[1] - clock[0] + (blocks - 1) * (clock[-1] - clock[1])


def _kinds(planned: Plan) -> dict[str, int]:
    """Return the middle block of each kind, and how many of its kind there are: alike in linears, shapes and rules."""
    inside: dict[str, list[tuple[str, tuple[int, int], int]]] = {}
    for x in planned.linears:
        inside.setdefault(x.block, []).append((x.name.removeprefix(x.block), x.shape, x.rule.index))
    alike: dict[tuple[Any, ...], list[str]] = {}
    for fqn, linears in inside.items():
        alike.setdefault((*linears, fqn == OUTSIDE), []).append(fqn)
    return {blocks[len(blocks) // 2]: len(blocks) for blocks in alike.values()}


def _prune(state: RunState, fqn: str) -> float:
    """Prune a block as a run does; return the seconds. A GPU loads its kernels when it does so for the first time."""
    state.report_progress("prune", 0, 1, fqn or "the linears outside the blocks")
    if state.access.device.type == "cuda":
        _prune_once(state, fqn)
    return _prune_once(state, fqn)


def _prune_once(state: RunState, fqn: str) -> float:
    """Prune a block by the code of a run, as if the run went on after the block before."""
    access, batches, planned = state.pruned_against, state.batches, state.plan
    found = survey(access.model)
    before = [*found.blocks, OUTSIDE][: [*found.blocks, OUTSIDE].index(fqn)]
    keep = state.keep(f"hidden-{fqn}", sum(map(len, batches)) * planned.streams)
    states, calls = capture(access, found, batches, keep)
    finished = None
    if before and resumable(access.model, calls):
        with torch.no_grad():
            for block, runs in each_block(access, found, calls, before[:_BEFORE]):
                advance(block.fqn, runs, states)
        dense = [keep(x.clone()) for x in states] if planned.streams > 1 else ()
        finished = before[-1], HiddenStates(states, dense)
    del states, calls
    pruned = next(prune_model(access, planned, batches, finished, keep, ALONE, state.sensitivities))
    return pruned.report.seconds


def _now(device: torch.device) -> float:
    """Return the clock, once a GPU is done."""
    synchronize(device)
    return time.perf_counter()


def _left_out(recipe: Recipe, planned: Plan) -> Iterator[str]:
    """Yield the parts of a run that are not measured."""
    if recipe.evaluate is not None:
        yield "evaluation"
    if planned.depth is not None:
        yield "the choice of whole blocks"
    if recipe.finetune is not None:
        minutes = recipe.finetune.minutes
        yield "fine-tuning" + ("" if minutes is None else f" ({minutes:g} minutes)")
    yield "writing files"
