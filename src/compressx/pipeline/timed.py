"""`compressx plan --time`: the stages of a run up to pruning, and one block of each kind, measured and multiplied."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compressx.blocks.prune import prune_model
from compressx.blocks.stage import Prune
from compressx.models.shards import OUTSIDE
from compressx.pipeline.inputs import open_model_of
from compressx.pipeline.sizes import memory_advised
from compressx.pipeline.stages import STAGES
from compressx.planning.plan import Plan
from compressx.recipe.schema import Recipe
from compressx.runtime.modes import deterministic, reuse_freed_memory, torchs_own_modes
from compressx.runtime.timing import Timing, forget_peaks, peak_gpu_bytes, peak_resident_bytes, synchronize
from compressx.stages.log import run_log
from compressx.stages.state import Progress, RunState, StageName
from compressx.stages.store import Store

_BEFORE = 2
"""Dense blocks that the text passes before a block that is timed: enough for plausible inputs."""


@dataclass(frozen=True)
class RunTime:
    """What a run will take on a device, from what one block of each kind took.

    Attributes:
        seconds: by stage.
        blocks: to prune; the linears outside the blocks count as one.
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


class _EnoughError(Exception):
    """Ends an allocation once two blocks are measured."""


@reuse_freed_memory()
@torchs_own_modes()
def time_run(state: RunState, progress: Progress | None = None) -> RunTime:
    """Load the model and measure what a run does with one block of each kind. Nothing but temporary files is written.

    Args:
        state: of a planned run; its plan is left as it is.
        progress: as for a run.
    """
    forget_peaks()
    asked, recipe, clock = state.plan, state.recipe, dict[int, float]()

    def tell(stage: StageName, done: int, total: int, note: str) -> None:
        if progress is not None:
            progress(stage, done, total, note)
        if stage == "allocate" and done not in clock:
            synchronize(state.device)
            clock[done] = time.perf_counter()
            if done == 2:
                raise _EnoughError

    with run_log(first=True) as log, TemporaryDirectory(prefix="compressx-") as folder:
        loaded = replace(state.loaded, recipe=recipe.model_copy(update={"evaluate": None}))
        state = replace(state, loaded=loaded, log=log, timing=Timing("load"), progress=tell, replace=False)
        state.plan = asked
        if asked.depth is not None:  # a rule that prunes no linear
            linears = tuple(x for x in asked.linears if x.rule != asked.depth.rule)
            rules = tuple(rule for rule in asked.rules if rule != asked.depth.rule)
            state.plan = replace(asked, linears=linears, rules=rules, depth=None)
        state.store, state.open = Store(Path(folder)), cache(lambda: open_model_of(state))
        with deterministic(recipe.deterministic, state.device), memory_advised(state):
            for stage in takewhile(lambda stage: not isinstance(stage, Prune), STAGES):
                with suppress(_EnoughError):
                    stage.run(state)
            seconds = state.timing.seconds()
            del seconds["total"]
            if clock:
                blocks = len({x.block for x in state.plan.linears if x.block})
                seconds["allocate"] = clock[1] - clock[0] + (blocks - 1) * (clock[max(clock)] - clock[1])
            counts = _kinds(state.plan)
            seconds["prune"] = sum(counts[fqn] * spent for fqn, spent in _pruned(state, set(counts)).items())
            return RunTime(
                str(state.device), seconds, sum(counts.values()), peak_resident_bytes(), peak_gpu_bytes(),
                tuple(_left_out(recipe, asked)),
            )  # fmt: skip


def _kinds(planned: Plan) -> dict[str, int]:
    """Return an early block of each kind, and how many of its kind there are: alike in linears, shapes and rules."""
    inside: dict[str, list[tuple[str, tuple[int, int], int]]] = {}
    for x in planned.linears:
        inside.setdefault(x.block, []).append((x.name.removeprefix(x.block), x.shape, x.rule.index))
    alike: dict[tuple[Any, ...], list[str]] = {}
    for fqn, linears in inside.items():
        alike.setdefault((*linears, fqn == OUTSIDE), []).append(fqn)
    return {blocks[min(_BEFORE, len(blocks) - 1)]: len(blocks) for blocks in alike.values()}


def _pruned(state: RunState, fqns: set[str]) -> dict[str, float]:
    """Prune some blocks by the code of a run, and return the seconds of each."""
    plan = replace(state.plan, linears=tuple(x for x in state.plan.linears if x.block in fqns))
    found: dict[str, float] = {}
    for turn in range(2 if state.device.type == "cuda" else 1):  # a GPU loads its kernels in the first
        keep = state.keep(f"hidden-{turn}", sum(map(len, state.batches)) * plan.hidden_copies)
        state.report_progress("prune", 0, len(fqns))
        for block in prune_model(state.pruned_against, plan, state.batches, None, keep, fisher=state.sensitivities):
            found[block.report.fqn] = block.report.seconds
            state.report_progress("prune", len(found), len(fqns), block.report.fqn)
    return found


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
