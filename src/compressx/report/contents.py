"""What a report says of the whole run, before and after what its stages say: see `stages.state.Stage.sections`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from compressx.api.record import RunReport, numbers_in
from compressx.report.flips import flips_in
from compressx.report.section import Column, Section, counted, estimates, table

COMPARED = ("perplexity_ratio", "kl_divergence", "top1_agreement")  # of `fidelity`


def model_name(model: Mapping[str, Any]) -> str:
    """Return what a model source is called."""
    return str(model.get("id") or model.get("path") or model.get("file"))


def head(report: RunReport) -> Iterator[Section]:
    """Yield what matters most: name, value, note."""
    rows = [(report.share, f"{report.sparsity:.2%}", f"of {report.linears}")] if report.layers else []
    if report.shrink:
        before, after = report.shrink["parameters"]
        numbers = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in report.shrink["config"].items())
        rows.insert(0, ("parameters", f"{after / 1e6:.4g} M", f"dense {before / 1e6:.4g} M, {numbers}"))
    for name, dense, *pruned in _foremost(_changes(report.evaluation)):
        value, change, *_ = pruned or (dense, None)
        compared = "" if dense is None else f"dense {dense:.4g}" + ("" if change is None else f", {change:+.1%}")
        note = compared or "beside the dense model" if pruned else "dense"
        rows.append((str(name).replace("_", " "), f"{value:.4g}", note))
    total = report.seconds.get("total", sum(report.seconds.values()))
    took = f"{total / 60:.1f} min" if total >= 120 else f"{total:.0f} s"
    rows.append(("time", took, report.pruners))
    gpu = f"on the GPU {report.peak_gpu_memory_bytes / 2**30:.1f} GiB" if report.peak_gpu_memory_bytes else ""
    rows.append(("peak memory", f"{report.peak_memory_bytes / 2**30:.1f} GiB", gpu))
    found = table(["measure", "value", "note"], rows)
    done = "Pruned" if report.layers else "Measured"
    yield Section(f"{done} {model_name(report.model)}", f"compressx {report.compressx}", found)


def _foremost(changes: list[list[Any]]) -> list[list[Any]]:
    """Return the first two measures, and those of the first text that compare predictions with the dense model's."""
    text = changes[0][0].rpartition(" ")[0] if changes else ""
    return [row for i, row in enumerate(changes) if i < 2 or row[0] in [f"{text} {x}".strip() for x in COMPARED]]


def evaluation(report: RunReport) -> Iterator[Section]:
    """Yield what was measured of all models."""
    return compared(report.evaluation)


def compared(evaluation: Mapping[str, Mapping[str, Any]]) -> Iterator[Section]:
    """Yield what was measured of models, by `dense`, `pruned` and `finetuned`."""
    if rows := _changes(evaluation):
        each = [(Column(of, ".4g"), Column("change", "+.1%"), Column("flips")) for of in _changed(evaluation)]
        title = "Dense against pruned" if each else "Measured"
        yield Section(title, table=table(["measure", Column("dense", ".4g"), *chain(*each)], rows))


def _changed(evaluation: Mapping[str, Any]) -> list[str]:
    """Name the models that were measured beside the dense one, the last first: a narrow screen shows the result."""
    return [of for of in ("finetuned", "pruned") if of in evaluation]


def _changes(evaluation: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """Return `[measure, dense, finetuned, change, flips, pruned, change, flips]` of what was measured of all.

    What compares a model with the dense one is not measured of that.
    """
    changed, flipped = _changed(evaluation), flips_in(evaluation)
    numbers = {of: numbers_in(evaluation.get(of, {})) for of in ("dense", *changed)}
    shown = {of: estimates(measured) for of, measured in numbers.items()}
    rows = []
    for name in [name for name in shown[(*changed, "dense")[0]] if all(name in shown[of] for of in changed)]:
        dense = numbers["dense"].get(name)
        row: list[Any] = [name, shown["dense"].get(name)]
        for of in changed:
            change = (numbers[of][name] - dense) / abs(dense) if dense else None
            row += [shown[of][name], change, flipped.get((name, of))]
        rows.append(row)
    return rows


def of_run(report: RunReport) -> Iterator[Section]:
    """Yield when, where and how the run was made."""
    text = "{samples} sequences of {sequence_length} tokens, seed {seed}"
    rows = [
        ("date", report.date.replace("T", " ")),
        ("command", report.command),
        ("hardware", report.hardware),
        ("calibration", text.format(**report.calibration) if report.calibration else ""),
        ("matmuls", str(report.arithmetic or "")),
        ("written", ", ".join(f"{x['folder']} ({x['format']}, {x['bytes'] / 1e6:.4g} MB)" for x in report.exports)),
    ]
    if given := [row for row in rows if row[1]]:
        yield Section("Run", table=table(["run", Column("value", look="prose")], given))
    yield from _exports(report)


def _exports(report: RunReport) -> Iterator[Section]:
    """Yield what was measured of the files that were written, beside the model itself."""
    of = {x["format"]: x for x in report.exports if "evaluation" in x}
    measured = {name: numbers_in(x["evaluation"]) for name, x in of.items()}
    shown = ("token_perplexity", *COMPARED)
    names = [n for n in dict.fromkeys(n for numbers in measured.values() for n in numbers) if n.endswith(shown)]
    own, last = report.measures(), next(iter(_changed(report.evaluation)), "dense")
    rows = [
        [name, x["bytes"] / 1e6, x["zeros"], *(y for n in names for y in (own.get((n, last)), measured[name][n]))]
        for name, x in of.items()
    ]
    each = [c for n in names for c in (Column(f"{n.replace('_', ' ')}, {last}", ".4g"), Column("in the file", ".4g"))]
    if rows:
        columns = [Column("format"), Column("MB", ".4g"), Column("zeros", ".2%"), *each]
        yield Section("Written files, read again", table=table(columns, rows))


def _figures(report: RunReport) -> Iterator[Section]:
    curves = tuple(f for f in report.figures if f["file"].endswith(".svg"))
    matrices = tuple(f for f in report.figures if f not in curves)
    for title, figures in (("Errors and curves", curves), ("Matrices, dense and pruned", matrices)):
        if figures:
            yield Section(title, figures=figures, brief=counted(figures, "figure"))


def _layers(report: RunReport) -> Iterator[Section]:
    """Yield every pruned linear, and every weight that was not."""
    sparsity, seconds = Column(report.share, ".4f"), Column("seconds", ".2f")
    rows = [
        (x.name, x.pruner, x.pattern, x.sparsity, x.seconds, ", ".join(f"{k} {v:.4g}" for k, v in x.info.items()))
        for x in report.layers
    ]
    found = table(["layer", "pruner", "pattern", sparsity, seconds, "figures"], rows)
    if rows:
        yield Section("Layers", table=found, brief=counted(rows, "pruned linear"))
    if skipped := [(s["name"], s["reason"]) for s in report.skipped]:
        yield Section("Not pruned", table=table(["weight", "reason"], skipped), brief=counted(skipped, "weight"))
    if report.unread:
        found = table(["of the checkpoint, and not in the result"], [(name,) for name in report.unread])
        yield Section("Not read", table=found, brief=counted(report.unread, "name"))


def _software(report: RunReport) -> Iterator[Section]:
    """Yield the libraries and the plugins."""
    if versions := report.versions.items():
        yield Section("Versions", table=table(["library", "version"], versions), brief=counted(versions, "package"))
    columns = ["name", "version", "source", "module"]
    if rows := [[plugin[column] for column in columns] for plugin in report.plugins]:
        yield Section("Plugins", table=table(["plugin", *columns[1:]], rows), brief=f"{len(rows)} loaded")


def details(report: RunReport, recipe: str = "") -> Iterator[Section]:
    """Yield what comes last: seconds, figures, every linear, software and the recipe."""
    yield Section("Seconds by stage", table=table(["stage", Column("seconds", ".1f")], report.seconds.items()))
    for build in (_figures, _layers, _software):
        yield from build(report)
    if recipe:
        yield Section("Recipe", text=recipe, brief=counted(recipe.splitlines(), "line"))
