"""`report.md`: a run's report as a page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compressx.api.record import SUMMARY_COLUMNS, AllocationReport, BlockReport, RunReport, total_sparsity


def page(report: RunReport) -> str:
    """Return the content of `report.md`: the summary, then figures, then every layer."""
    lines = [
        f"# Pruned {model_name(report.model)}",
        "",
        f"compressx {report.compressx}, sparsity {report.sparsity:.2%}",
    ]
    if report.evaluation:
        lines += ["", *markdown_table(report.evaluation_columns(), report.evaluation_rows())]
    lines += ["", "## By module", "", *markdown_table(SUMMARY_COLUMNS, report.summary_rows())]
    if report.allocation is not None:
        lines += ["", "## Allocation", "", *allocation_table(report.allocation).lines()]
    lines += ["", "## By block", "", *block_table(report.blocks).lines()]
    if (trained := reconstruction_table(report.blocks)).rows:
        lines += ["", "## Block reconstruction", "", *trained.lines()]
    if report.finetune is not None:
        lines += ["", "## Fine-tuning", "", f"{report.finetune.summary()}."]
    lines += [
        "",
        "## Seconds",
        "",
        *markdown_table(["stage", "s"], [[k, f"{v:.1f}"] for k, v in report.seconds.items()]),
    ]
    if report.figures:
        lines += ["", "## Figures"]
    for figure in report.figures:
        lines += ["", figure["caption"], "", f"![{figure['caption']}]({figure['file']})"]
    lines += ["", "## Layers", ""]
    lines += markdown_table(["layer", "pruner", "pattern", "sparsity", "seconds", "figures"], layer_rows(report))
    if report.skipped:
        lines += ["", "## Not pruned", ""]
        lines += markdown_table(["weight", "reason"], [[s["name"], s["reason"]] for s in report.skipped])
    return "\n".join(lines) + "\n"


_MEASURES = {
    "predicted divergence": "The divergence is that of the model's predictions from the dense model's when these "
    "linears alone are pruned, estimated to second order on held-out text, in nats, the mean over tokens; the sum was "
    "made least.",
    "outliers": "Outliers are the fraction of weights whose size times the norm of their input feature is far above "
    "the block's mean.",
}


class Told(NamedTuple):
    """A sentence and a table."""

    told: str
    columns: list[str]
    rows: list[list[str]]

    def lines(self) -> list[str]:
        """Return both in Markdown."""
        return [self.told, "", *markdown_table(self.columns, self.rows)]


def allocation_table(allocation: AllocationReport) -> Told:
    """Say how sparsities were chosen, and list every unit; columns that hold nothing are left out."""
    table = [["block", "linears", "pruner", "sparsity", *_MEASURES], *allocation.rows()]
    shown = [i for i in range(len(table[0])) if i < 4 or any(row[i] for row in table[1:])]
    header, *rows = ([row[i] for i in shown] for row in table)
    target = "" if allocation.target is None else f", target {allocation.target:.2%}"
    told = " ".join(text for name, text in _MEASURES.items() if name in header)
    return Told(
        f"{allocation.method}, by {allocation.unit}, scope {allocation.scope}{target}: {allocation.zeros} zeros of "
        f"{allocation.weights} weights. {told}".rstrip(),
        header,
        rows,
    )


def block_table(blocks: Sequence[BlockReport]) -> Told:
    """Say what pruning did to each block's output, and how long it took."""
    return Told(
        "Output error: what a block's pruning alone changes in its output, squared and relative, large channels "
        "counting less, the mean over the first tokens of the calibration text, before any reconstruction. Seconds: "
        "observing, pruning, reconstructing.",
        ["block", "linears", "sparsity", "output error", "seconds"],
        [
            [x.name, str(len(x.layers)), f"{total_sparsity(x.layers):.2%}",
             "" if x.output_error is None else f"{x.output_error:.4g}", f"{x.seconds:.1f}"]
            for x in blocks
        ],
    )  # fmt: skip


def reconstruction_table(blocks: Sequence[BlockReport]) -> Told:
    """Say what training did to the error of each block's output, and list every block."""
    rows = []
    for block in blocks:
        if (x := block.reconstruction) is not None:
            best = f"{x.history.index(x.after)} of {len(x.history) - 1}"
            rows.append([block.name, f"{x.before:.4g}", f"{x.after:.4g}", best, f"{x.seconds:.1f}"])
    return Told(
        "Squared relative error of each block's output on calibration text that was held out, before and after its "
        "survivors were trained: what the pruned blocks give against what the dense ones gave, channels counting as "
        "the model's loss reacts to them, the mean over tokens.",
        ["block", "before", "after", "best pass", "seconds"],
        rows,
    )


def layer_rows(report: RunReport) -> list[list[str]]:
    """Return `[layer, pruner, pattern, sparsity, seconds, figures]` of every pruned linear."""
    return [
        [x.name, x.pruner, x.pattern, f"{x.sparsity:.4f}", f"{x.seconds:.2f}",
         ", ".join(f"{k} {v:.4g}" for k, v in x.info.items())]
        for x in report.layers
    ]  # fmt: skip


def model_name(model: Mapping[str, Any]) -> str:
    """Return what a model source is called."""
    return str(model.get("id") or model.get("path") or model.get("file"))


def markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(r)} |" for r in rows)]
