"""The stages of a run that read and change weights: sensitivities, allocation, pruning."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from compressx.allocation.methods import Curves, allocate, windows_kept
from compressx.api.patterns import Structured
from compressx.api.pruner import Block
from compressx.api.record import AllocationReport, BlockReport
from compressx.blocks.depth import refuse_needed, score_blocks
from compressx.blocks.fisher import FisherDiagonal, fisher_diagonal
from compressx.blocks.prune import Finished, hold_routers, prune_model
from compressx.masks.file import MaskEntry
from compressx.models.access import Access
from compressx.models.architecture import survey, text_config
from compressx.models.hidden import InFiles, Keep, Streams, in_memory
from compressx.pipeline.context import RunContext
from compressx.pipeline.finished_block import FinishedBlock
from compressx.pipeline.journal import ALLOCATED, Allocated
from compressx.planning.plan import Plan
from compressx.report import figures
from compressx.runtime.cache import cached


class Record(Protocol):
    """What a run keeps of its finished blocks: `journal.Journal` on disk, `memory.Kept` in memory.

    Attributes:
        finished: names of the finished blocks, in order.
        allocated: the sparsities that an allocation chose, or None before that.
        scores: of decoder blocks that may be dropped, by name; empty before they are measured.
        blocks: a folder for large temporary files.
    """

    finished: list[str]
    allocated: Allocated | None
    scores: Mapping[str, float]
    blocks: Path

    def allocate(self, allocated: Allocated) -> None:
        """Keep an allocation."""

    def score(self, scores: Mapping[str, float]) -> None:
        """Keep the scores of decoder blocks."""

    def recording(self, access: Access) -> AbstractContextManager[None]:
        """Return a context manager within which blocks are added; at its end all are kept."""

    def add(self, access: Access, block: FinishedBlock, masks: Mapping[str, MaskEntry], streams: Streams) -> None:
        """Keep a pruned block, its masks and the hidden states that enter the next one."""

    def restore(self, access: Access, keep: Keep) -> tuple[list[FinishedBlock], Streams]:
        """Return to the state after the last finished block."""

    def masks_of(self, fqn: str) -> Mapping[str, MaskEntry]:
        """Return the masks of a finished block."""


@dataclass(frozen=True, eq=False)
class Pruning:
    """The pruning stages and the inputs that they share.

    Attributes:
        context: recipe, device, processes and progress of the run.
        access: the model.
        batches: calibration token ids, each [batch, tokens].
        mine: this process's share of them.
        journal: keeps the finished blocks.
        inputs: everything that decides the result, in JSON types, by which an allocation's measurements are cached; not
            cached when absent.
    """

    context: RunContext
    access: Access
    batches: Sequence[Tensor]
    mine: Sequence[Tensor]
    journal: Record
    inputs: Mapping[str, Any] | None = None

    @cached_property
    def calibrated(self) -> Access:
        """The model, with the blocks' products in the dtype of the run's arithmetic."""
        return dataclasses.replace(self.access, products=self.context.products)  # type: ignore[type-var]

    def run(self, planned: Plan) -> tuple[Plan, AllocationReport | None, list[FinishedBlock]]:
        """Go through all stages; return the final plan, how its sparsities were chosen, and the pruned blocks."""
        planned = self.score(planned)
        fisher = self.fisher(planned)
        with self.context.loaded.at("allocation"):
            final, allocation = self.allocate(planned, fisher)
        return final, allocation, self.prune(final, fisher)

    def score(self, planned: Plan) -> Plan:
        """Choose the decoder blocks that go, on the dense model, if a rule drops some."""
        depth, journal, context = planned.depth, self.journal, self.context
        if depth is None:
            return planned
        if not journal.scores:
            context.report_progress("calibrate", 0, 1)
            keep = self.keep(f"depth-{context.ranks.rank}", sum(map(len, self.mine)))
            with context.loaded.at("prune", depth.rule.index):
                scores = score_blocks(
                    self.calibrated, depth, self.mine, keep, context.ranks,
                    lambda i, n: context.report_progress("calibrate", i, n, "blocks scored"),
                )  # fmt: skip
            shutil.rmtree(journal.blocks / f"depth-{context.ranks.rank}", ignore_errors=True)
            journal.score(context.ranks.broadcast(scores))
        scored = planned.scored(journal.scores)
        with context.loaded.at("prune", depth.rule.index):
            refuse_needed(self.access.model, scored.dropped)
        context.log.write(logging.INFO, f"dropped blocks: {', '.join(scored.dropped)}")
        return scored

    def fisher(self, planned: Plan) -> FisherDiagonal:
        """Measure mean squared gradients of the dense model's loss, if a block that is not yet pruned needs them."""
        names = planned.sensitive
        wanted = names or planned.reconstruct_block is not None
        if not wanted or len(self.journal.finished) == _blocks(planned):
            return FisherDiagonal()
        self.context.report_progress("calibrate", 0, 1)
        return fisher_diagonal(
            self.calibrated, survey(self.access.model), names, self.mine, self.context.ranks,
            progress=lambda i, n: self.context.report_progress("calibrate", i, n),
        )  # fmt: skip

    def allocate(self, planned: Plan, fisher: FisherDiagonal) -> tuple[Plan, AllocationReport | None]:
        """Choose the sparsity of every linear where the recipe leaves it open.

        The first process measures, on the calibration text of all processes; the others receive its result.
        """
        context, journal = self.context, self.journal
        if planned.allocation is None:
            return planned, None
        if journal.allocated is None:
            allocated = None
            context.report_progress("allocate", 0, 1)
            if context.ranks.first:
                windows = sum(map(len, self.batches))
                keep = self.keep("allocation", windows_kept(planned, planned.allocation, windows))
                try:
                    final, report = allocate(
                        self.calibrated, planned, planned.allocation, self.batches, fisher.linears,
                        progress=partial(context.report_progress, "allocate"), keep=keep,
                        remembered=self._remembered,
                    )  # fmt: skip
                finally:
                    shutil.rmtree(journal.blocks / "allocation", ignore_errors=True)
                chosen = {x.name: x.pattern for x in final.linears if not isinstance(x.pattern, Structured)}
                allocated = Allocated(chosen, report)
            received = context.ranks.broadcast({} if allocated is None else dataclasses.asdict(allocated))
            journal.allocate(ALLOCATED.validate_python(received) if allocated is None else allocated)
        assert journal.allocated is not None  # noqa: S101 - set above
        context.log.allocation(journal.allocated.report)
        return planned.allocated(journal.allocated.patterns), journal.allocated.report

    def _remembered(self, curves: Callable[[], Curves]) -> Curves:
        """Return cached measurements of the same model, text and rules, whatever the target, or measure."""
        if self.inputs is None:
            return curves()
        measuring = {k: v for k, v in self.inputs["allocation"].items() if k != "target"}
        key = {**self.inputs, "allocation": measuring, "reconstruct_block": None}
        return cached(key, curves, "allocations", dict[str, list[list[float]]])

    def prune(self, planned: Plan, fisher: FisherDiagonal) -> list[FinishedBlock]:
        """Prune the blocks that an interrupted run has not finished, and record each."""
        context, journal = self.context, self.journal
        streams = 1 if planned.reconstruct_block is None else 2  # dense and pruned
        keep = self.keep(f"hidden-{context.ranks.rank}", sum(map(len, self.mine)) * streams)
        finished: list[FinishedBlock] = []
        resumed, note = None, ""
        total = _blocks(planned)
        if journal.finished:
            context.report_progress("load", 2, 2)
            finished, states = journal.restore(self.access, keep)
            self._hold_routers(planned)
            resumed = Finished(journal.finished[-1], states)
            note = f"resumed after {resumed.fqn or 'the linears outside the blocks'}, {len(finished)} of {total}"
        context.report_progress("prune", len(finished), total, note)
        with journal.recording(self.access):
            for block in prune_model(self.calibrated, planned, self.mine, resumed, keep, context.ranks, fisher):
                finished.append(FinishedBlock(block.report, figures.matrices(block.images)))
                # After the last block no states are needed, and those of earlier ones are deleted.
                streams_left = block.streams if len(finished) < total else Streams(())
                journal.add(self.access, finished[-1], block.masks, streams_left)
                self._tell(block.report, len(finished), total)
                del block, streams_left  # frees the masks, which are on disk
        return finished

    def _tell(self, report: BlockReport, done: int, total: int) -> None:
        """Log a pruned block, and tell the progress bar and plugins of it."""
        context = self.context
        context.log.block(report, done, total)
        context.report_progress("prune", done, total)
        if context.ranks.first:
            context.plugins.manager.hook.compressx_block_pruned(report=report)

    def _hold_routers(self, planned: Plan) -> None:
        """Let the routers of finished blocks leave out the experts that are dropped."""
        found, config = survey(self.access.model), text_config(self.access.model)
        for index, (fqn, module) in enumerate(found.blocks.items()):
            if fqn in self.journal.finished:
                masks = {name: entry.keep for name, entry in self.journal.masks_of(fqn).items()}
                linears = {name: found.linears[name] for name in masks}
                hold_routers(Block(index, fqn, module, linears, (), config), planned.asked(fqn), masks)

    def keep(self, name: str, windows: int) -> Keep:
        """Choose where to keep hidden states of that many windows: in files if they exceed the recipe's limit."""
        calibration, model = self.context.loaded.recipe.calibration, self.access.model
        if calibration is None or calibration.memory_limit is None:
            return in_memory
        size = windows * calibration.sequence_length * text_config(model).hidden_size * model.dtype.itemsize
        return InFiles(self.journal.blocks / name) if size > calibration.memory_limit else in_memory


def _blocks(planned: Plan) -> int:
    """Count the blocks to prune; the linears outside the blocks count as one."""
    return len({x.block for x in planned.linears})
