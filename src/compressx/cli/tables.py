"""What the commands print, as sections; those of a run's report are made in `report/contents.py`."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from compressx.allocation.units import zeros_of
from compressx.api.names import folded, kind_of
from compressx.api.patterns import UNIT_KINDS
from compressx.masks.inspect import AS_BASE, sparsity_of
from compressx.planning.make import who_prunes
from compressx.plugins.kinds import EXPORTER
from compressx.report import plots
from compressx.report.section import Column, Section, Spread, Value, count_of, estimates, table

if TYPE_CHECKING:
    from pathlib import Path

    from compressx.api.evaluator import Figures
    from compressx.evaluation.saved import Applied
    from compressx.masks.inspect import Inspected, Inspection
    from compressx.models.packed_folder import Sizes
    from compressx.pipeline.timed import RunTime
    from compressx.planning.plan import Plan
    from compressx.plugins.manager import Plugins
    from compressx.prompts.answer import Answer
    from compressx.recipe.schema import Recipe

_COSTS = (Column("tokens", "d"), Column("seconds", ".2f"), Column("peak GiB", ".2f"))
_SPARSITY = Column("sparsity", ".2%")
_SPECTRA = (
    Column("stable rank", ".1f"), Column("stable rank of W_Q^T W_K", ".1f"), Column("change", ".2%"),
    Column("largest change", ".2g"), Column("unchanged", ".2%"), Column("stable rank of change", ".1f"),
    Column("r90 of change", ".4g"),
)  # fmt: skip


def full_size(recipe: Recipe, plugins: Plugins) -> str:
    """Say that zeros are stored, and what makes that smaller; empty where a recipe did it, or keeps no `model/`."""
    units = any(isinstance(rule.pattern, str) for rule in recipe.prune)  # `shrink` may have refused their widths
    formats = [plugins.find(EXPORTER, export.format) for export in recipe.export]
    if recipe.shrink or not any(x.dense for x in formats) or (units and any(x.own_widths for x in formats)):
        return ""
    stored = f"files are as large as the dense model's: compressx {{}} {shlex.quote(str(recipe.output))}"
    if units:
        return f"{stored.format('export')} writes a smaller one, in which each block has its own width"
    able = ", ".join(f"{unit} ({who_prunes(unit, plugins)})" for unit in UNIT_KINDS)
    return f"{stored.format('pack')} makes them smaller; for a smaller model, set shrink: true and prune units: {able}"


def of_plan(plan: Plan, *, every: bool = False) -> Iterator[Section]:
    """Yield the linears with pruner, pattern and shape, and what is skipped and why; folded unless `every`."""
    if not plan.linears:
        yield Section(note="nothing is pruned: the recipe selects tokens only")
        return
    rows = [(x.name, x.rule.label, plan.shown_pattern(x), f"{x.shape[0]} x {x.shape[1]}") for x in plan.linears]
    skipped = [*plan.skipped.items()]
    columns: list[Column | str] = ["pruner", "pattern", Column("shape", "s")]
    if every:
        yield Section(table=table(["linear", *columns], rows))
        yield Section(table=table(["not pruned", "reason"], skipped))
    else:
        alike: list[Sequence[Value]] = [(name, count, *rest) for name, count, rest in folded(rows)]
        yield Section(table=table(["linear", Column("linears", "d"), *columns], alike))
        yield Section(table=table(["not pruned", "reason"], [(name, *rest) for name, _, rest in folded(skipped)]))
    weights = sum(x.weights for x in plan.linears)
    sparsity = f"sparsity {zeros_of(plan.linears) / weights:.2%}"
    if plan.allocation is not None:
        sparsity = f"target sparsity {plan.allocation.fraction:.2%}"
    yield Section(note=f"{len(plan.linears)} linears, {weights / 1e6:.1f} M weights, {sparsity}")
    if plan.warning:
        yield Section(note=f"warning: {plan.warning}")
    if plan.depth is not None:
        yield Section(
            note=f"{plan.depth.rule.label} drops {plan.depth.pattern.dropped} of {len(plan.depth.blocks)} blocks, "
            "which it chooses when the recipe is run; the other rules prune the blocks that stay"
        )
    if (settings := plan.allocation) is not None:
        yield Section(
            note=f"{settings.method} measures {settings.measures} when the recipe is run, and chooses sparsities then "
            f"(unit {settings.unit}, {settings.samples} samples)"
        )


def of_sizes(memory_bytes: Mapping[str, int], disk_bytes: Mapping[str, int]) -> Iterator[Section]:
    """Yield the memory that pruning takes and the disk of a run, by part."""
    yield Section(note=f"memory: at least {_bytes(memory_bytes)}")
    yield Section(note=f"disk: {_bytes(disk_bytes)}")


def of_time(measured: RunTime | None) -> Iterator[Section]:
    """Yield what a run will take, stage by stage, and what that leaves out; nothing if it was not measured."""
    if measured is None:
        return
    yield Section(table=table(["stage", Column("seconds", ".1f")], measured.seconds.items()))
    each = measured.seconds["prune"] / max(1, measured.blocks)
    gpu = measured.peak_gpu_memory_bytes
    yield Section(
        note=f"about {_duration(measured.total)} on {measured.device}, {each:.2f} seconds a block to prune; peak of "
        f"memory {_size(measured.peak_memory_bytes)}" + (f", of the GPU's {_size(gpu)}" if gpu else "")
    )
    yield Section(note=f"not measured: {', '.join(measured.left_out)}")


def _duration(seconds: float) -> str:
    """Write a length of time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _bytes(parts: Mapping[str, float]) -> str:
    """Write a sum of bytes and its parts."""
    listed = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
    return f"{_size(sum(parts.values()))} ({listed})"


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def of_figures(figures: Figures) -> Iterator[Section]:
    """Yield what was measured, each number under its full name."""
    measured = {
        f"{name} {metric}".rstrip(): value
        for name, values in figures.items()
        for metric, value in (values.items() if isinstance(values, Mapping) else [("", values)])
        if isinstance(value, int | float)
    }
    yield Section(table=table(["measure", Column("value", ".6g")], estimates(measured).items()))
    if isinstance(sample := figures.get("sample"), Mapping):
        yield Section("Sample", text=f"{sample['prompt']}{sample['text']}")


def of_answer(answer: Answer, selector: str | None) -> Iterator[Section]:
    """Yield what answering a prompt took, stage by stage, and which tokens a selector, if any, chose of it."""
    memory = {name: used / 2**30 for name, used in answer.peak_memory_bytes.items()}
    rows: list[Sequence[Value]] = [
        ("prefill", answer.kept_tokens, answer.seconds["prefill"], None),
        ("generate", answer.new_tokens, answer.seconds["generate"], memory["generate"]),
    ]
    if selector is not None:
        rows = [("select", answer.prompt_tokens, answer.seconds["select"], memory["select"]), *rows]
    yield Section(table=table(["stage", *_COSTS], rows))
    if answer.kept_tokens == answer.prompt_tokens:
        yield Section(note=f"read all of the prompt's {answer.prompt_tokens} tokens")
        return
    how = f"{selector} ({answer.reason})" if answer.reason else selector
    yield Section(note=f"read {answer.kept_tokens} of the prompt's {answer.prompt_tokens} tokens, chosen by {how}")


def of_applied(applied: Applied, output: Path) -> Iterator[Section]:
    """Yield what putting masks on a model changed."""
    dropped = sum(x.dropped_not_zero for x in applied.before.values())
    zero = sum(x.kept_zero for x in applied.before.values())
    became = "the base's" if applied.based else "zero"
    also = f"; {zero} weights that the masks keep were {became}" if zero else ""
    on = f"masks on {applied.masked} of {applied.linears} linears"
    yield Section(note=f"{on}: {dropped} weights became {became}{also}; written to {output}")


def of_inspection(found: Inspection) -> Iterator[Section]:
    """Yield one row for each linear, then the sum by kind."""
    compared: list[Column | str] = ["mask", Column("off mask", "d")] if found.masks else []
    rows = []
    for x in found.linears:
        mask = (x.mask or "none", x.off_mask) if found.masks else ()
        rows.append((x.name, x.pattern, "yes" if x.two_four else "no", *mask, x.sparsity, *_spectra([x])))
    yield Section(table=table(["linear", "pattern", "2:4", *compared, _SPARSITY, *_SPECTRA], rows))
    kinds: dict[str, list[Inspected]] = {}
    for linear in found.linears:
        kinds.setdefault(kind_of(linear.name), []).append(linear)
    sums = [(kind, _patterns(some), len(some), sparsity_of(some), *_spectra(some)) for kind, some in kinds.items()]
    yield Section(table=table(["module", "patterns", Column("linears", "d"), _SPARSITY, *_SPECTRA], sums))
    fits = sum(x.two_four for x in found.linears)
    off = sum(x.off_mask or 0 for x in found.linears)
    based = any(x.mask and x.mask.endswith(AS_BASE) for x in found.linears)
    wanted = "the base's" if based else "zero"
    counts = f"{off} weights are not {wanted} that it drops"
    if based and not found.base:
        counts = "which drops to the weights of a base: give it by --base"
    also = f"; compared with {found.masks}, {counts}" if found.masks else ""
    counted = f"sparsity {found.sparsity:.2%} of {len(found.linears)} linears; 2:4 holds for {fits}"
    also += f"; changes are from {found.base}" if found.base else ""
    if found.unread:
        also += f"; no W_Q^T W_K in {count_of(found.unread, 'block')}: {found.unread[0].partition(';')[0]}"
    yield Section(note=f"{found.folder}: {counted}{also}")


def _spectra(linears: Sequence[Inspected]) -> list[Any]:
    """Return the values of `_SPECTRA`: medians over some linears, and over all their heads with least and most."""
    heads = [rank for x in linears for rank in x.heads]
    rows = [(x.stable_rank, *(astuple(x.change) if x.change else [None] * 5)) for x in linears]
    known = ([value for value in values if value is not None] for values in zip(*rows, strict=True))
    first, *others = (statistics.median(some) if some else None for some in known)
    return [first, Spread.of(heads) if heads else None, *others]


def draw_inspection(found: Inspection, path: Path) -> Iterator[Section]:
    """Draw what there is beside zeros over the blocks: a panel for each column, a line for each kind of linear."""
    groups: dict[tuple[str, str], list[Inspected]] = {}
    for x in found.linears:
        groups.setdefault((kind_of(x.name), next(filter(str.isdecimal, x.name.split(".")), "")), []).append(x)
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for (kind, block), some in groups.items():
        for column, value in zip(_SPECTRA, _spectra(some), strict=True):
            if value is not None:
                blocks, values = panels.setdefault(column.name, {}).setdefault(kind, ([], []))
                blocks.append(int(block))
                values.append(value.median if isinstance(value, Spread) else value)
    if panels:
        plots.error_by_layer(path, "", panels)
        yield Section(figures=({"file": path.name, "caption": f"Medians by decoder block: {', '.join(panels)}."},))


def _patterns(linears: Sequence[Inspected]) -> str:
    """Name the patterns of some linears, three at most: each may have its own."""
    patterns = list(dict.fromkeys(x.pattern for x in linears))
    return ", ".join(patterns if len(patterns) <= 3 else [*patterns[:2], f"{len(patterns) - 2} others"])


def of_packed(sizes: Sizes) -> Iterator[Section]:
    """Yield the sizes of a packed model's tensors, by what is left out of them, and of its files."""
    rows: list[tuple[Value, ...]] = []
    kinds = {"differences from the base": [tensor for tensor in sizes.tensors if tensor.differs]} if sizes.base else {}
    for kind, masked in (("tensors with zeros", True), ("other tensors", False)):
        kinds[kind] = [tensor for tensor in sizes.tensors if tensor.masked == masked and not tensor.differs]
    for kind, some in kinds.items():
        dense, packed = (sum(t.bytes for t in some), sum(t.packed_bytes for t in some))
        rows.append((kind, *_shares(dense, packed, sum(t.mask_and_values for t in some))))
    predicted = sum(tensor.mask_and_values for tensor in sizes.tensors)
    rows.append(("files of weights", *_shares(sizes.bytes, sizes.packed_bytes, predicted)))
    whole = (n + sizes.other_bytes for n in (sizes.bytes, sizes.packed_bytes, predicted))
    rows.append(("the whole folder", *_shares(*whole)))
    megabytes = [Column(name, ".1f") for name in ("dense, MB", "packed, MB")]
    shares = [Column(name, ".2%") for name in ("packed / dense", "masks and values / dense")]
    note = "" if sizes.base is None else f"to be unpacked with its base, {sizes.base}"
    yield Section(f"Packed: {sizes.folder}", table=table(["", *megabytes, *shares], rows), note=note)


def _shares(dense: int, packed: int, predicted: int) -> tuple[Value, ...]:
    return dense / 1e6, packed / 1e6, packed / dense if dense else None, predicted / dense if dense else None
