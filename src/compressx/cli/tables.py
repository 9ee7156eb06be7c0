"""What the commands print, as sections; those of a run's report are made in `report/contents.py`."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compressx.allocation.units import zeros_of
from compressx.api.names import folded, kind_of
from compressx.api.patterns import UNIT_KINDS
from compressx.api.record import numbers_in
from compressx.masks.inspect import share_of_zeros
from compressx.plugins.kinds import EXPORTER
from compressx.report.contents import compared
from compressx.report.section import Column, Section, Value, estimates, table

if TYPE_CHECKING:
    from compressx.api.evaluator import Figures
    from compressx.masks.inspect import Inspected, Inspection
    from compressx.models.packed_folder import Sizes
    from compressx.pipeline.timed import RunTime
    from compressx.planning.plan import Plan
    from compressx.plugins.manager import Plugins
    from compressx.prompts.answer import Answer
    from compressx.recipe.schema import Recipe

_COSTS = (Column("tokens", "d"), Column("seconds", ".2f"), Column("peak GiB", ".2f"))
_SPARSITY = Column("sparsity", ".2%")
_CHANGES = (Column("change", ".2%"), Column("unchanged", ".2%"))


def full_size(recipe: Recipe, plugins: Plugins) -> str:
    """Say that zeros are stored, and what makes that smaller; empty where a recipe did it, or keeps no `model/`."""
    dense = any(plugins.find(EXPORTER, export.format).dense for export in recipe.export)
    if recipe.shrink or recipe.own_widths or not dense:
        return ""
    return (
        f"files are as large as the dense model's: compressx pack {shlex.quote(str(recipe.output))} makes them "
        f"smaller; for a smaller model, prune {', '.join(UNIT_KINDS)} with shrink: true"
    )


def of_plan(plan: Plan) -> Iterator[Section]:
    """Yield the linears with pruner, pattern and shape, and what is skipped and why, equal ones in one row."""
    if not plan.linears:
        yield Section(note="nothing is pruned: the recipe selects tokens only")
        return
    rows = [(x.name, x.rule.label, plan.shown_pattern(x), f"{x.shape[0]} x {x.shape[1]}") for x in plan.linears]
    alike: list[Sequence[Value]] = [(name, count, *rest) for name, count, rest in folded(rows)]
    yield Section(table=table(["linear", Column("linears", "d"), "pruner", "pattern", Column("shape", "s")], alike))
    skipped = folded(plan.skipped.items())
    yield Section(table=table(["not pruned", "reason"], [(name, *reason) for name, _, reason in skipped]))
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


def of_footprint(found: Mapping[str, Any]) -> Iterator[Section]:
    """Yield how large the dense and the pruned model are, by type of file; nothing where no units are removed."""
    if found:
        dense, kept = (n / 1e6 for n in found["parameters"])
        read, form = found["decode_bytes"], ".1f"
        rows = [(kind, *(n / 1e6 for n in (*both, *read[kind]))) for kind, both in found["bytes"].items()]
        names = ("dense, MB", "pruned, MB", "a token reads, MB", "of the pruned, MB")
        note = f"of {dense:.1f} M parameters {kept:.1f} M are kept, {kept / dense:.2%}"
        yield Section(note=note, table=table(["file", *(Column(name, form) for name in names)], rows))


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


def of_figures(evaluation: Mapping[str, Figures]) -> Iterator[Section]:
    """Yield what was measured, each number under its full name; by `pruned` and, if it was measured too, `dense`."""
    if "dense" in evaluation:
        yield from compared(evaluation)
    else:
        rows = estimates(numbers_in(evaluation["pruned"])).items()
        yield Section(table=table(["measure", Column("value", ".6g")], rows))
    if isinstance(sample := evaluation["pruned"].get("sample"), Mapping):
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


def of_inspection(found: Inspection) -> Iterator[Section]:
    """Yield one row for each linear, then the sum by kind."""
    compared: list[Column | str] = ["mask", Column("off mask", "d")] if found.masks else []
    rows = []
    for x in found.linears:
        mask = (x.mask or "none", x.off_mask) if found.masks else ()
        rows.append((x.name, x.pattern, *mask, x.sparsity, x.change, x.unchanged))
    yield Section(table=table(["linear", "pattern", *compared, _SPARSITY, *_CHANGES], rows))
    kinds: dict[str, list[Inspected]] = {}
    for linear in found.linears:
        kinds.setdefault(kind_of(linear.name), []).append(linear)
    sums = []
    for kind, some in kinds.items():
        changes = [(x.change, x.unchanged) for x in some if x.change is not None and x.unchanged is not None]
        medians = map(statistics.median, zip(*changes, strict=True)) if changes else (None, None)
        own = [*dict.fromkeys(x.pattern for x in some)]
        patterns = ", ".join(own if len(own) <= 3 else [*own[:2], f"{len(own) - 2} others"])
        sums.append((kind, patterns, len(some), share_of_zeros(some), *medians))
    yield Section(table=table(["module", "patterns", Column("linears", "d"), _SPARSITY, *_CHANGES], sums))
    counted = f"sparsity {found.sparsity:.2%} of {len(found.linears)} linears"
    yield Section(note=f"{found.folder}: {counted}{found.compared}")


def of_packed(sizes: Sizes) -> Iterator[Section]:
    """Yield the sizes of a packed model's tensors, by what is left out of them, and of its files."""
    kinds = {"tensors that differ": [tensor for tensor in sizes.tensors if tensor.differs]} if sizes.needs else {}
    for kind, masked in (("tensors with zeros", True), ("other tensors", False)):
        kinds[kind] = [tensor for tensor in sizes.tensors if tensor.masked == masked and not tensor.differs]
    rows = [(kind, sum(t.bytes for t in some), sum(t.packed_bytes for t in some)) for kind, some in kinds.items()]
    rows.append(("files of weights", sizes.bytes, sizes.packed_bytes))
    rows.append(("the whole folder", sizes.bytes + sizes.other_bytes, sizes.packed_bytes + sizes.other_bytes))
    shares = [(kind, dense / 1e6, packed / 1e6, packed / dense if dense else None) for kind, dense, packed in rows]
    columns = [Column("dense, MB", ".1f"), Column("packed, MB", ".1f"), Column("packed / dense", ".2%")]
    yield Section(f"Packed: {sizes.folder}", table=table(["", *columns], shares), note=sizes.needs)
