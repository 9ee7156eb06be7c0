"""The stage that chooses the sparsity of every linear where the recipe leaves it open."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
from collections.abc import Iterator
from functools import partial

from compressx.allocation.methods import chosen, measured, stored_sequences
from compressx.allocation.units import check_allocation, units_of
from compressx.api.names import in_short, kind_of
from compressx.api.patterns import Structured, Unstructured
from compressx.api.projections import parent
from compressx.api.record import RunReport
from compressx.models.architecture import count_parameters
from compressx.planning.plan import Plan
from compressx.plugins.kinds import EXPORTER
from compressx.recipe.sections import Allocation, AttentionAware, DivergenceAllocation, TargetBudget
from compressx.report.section import Column, Section, counted, table
from compressx.runtime.errors import Mistakes, RecipeError
from compressx.stages.state import RunState, Stage
from compressx.stages.store import Allocated


class Allocate(Stage):
    """Choose the sparsities on the calibration text of all processes; the first process measures."""

    everywhere = True

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse to measure without text, and divergences on the sequences that pruners see."""
        calibration, allocation = state.recipe.calibration, state.recipe.allocation
        if plan is not None:
            with mistakes.collected(), state.loaded.at("allocation", "target"):
                check_allocation(plan)
        if plan is not None and allocation is not None and calibration is None:
            mistakes.add(RecipeError(
                f"{state.loaded.where('allocation')}: {allocation.method} measures {allocation.measures} on "
                "calibration text, but the recipe has no calibration; add one, such as "
                "calibration: {dataset: wikitext, samples: 32}"
            ))  # fmt: skip
        if isinstance(allocation, DivergenceAllocation | AttentionAware) and calibration and calibration.samples < 2:
            mistakes.add(RecipeError(
                f"{state.loaded.where('calibration', 'samples')}: calibration.samples is {calibration.samples}, but "
                f"{allocation.method} at {state.loaded.where('allocation')} measures on sequences that pruners do not "
                "see; expected at least 2"
            ))  # fmt: skip

    def run(self, state: RunState) -> None:
        """Choose, unless an interrupted run has."""
        store, settings = state.store, state.plan.allocation
        if settings is None:
            return
        with state.loaded.at("allocation"):
            if store.allocated is None:
                state.report_progress("allocate", 0, 1)
                store.allocate(state.by_first(partial(_allocated, state, settings), Allocated))
        assert store.allocated is not None  # noqa: S101 - set above
        report = state.results["allocation"] = store.allocated.report
        state.plan = state.plan.allocated(store.allocated.patterns)
        for unit in report.units:
            expected = "" if unit.divergence is None else f", predicted divergence {unit.divergence:.3g}"
            line = f"{in_short(unit.linears)}: {unit.pruner}, sparsity {unit.sparsity:.2%}{expected}"
            state.log.write(logging.DEBUG, line)

    def sentences(self, report: RunReport) -> Iterator[str]:
        """Say which method chose the sparsities."""
        if report.allocation is not None:
            yield f"The sparsities were chosen by the method `{report.allocation.method}`."
            if any(" of " in x.pattern for x in report.layers):
                yield (
                    "Units that went whole are zeros here, since a config of transformers has one width for all "
                    "blocks; `compressx export` gives each block its own."
                )

    def sections(self, report: RunReport) -> Iterator[Section]:
        """Yield how sparsities were chosen, and every unit."""
        if (allocated := report.allocation) is None:
            return
        note = (
            f"{allocated.method}, by {allocated.unit}, target {allocated.target:.2%}: {allocated.zeros} of "
            f"{allocated.weights} weights are {report.became}."
        )
        if allocated.parameters is not None:
            dense, left = allocated.parameters
            note += f" Of {dense} parameters {left} are left, {left / dense:.2%}"
            note += "".join(f"; asked for: {name} {x:.10g} at most" for name, x in allocated.budget.items()) + "."
        if any(unit.divergence is not None for unit in allocated.units):
            note += (
                " The divergence is that of the model's predictions from the dense model's when these linears alone "
                "are pruned, estimated to second order on held-out text, in nats, the mean over tokens; the sum was "
                "made least."
            )
        if any(unit.outliers is not None for unit in allocated.units):
            note += (
                " Outliers are the fraction of weights whose size times the norm of their input feature is far above "
                "the block's mean."
            )
        patterns = {x.name: x.pattern for x in report.layers if " of " in x.pattern}
        divergence, outliers = Column("predicted divergence", ".3g"), Column("outliers", ".3%")
        rows = [
            (unit.block or "outside", ", ".join(dict.fromkeys(map(kind_of, unit.linears))), unit.pruner,
             ", ".join(dict.fromkeys(patterns[n] for n in unit.linears if n in patterns)), unit.sparsity,
             unit.divergence, unit.outliers)
            for unit in allocated.units
        ]  # fmt: skip
        found = table(["block", "linears", "pruner", "left", Column(report.share, ".2%"), divergence, outliers], rows)
        yield Section("Allocation", note, found, brief=counted(rows, "unit"))


def within_budget(state: RunState, plan: Plan) -> Plan:
    """Return a plan whose allocation has a fraction of zeros in place of its budget."""
    settings = plan.allocation
    if settings is None or not isinstance(budget := settings.target, TargetBudget):
        return plan
    with state.loaded.at("allocation", "target"):
        if odd := next((x.name for x in plan.linears if not isinstance(x.pattern, Structured)), None):
            raise RecipeError(
                f"a budget needs rules with pattern: neurons or kv-groups, since zeros anywhere in {odd} make nothing "
                "smaller; add it, or give target a fraction of zeros"
            )
        (whole, each), units = _size(state, plan, budget), units_of(plan, settings.unit)
        asked, most = budget.bytes or whole * (budget.parameters or 0), sum(u.max_zeros() for u in units)
        least = whole - most * each
        if not least <= asked < whole:
            reach = f"{least / whole:.6g} to 1 of" if budget.bytes is None else f"{math.ceil(least)} to {whole}"
            ((name, given),) = settings.budget.items()
            raise RecipeError(f"{name}: {given:.10g} cannot be reached: the rules leave from {reach} {name}")
        step = min(part.step for u in units for part in u.parts)
        zeros = min(math.ceil((whole - asked) / each / step) * step, most)
        fraction = zeros / sum(u.weights for u in units)
        return dataclasses.replace(plan, allocation=settings.model_copy(update={"target": fraction}))


def _size(state: RunState, plan: Plan, budget: TargetBudget) -> tuple[int, float]:
    """Return the size of the dense model, and what goes with a weight of a unit: biases go with rows."""
    parameters = dict(state.skeleton.named_parameters())
    weights = sum(x.weights for x in plan.linears)
    owned = [x.name for x in plan.linears if isinstance(p := x.pattern, Structured) and p.units.owners[x.name].dim == 0]
    biases = sum(parameters[f"{name}.bias"].numel() for name in owned if f"{name}.bias" in parameters)
    if budget.bytes is None:
        return count_parameters(state.skeleton), 1 + biases / weights
    exporters = (state.exporter(i)[1] for i in range(len(state.recipe.export)))
    if (sized := next((x for x in exporters if hasattr(x, "tensor_bytes")), None)) is None:
        able = [name for name, spec in state.plugins.offers[EXPORTER.key].items() if spec.own_widths]
        raise RecipeError(
            "bytes are those of a file in which each block has its own width; add export: with a format that can, such "
            f"as {', '.join(able)}"
        )
    sizes = sized.tensor_bytes(state.planned_model)
    matrices = {f"{x.name}.weight" for x in plan.linears} | {parent(x.name) for x in plan.linears}
    of_linears = sum(size for name, size in sizes.items() if name in matrices)
    of_biases = sum(sizes.get(f"{name}.bias", 0) for name in owned)
    return sum(sizes.values()), (of_linears + of_biases) / weights


def _allocated(state: RunState, settings: Allocation) -> Allocated:
    """Measure on the text of all processes, and choose."""
    batches, store = state.batches, state.store
    keep = state.keep("allocation", stored_sequences(state.plan, settings, sum(map(len, batches))))
    measure = partial(
        measured, state.pruned_against, state.plan, settings, batches, state.sensitivities.linears, keep,
        partial(state.report_progress, "allocate"), store.measured, store.measure,
    )  # fmt: skip
    # What is measured depends on the model, the text and the rules, whatever the target. Without inputs, as where a run
    # is only timed, nothing tells what was measured.
    measuring = {k: v for k, v in state.inputs.get("allocation", {}).items() if k != "target"}
    key = {**state.inputs, "allocation": measuring, "reconstruct_block": None}
    kind = dict[str, float | list[list[float]]]
    try:
        found = state.cached(key, measure, "allocations", kind) if state.inputs else measure()
    finally:
        shutil.rmtree(store.blocks / "allocation", ignore_errors=True)
    final, report = chosen(state.plan, settings, found)
    whole = {x.name: x.pattern for x in final.linears}
    patterns = {n: Unstructured(p.sparsity) if isinstance(p, Structured) else p for n, p in whole.items()}
    assert state.recipe.allocation is not None  # noqa: S101 - as in the plan
    return Allocated(patterns, dataclasses.replace(report, budget=state.recipe.allocation.budget))
