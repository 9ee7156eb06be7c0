"""The stages that choose decoder blocks, measure sensitivities, and prune block by block."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from compressx.api.names import kind_of
from compressx.api.patterns import allocated_form
from compressx.api.pruner import Block
from compressx.api.record import BlockReport, LayerReport, RunReport, total_sparsity
from compressx.blocks.depth import choose_blocks, refuse_needed, solved_beside
from compressx.blocks.difference import in_config
from compressx.blocks.fisher import FisherDiagonal, fisher_diagonal
from compressx.blocks.prune import hold_routers, prune_model
from compressx.models.architecture import architecture_of, text_config
from compressx.models.blockwise import HiddenStates
from compressx.planning.plan import Plan
from compressx.report import figures
from compressx.report.section import Column, Section, Value, counted, number_of, shaded, table
from compressx.runtime.code import __version__
from compressx.runtime.errors import CalibrationError, Mistakes
from compressx.stages.state import RunState, Stage

_SECONDS = Column("seconds", ".1f")


class ChooseBlocks(Stage):
    """Choose the decoder blocks to remove, on the dense model, if a rule drops some."""

    everywhere = True

    def run(self, state: RunState) -> None:
        """Let the pruner choose blocks, unless an interrupted run has."""
        depth, store, ranks = state.plan.depth, state.store, state.ranks
        if depth is None:
            return
        if not (store.scores or store.chosen):
            state.report_progress("calibrate", 0, 1)
            with state.loaded.at("prune", depth.rule.index):
                scores, chosen = choose_blocks(
                    state.pruned_against, depth, state.mine, ranks,
                    lambda i, n: state.report_progress("calibrate", i, n, "blocks scored"),
                )  # fmt: skip
            store.score(*ranks.broadcast((scores, chosen)))
        state.plan = state.plan.scored(store.scores, store.chosen)
        with state.loaded.at("prune", depth.rule.index):
            if not state.recipe.of_difference:
                refuse_needed(state.access.model, state.plan.dropped)
        if state.plan.dropped and not state.recipe.of_difference and getattr(depth.rule.build_depth(), "solves", False):
            self._solve(state)
        names = ", ".join(f"{fqn} ({x:.3g} nats)" for fqn, x in store.chosen.items())
        state.note(f"{'reverted' if state.recipe.of_difference else 'dropped'} blocks: {names}")

    def _solve(self, state: RunState) -> None:
        """Solve linears beside removed blocks; an interrupted run does so again, from the dense model."""
        plan, folder = state.plan, f"depth-{state.ranks.rank}"
        assert plan.depth is not None  # noqa: S101 - the caller has asked
        if len(state.store.finished) == plan.pieces:
            return
        state.report_progress("calibrate", 0, 1, "solving beside dropped blocks")
        with state.loaded.at("prune", plan.depth.rule.index):
            keep = state.keep(folder, 3 * sum(map(len, state.mine)))
            solved = solved_beside(state.calibrated, plan, state.mine, keep, state.ranks)
        shutil.rmtree(state.store.blocks / folder, ignore_errors=True)
        state.plan = replace(plan, depth=replace(plan.depth, solved=solved))


class Sensitivities(Stage):
    """Measure mean squared gradients of the dense model's loss, if a block that is not yet pruned needs them."""

    everywhere = True

    def run(self, state: RunState) -> None:
        """Measure them on this process's text; all processes get the mean over all text."""
        plan, state.sensitivities = state.plan, FisherDiagonal()
        if not plan.reads_gradients or len(state.store.finished) == plan.pieces:
            return
        state.report_progress("calibrate", 0, 1)
        state.sensitivities = fisher_diagonal(
            state.calibrated, architecture_of(state.access.model), plan.sensitive, state.mine, state.ranks,
            progress=lambda i, n: state.report_progress("calibrate", i, n),
        )  # fmt: skip


class Prune(Stage):
    """Prune the blocks that an interrupted run has not finished, and record each."""

    everywhere = True

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse fewer calibration sequences than processes, if the plan calibrates."""
        calibration = state.recipe.calibration
        if plan is None or not plan.needs_calibration or calibration is None:
            return
        if (few := calibration.samples) < state.processes:
            where = state.loaded.where("calibration", "samples")
            mistakes.add(CalibrationError(f"{where}: {few} sequences are fewer than the {state.processes} processes"))

    def run(self, state: RunState) -> None:
        """Prune; the plan is final."""
        plan, store, total = state.plan, state.store, state.plan.pieces
        mine = state.mine
        keep = state.keep(f"hidden-{state.ranks.rank}", sum(map(len, mine)) * plan.hidden_copies)
        resumed, note = None, ""
        if store.finished:
            state.report_progress("load", 2, 2)
            state.blocks, state.matrices, states = store.restore(state.access, keep)
            _hold_finished_routers(state)
            resumed = store.finished[-1], states
            note = f"resumed after {resumed[0] or 'the linears outside the blocks'}, {len(state.blocks)} of {total}"
        state.report_progress("prune", len(state.blocks), total, note)
        with store.recording(state.access):
            for block in prune_model(state.pruned_against, plan, mine, resumed, keep, state.ranks, state.sensitivities):
                state.blocks.append(block.report)
                state.matrices += (drawn := figures.matrices(block.report.layers, block.images))
                # After the last block no states are needed, and those of earlier ones are deleted.
                hidden = block.hidden if len(state.blocks) < total else HiddenStates(())
                store.add(state.access, block.report, drawn, block.masks, hidden)
                _report(state, block.report, total)
                del block, hidden  # frees the masks, which are on disk
        if state.first:
            state.report_progress("save", 0, 1)
            store.finish()
        _describe(state)

    def sections(self, report: RunReport) -> Iterator[Section]:
        """Yield what was pruned: by kind of linear, by block, and what that did to each block's output."""
        yield from by_module(report)
        yield from _heat(report)
        yield from _blocks(report)


def _report(state: RunState, report: BlockReport, total: int) -> None:
    """Log a pruned block, and report it to the progress bar and to plugins."""
    state.log.block(report, len(state.blocks), total)
    state.report_progress("prune", len(state.blocks), total)
    if state.first:
        state.plugins.manager.hook.compressx_block_pruned(report=report)


def _describe(state: RunState) -> None:
    """Write the sparsity into the model's config, where transformers keeps it as the attribute `compressx`."""
    layers = [layer for block in state.blocks for layer in block.layers]
    forms = [allocated_form(x.pattern) if state.recipe.allocation else x.pattern for x in layers]
    state.access.model.config.compressx = {
        "version": __version__,
        "sparsity": total_sparsity(layers),
        **in_config(state),
        "patterns": list(dict.fromkeys(forms)),
        "pruners": list(dict.fromkeys(layer.pruner for layer in layers)),
    }


def _hold_finished_routers(state: RunState) -> None:
    """Let the routers of finished blocks leave out the experts that are dropped."""
    found, config = architecture_of(state.access.model), text_config(state.access.model)
    for index, (fqn, module) in enumerate(found.blocks.items()):
        if fqn in state.store.finished:
            masks = {name: entry.keep for name, entry in state.store.masks_of(fqn).items()}
            linears = {name: found.linears[name] for name in masks}
            hold_routers(Block(index, fqn, module, linears, (), config), state.plan.decided_in(fqn), masks)


def by_module(report: RunReport) -> Iterator[Section]:
    """Yield a row for each kind of linear, pruner and pattern.

    Allocated sparsities, which differ from linear to linear, are one pattern: `allocated row`, or `allocated N:4`.
    """
    groups: dict[tuple[str, str, str], list[LayerReport]] = defaultdict(list)
    for layer in report.layers:
        pattern = allocated_form(layer.pattern) if report.allocation else layer.pattern
        groups[kind_of(layer.name), layer.pruner, pattern].append(layer)
    rows = [(*key, len(some), total_sparsity(some), sum(x.seconds for x in some)) for key, some in groups.items()]
    found = table(["module", "pruner", "pattern", Column("layers", "d"), Column(report.share, ".2%"), _SECONDS], rows)
    if rows:
        yield Section("By module", table=found)


def _heat(report: RunReport) -> Iterator[Section]:
    """Yield a row for each block and a column for each kind of linear; experts are averaged."""
    kinds = list(dict.fromkeys(kind_of(layer.name) for layer in report.layers))
    rows: list[list[Value]] = []
    for block in report.blocks:
        alike: dict[str, list[LayerReport]] = defaultdict(list)
        for layer in block.layers:
            alike[kind_of(layer.name)].append(layer)
        rows.append([number_of(block), *(total_sparsity(alike[k]) if k in alike else None for k in kinds)])
    found = table(["block", *(Column(kind, ".1%", "heat") for kind in kinds)], rows)
    if rows:
        yield shaded(f"{report.share.capitalize()} by layer and module", "", found, counted(rows, "block"))


def _blocks(report: RunReport) -> Iterator[Section]:
    """Yield what pruning did to each block's output, and how long it took."""
    error, seconds = Column("output error", "#.3g", "bar"), Column("seconds", ".1f", "bar")
    rows = [(number_of(x), len(x.layers), total_sparsity(x.layers), x.output_error, x.seconds) for x in report.blocks]
    if not rows:
        return
    yield Section(
        "By block",
        "Output error: what a block's pruning alone changes in its output, squared and relative, large channels "
        "counting less, the mean over the first tokens of the calibration text, before any reconstruction. Seconds: "
        "observing, pruning, reconstructing.",
        table(["block", Column("linears", "d"), Column(report.share, ".2%"), error, seconds], rows),
        brief=counted(rows, "block"),
    )
