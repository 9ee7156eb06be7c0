"""The sections of a run's report, in order. To add one, write a function and name it in `BUILDERS`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sized
from textwrap import shorten
from typing import Any, TypeAlias

from compressx.api.names import kind_of
from compressx.api.patterns import allocated_form
from compressx.api.record import BlockReport, FinetuneReport, LayerReport, RunReport, total_sparsity
from compressx.report.section import Column, Section, Table, Value, estimates, table

Builder: TypeAlias = Callable[[RunReport], Iterator[Section]]

_SECONDS = Column("seconds", ".1f")
_SPARSITY = Column("sparsity", ".2%")


def sections(report: RunReport, recipe: str = "") -> tuple[Section, ...]:
    """Return every section that there is something for; the first is the head."""
    found = [section for build in BUILDERS for section in build(report)]
    if recipe:
        found.append(Section("Recipe", text=recipe, brief=_count(recipe.splitlines(), "line")))
    return tuple(found)


def model_name(model: Mapping[str, Any]) -> str:
    """Return what a model source is called."""
    return str(model.get("id") or model.get("path") or model.get("file"))


def _head(report: RunReport) -> Iterator[Section]:
    """Yield what matters most: name, value, note."""
    rows = [("sparsity", f"{report.sparsity:.2%}", f"of {len(report.layers)} linears")] if report.layers else []
    if report.shrink:
        before, after = report.shrink["parameters"]
        numbers = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in report.shrink["config"].items())
        rows.insert(0, ("parameters", f"{after / 1e6:.4g} M", f"dense {before / 1e6:.4g} M, {numbers}"))
    for name, dense, *pruned in _changes(report)[:2]:
        value, change, *_ = pruned or (dense, None)
        changed = "" if change is None else f", {change:+.1%}"
        note = f"dense {dense:.4g}{changed}" if pruned else "dense"
        rows.append((str(name).replace("_", " "), f"{value:.4g}", note))
    total = report.seconds.get("total", sum(report.seconds.values()))
    took = f"{total / 60:.1f} min" if total >= 120 else f"{total:.0f} s"
    rows.append(("time", took, ", ".join(dict.fromkeys(layer.pruner for layer in report.layers))))
    gpu = f"on the GPU {report.peak_gpu_memory_bytes / 2**30:.1f} GiB" if report.peak_gpu_memory_bytes else ""
    rows.append(("peak memory", f"{report.peak_memory_bytes / 2**30:.1f} GiB", gpu))
    found = table(["measure", "value", "note"], rows)
    done = "Pruned" if report.layers else "Measured"
    yield Section(f"{done} {model_name(report.model)}", f"compressx {report.compressx}", found)


def evaluation(report: RunReport) -> Iterator[Section]:
    """Yield what was measured of all models."""
    if rows := _changes(report):
        changed = [c for of in _changed(report) for c in (Column(of, ".4g"), Column("change", "+.1%"))]
        title = "Dense against pruned" if changed else "Measured"
        yield Section(title, table=table(["measure", Column("dense", ".4g"), *changed], rows))


def _changed(report: RunReport) -> list[str]:
    """Name the models that were measured beside the dense one, the last first: a narrow screen shows the result."""
    return [of for of in ("finetuned", "pruned") if of in report.evaluation]


def _changes(report: RunReport) -> list[list[Any]]:
    """Return `[measure, dense, finetuned, change, pruned, change]` of what was measured of all; changes from dense.

    A run that prunes nothing measures the dense model only.
    """
    measured, changed = report.measures(), _changed(report)
    shown = {of: estimates({n: v for (n, model), v in measured.items() if model == of}) for of in ("dense", *changed)}
    rows = []
    for name, value in shown["dense"].items():
        if (changed or not report.layers) and all(name in shown[of] for of in changed):
            dense = measured[name, "dense"]
            changes = [measured[name, of] / dense - 1 if dense else None for of in changed]
            rows.append(
                [name, value, *(x for of, c in zip(changed, changes, strict=True) for x in (shown[of][name], c))]
            )
    return rows


def _sample(report: RunReport) -> Iterator[Section]:
    """Yield what each model wrote after the same prompt, side by side."""
    if written := {of: values["sample"] for of, values in report.evaluation.items() if "sample" in values}:
        prompt = shorten(next(iter(written.values()))["prompt"], 300)
        found = table(
            [Column(of, look="prose") for of in written],
            [[said["text"].strip() or "(nothing that can be read)" for said in written.values()]],
        )
        yield Section("Sample", f'What each model writes after "{prompt}", the likeliest token each time.', found)


def _needles(report: RunReport) -> Iterator[Section]:
    """Yield a grid of each model and way to read: a row for each depth, a column for each length of prompt."""
    for of, values in report.evaluation.items():
        cells = values.get("needle", {}).get("grid", ())
        depths, lengths = ([*dict.fromkeys(cell[key] for cell in cells)] for key in ("depth", "length"))
        for name in [key for key in (cells[0] if cells else ()) if key not in {"depth", "length"}]:
            found = {(cell["depth"], cell["length"]): cell[name] for cell in cells}
            rows = [[depth, *(found[depth, length] for length in lengths)] for depth in depths]
            columns = [Column("depth", ".0%"), *(Column(f"{length} tokens", ".0%", "heat") for length in lengths)]
            note = "Sentences hidden at a depth of a prompt: the share of questions about them that are answered."
            if name == "kept, selected":
                note = "Sentences hidden at a depth of a prompt: the share of their tokens that are selected."
            yield _shaded(f"Needles, {of}: {name}", note, table(columns, rows), _count(cells, "cell"))


def _run(report: RunReport) -> Iterator[Section]:
    """Yield when, where and how the run was made."""
    text = "{samples} windows of {sequence_length} tokens, seed {seed}"
    rows = [
        ("date", report.date.replace("T", " ")),
        ("command", report.command),
        ("hardware", report.hardware),
        ("calibration", text.format(**report.calibration) if report.calibration else ""),
        ("matrix products", str(report.arithmetic or "")),
    ]
    if given := [row for row in rows if row[1]]:
        yield Section("Run", table=table(["run", Column("value", look="prose")], given))


def modules(report: RunReport) -> Iterator[Section]:
    """Yield a row for each kind of linear, pruner and pattern.

    Allocated sparsities, which differ from linear to linear, are one pattern: `allocated row`, or `allocated N:4`.
    """
    groups: dict[tuple[str, str, str], list[LayerReport]] = defaultdict(list)
    for layer in report.layers:
        pattern = allocated_form(layer.pattern) if report.allocation else layer.pattern
        groups[kind_of(layer.name), layer.pruner, pattern].append(layer)
    rows = [(*key, len(some), total_sparsity(some), sum(x.seconds for x in some)) for key, some in groups.items()]
    found = table(["module", "pruner", "pattern", Column("layers", "d"), _SPARSITY, _SECONDS], rows)
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
        rows.append([_number(block), *(total_sparsity(alike[k]) if k in alike else None for k in kinds)])
    found = table(["block", *(Column(kind, ".1%", "heat") for kind in kinds)], rows)
    if rows:
        yield _shaded("Sparsity by layer and module", "", found, _count(rows, "block"))


def _shaded(title: str, note: str, found: Table, brief: str) -> Section:
    """Return a section of a table in which shades show what differs; where nothing does, a sentence says so."""
    shades = {text for row in found.texts for text in row[1:] if text}
    if len(shades) == 1:
        return Section(title, f"{note} All are {shades.pop()}.".strip(), brief=brief)
    return Section(title, note, found, brief=brief)


def _curves(report: RunReport) -> Iterator[Section]:
    if figures := tuple(f for f in report.figures if f["file"].endswith(".svg")):
        yield Section("Errors and curves", figures=figures, brief=_count(figures, "figure"))


def _blocks(report: RunReport) -> Iterator[Section]:
    """Yield what pruning did to each block's output, and how long it took."""
    error, seconds = Column("output error", "#.3g", "bar"), Column("seconds", ".1f", "bar")
    rows = [(_number(x), len(x.layers), total_sparsity(x.layers), x.output_error, x.seconds) for x in report.blocks]
    if not rows:
        return
    yield Section(
        "By block",
        "Output error: what a block's pruning alone changes in its output, squared and relative, large channels "
        "counting less, the mean over the first tokens of the calibration text, before any reconstruction. Seconds: "
        "observing, pruning, reconstructing.",
        table(["block", Column("linears", "d"), _SPARSITY, error, seconds], rows),
        brief=_count(rows, "block"),
    )


def _stages(report: RunReport) -> Iterator[Section]:
    yield Section("Seconds by stage", table=table(["stage", _SECONDS], report.seconds.items()))


def _allocation(report: RunReport) -> Iterator[Section]:
    """Yield how sparsities were chosen, and every unit."""
    if (chosen := report.allocation) is None:
        return
    note = (f"{chosen.method}, by {chosen.unit}, target {chosen.target:.2%}: {chosen.zeros} zeros of "
            f"{chosen.weights} weights.")  # fmt: skip
    if any(unit.divergence is not None for unit in chosen.units):
        note += (
            " The divergence is that of the model's predictions from the dense model's when these linears alone are "
            "pruned, estimated to second order on held-out text, in nats, the mean over tokens; the sum was made least."
        )
    if any(unit.outliers is not None for unit in chosen.units):
        note += (
            " Outliers are the fraction of weights whose size times the norm of their input feature is far above the "
            "block's mean."
        )
    divergence, outliers = Column("predicted divergence", ".3g"), Column("outliers", ".3%")
    rows = [
        (unit.block or "outside", ", ".join(dict.fromkeys(map(kind_of, unit.linears))), unit.pruner, unit.sparsity,
         unit.divergence, unit.outliers)
        for unit in chosen.units
    ]  # fmt: skip
    found = table(["block", "linears", "pruner", _SPARSITY, divergence, outliers], rows)
    yield Section("Allocation", note, found, brief=_count(rows, "unit"))


def _reconstruction(report: RunReport) -> Iterator[Section]:
    """Yield what training did to the error of each block's output."""
    rows = [
        (_number(block), x.before, x.after, f"{x.history.index(x.after)} of {len(x.history) - 1}", x.seconds)
        for block in report.blocks
        if (x := block.reconstruction) is not None
    ]
    if rows:
        before, after = Column("before", ".4g"), Column("after", ".4g")
        yield Section(
            "Block reconstruction",
            "Squared relative error of each block's output on calibration text that was held out, before and after its "
            "survivors were trained: what the pruned blocks give against what the dense ones gave, channels counting "
            "as the model's loss reacts to them, the mean over tokens.",
            table(["block", before, after, Column("best pass", "s"), _SECONDS], rows),
            brief=_count(rows, "block"),
        )


def _finetuning(report: RunReport) -> Iterator[Section]:
    if (tuned := report.finetune) is not None:
        rows = [(x.step, x.seconds / 60, x.loss) for x in tuned.held_out]
        columns = [Column("steps", "d"), Column("minutes", ".1f"), Column("held-out loss", ".4g")]
        yield Section("Fine-tuning", told(tuned), table(columns, rows))


def told(tuned: FinetuneReport) -> str:
    """Return how a model was fine-tuned, in one sentence."""
    count, tokens = tuned.windows
    taught_by = "the dense model" if tuned.teacher == "dense" else tuned.teacher
    loss = "next-token loss" if tuned.teacher == "none" else f"divergence from {taught_by}"
    first, last = tuned.losses[0], tuned.losses[-1]
    measured = f"{first:.4g} at the first, {last:.4g} at the last"
    if tuned.held_out:
        kept = min(tuned.held_out, key=lambda x: x.loss)
        measured = f"on held-out windows {tuned.held_out[0].loss:.4g} before, {kept.loss:.4g} after {kept.step} steps"
    return (
        f"{tuned.steps} steps on {count} windows of {tokens} tokens, {tuned.trained / 1e6:.3g} M numbers trained: "
        f"{loss} {measured}."
    )


def _matrices(report: RunReport) -> Iterator[Section]:
    if figures := tuple(f for f in report.figures if not f["file"].endswith(".svg")):
        yield Section("Matrices, dense and pruned", figures=figures, brief=_count(figures, "figure"))


def _layers(report: RunReport) -> Iterator[Section]:
    """Yield every pruned linear, and every weight that was not."""
    sparsity, seconds = Column("sparsity", ".4f"), Column("seconds", ".2f")
    rows = [
        (x.name, x.pruner, x.pattern, x.sparsity, x.seconds, ", ".join(f"{k} {v:.4g}" for k, v in x.info.items()))
        for x in report.layers
    ]
    found = table(["layer", "pruner", "pattern", sparsity, seconds, "figures"], rows)
    if rows:
        yield Section("Layers", table=found, brief=_count(rows, "pruned linear"))
    if skipped := [(s["name"], s["reason"]) for s in report.skipped]:
        yield Section("Not pruned", table=table(["weight", "reason"], skipped), brief=_count(skipped, "weight"))
    if report.unread:
        found = table(["of the checkpoint, and not in the result"], [(name,) for name in report.unread])
        yield Section("Not read", table=found, brief=_count(report.unread, "name"))


def _software(report: RunReport) -> Iterator[Section]:
    """Yield the libraries and the plugins."""
    if versions := report.versions.items():
        yield Section("Versions", table=table(["library", "version"], versions), brief=_count(versions, "package"))
    columns = ["name", "version", "source", "module"]
    if rows := [[plugin[column] for column in columns] for plugin in report.plugins]:
        yield Section("Plugins", table=table(["plugin", *columns[1:]], rows), brief=f"{len(rows)} loaded")


def _count(what: Sized, name: str) -> str:
    """Count things, such as `1 block` or `2 blocks`."""
    return f"{len(what)} {name}" + ("" if len(what) == 1 else "s")


def _number(block: BlockReport) -> str:
    return str(block.index) if block.fqn else "outside"


BUILDERS: tuple[Builder, ...] = (
    _head, evaluation, _needles, _sample, _run, modules, _heat, _curves, _blocks, _stages, _allocation, _reconstruction,
    _finetuning, _matrices, _layers, _software,
)  # fmt: skip
