"""The stages of a run that look at the weights: measure gradients, allocate sparsity, prune."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from compressx.allocation.methods import allocate, report_on, windows_kept
from compressx.api.record import AllocationReport
from compressx.blocks.fisher import FisherDiagonal, fisher_diagonal
from compressx.blocks.prune import Finished, prune_model
from compressx.models.access import Access
from compressx.models.architecture import survey, text_config
from compressx.models.hidden import InFiles, Keep, in_memory
from compressx.pipeline.context import RunContext
from compressx.pipeline.journal import ALLOCATED, Allocated, FinishedBlock, Journal
from compressx.planning.plan import Plan
from compressx.recipe.methods import MeasuredAllocation
from compressx.report import figures


@dataclass(frozen=True, eq=False)
class Pruning:
    """These stages, and what all of them work on.

    Attributes:
        context: what the user asked for.
        access: the model.
        batches: calibration token ids, each [batch, tokens].
        mine: this process's part of them.
        journal: what an interrupted run has left, and what this one leaves.
    """

    context: RunContext
    access: Access
    batches: Sequence[torch.Tensor]
    mine: Sequence[torch.Tensor]
    journal: Journal

    def fisher(self, planned: Plan) -> FisherDiagonal:
        """Measure mean squared gradients of the dense model's loss, if pruning that is not done yet reads them."""
        names = planned.sensitive
        wanted = names or planned.reconstruct_block is not None
        if not wanted or len(self.journal.finished) == _blocks(planned):
            return FisherDiagonal()
        return fisher_diagonal(
            self.access, survey(self.access.model), names, self.mine, self.context.ranks,
            progress=lambda i, n: self.context.tell("calibrate", i, n),
        )  # fmt: skip

    def allocate(self, planned: Plan, fisher: FisherDiagonal) -> tuple[Plan, AllocationReport | None]:
        """Give every linear its sparsity where the recipe leaves that open; the first process measures, on any text."""
        context, journal = self.context, self.journal
        if not isinstance(planned.allocation, MeasuredAllocation):
            settings = context.loaded.recipe.allocation
            return planned, None if settings is None else report_on(planned, settings)
        if journal.allocated is None:
            allocated = None
            if context.ranks.first:
                windows = sum(map(len, self.batches))
                keep = self._keep("allocation", windows_kept(planned, planned.allocation, windows))
                try:
                    final, report = allocate(
                        self.access, planned, planned.allocation, self.batches, fisher.linears,
                        progress=partial(context.tell, "allocate"), keep=keep,
                    )  # fmt: skip
                finally:
                    shutil.rmtree(journal.blocks / "allocation", ignore_errors=True)
                allocated = Allocated({x.name: x.pattern for x in final.linears}, report)
            told = context.ranks.broadcast({} if allocated is None else dataclasses.asdict(allocated))
            journal.allocate(ALLOCATED.validate_python(told) if allocated is None else allocated)
        assert journal.allocated is not None  # noqa: S101 - it is now
        return planned.allocated(journal.allocated.patterns), journal.allocated.report

    def prune(self, planned: Plan, fisher: FisherDiagonal) -> list[FinishedBlock]:
        """Prune what an interrupted run has not finished, and record every block."""
        context, journal = self.context, self.journal
        streams = 1 if planned.reconstruct_block is None else 2  # the dense one beside the pruned one
        keep = self._keep(f"hidden-{context.ranks.rank}", sum(map(len, self.mine)) * streams)
        finished: list[FinishedBlock] = []
        reached = None
        total = _blocks(planned)
        if journal.finished:
            finished, reaching = journal.restore(self.access, keep)
            reached = Finished(journal.finished[-1], reaching)
        context.tell("prune", len(finished), total)
        for block in prune_model(self.access, planned, self.mine, reached, keep, context.ranks, fisher):
            finished.append(FinishedBlock(block.report, figures.matrices(block.images)))
            journal.add(self.access, finished[-1], block.masks, block.streams)
            context.tell("prune", len(finished), total)
            if context.ranks.first:
                context.plugins.manager.hook.compressx_block_pruned(report=block.report)
            del block  # its masks are on disk
        return finished

    def _keep(self, name: str, windows: int) -> Keep:
        """Keep so many windows of hidden states, or what is as large, in files if they exceed the recipe's limit."""
        calibration, model = self.context.loaded.recipe.calibration, self.access.model
        if calibration is None or calibration.memory_limit is None:
            return in_memory
        size = windows * calibration.sequence_length * text_config(model).hidden_size * model.dtype.itemsize
        return InFiles(self.journal.blocks / name) if size > calibration.memory_limit else in_memory


def _blocks(planned: Plan) -> int:
    """Return how many blocks are pruned; the linears outside of blocks count as one."""
    return len({x.block for x in planned.linears})
