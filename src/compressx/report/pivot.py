"""Runs as a table for a paper: a row for each method, a column for each sparsity."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from compressx.api.names import kind_of
from compressx.api.record import RunReport
from compressx.report.compare import Compared, read_runs, sign_of, warnings_about
from compressx.report.markdown import to_markdown
from compressx.report.section import Best, Column, Section, Table
from compressx.runtime.errors import ArtifactError, CompressxError, did_you_mean, one_line

_ESCAPES = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "±": r"$\pm$"}
_LATEX = str.maketrans(_ESCAPES | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})


class Mean(float):
    """A mean over seeds, written `20.5 ± 0.71 (1.03x)`, with the sample's deviation and the ratio to `dense`."""

    values: Sequence[float] = ()
    dense = 0.0  # unknown

    @classmethod
    def of(cls, values: Sequence[float], dense: float = 0.0) -> Mean:
        """Average values, at least one."""
        mean = cls(fmean(values))
        mean.values, mean.dense = values, dense
        return mean

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 of one value."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    def __format__(self, form: str) -> str:
        spread = f" ± {self.deviation:.2g}" if len(self.values) > 1 else ""
        return f"{float(self):{form}}{spread}" + (f" ({self / self.dense:.3g}x)" if self.dense else "")

    def ties(self, best: Mean) -> bool:
        """Return whether it is printed like the best, or within two standard errors of the difference."""
        error = math.hypot(*(x.deviation / math.sqrt(len(x.values)) for x in (self, best)))
        return f"{float(self):.4g}" == f"{float(best):.4g}" or abs(self - best) <= 2 * error


class _BestMean(Mean, Best):
    pass


def pivot(folders: Sequence[Path], measure: str | None = None, methods: Sequence[str] = ()) -> tuple[Section, ...]:
    """Return a table of what the last model of each run measured, and warnings.

    Args:
        folders: output folders, or `report.json` files.
        measure: a name in the reports; when absent the first perplexity, or what is measured first.
        methods: the name of each run's; when absent it is made of what its report says.
    """
    runs = read_runs(folders)
    names = [*dict.fromkeys(name for run in runs for name, of in run.measures if of != "dense")]
    if measure is not None and measure not in names:
        told = did_you_mean(measure, names) or "expected runs of recipes with evaluate"
        raise CompressxError(f"--measure {one_line(measure)}: no run has it; {told}")
    name = measure or next((name for name in names if name.endswith("perplexity")), next(iter(names), "nothing"))
    cells: dict[str, dict[tuple[bool, float, str], list[Compared]]] = {}
    for run, method in zip(runs, methods or [_method(run.report) for run in runs], strict=True):
        cells.setdefault(method, {}).setdefault(_sparsity(run.report), []).append(run)
    sparsities, warnings = sorted({at for row in cells.values() for at in row}), warnings_about(runs)
    columns: list[list[Mean | str | None]] = [["dense", *cells]]
    for at in sparsities:
        means = [_mean(row.get(at, []), name, f"{method} at {at[-1]}") for method, row in cells.items()]
        found = [mean for mean in means if mean is not None]
        dense = [mean.dense for mean in found if mean.dense]
        if (sign := 0 if warnings or len(found) < 2 else sign_of(name)) != 0:
            best = max(found, key=lambda mean: sign * mean)
            means = [_BestMean.of(x.values, x.dense) if x is not None and x.ties(best) else x for x in means]
        columns.append([Mean.of([fmean(dense)]) if dense else None, *means])
    note = (
        f"{name.replace('_', ' ').capitalize()}: mean ± standard deviation over seeds (ratio to the dense model). The "
        "best of each column is marked, and what is within two standard errors of the difference from it."
    )
    headings = Column("method"), *(Column(at[-1], ".4g") for at in sparsities)
    shown = Section(note=note, table=Table(headings, tuple(zip(*columns, strict=True))))
    return shown, *(Section(note=f"warning: {text}") for text in warnings)


def _mean(runs: Sequence[Compared], name: str, cell: str) -> Mean | None:
    """Average what the last models of a cell's runs measured; refuse runs that differ in more than the seed."""
    seeds = {run.report.calibration.get("seed") for run in runs}
    alike = {str(({**x.report.calibration, "seed": 0}, [(y.name, y.pruner) for y in x.report.layers])) for x in runs}
    if len(seeds) < len(runs) or len(alike) > 1:
        raise ArtifactError(
            f"{', '.join(run.name for run in runs)}: all are {cell}; expected runs that differ in calibration.seed and "
            "in nothing else; leave out the others"
        )
    last = [(run.measures, "finetuned" if run.report.finetune else "pruned") for run in runs]
    dense = [measures[name, "dense"] for measures, _ in last if (name, "dense") in measures]
    values = [measures[name, of] for measures, of in last if (name, of) in measures]
    return Mean.of(values, fmean(dense) if dense else 0.0) if values else None


def _method(report: RunReport) -> str:
    """Name pruners as `sweep --methods` takes them, and what else decided or trained the kept weights."""
    taken: dict[str, dict[str, None]] = {}
    for layer in report.layers:
        taken.setdefault(layer.pruner, {})[kind_of(layer.name)] = None
    most = sorted(taken, key=lambda pruner: len(taken[pruner]))
    named = [f"{x}:{'qk' if {*taken[x]} == {'q_proj', 'k_proj'} else ','.join(taken[x])}" for x in most]
    if report.targeted >= 0.995:
        named[-1:] = most[-1:]
    trained = {"reconstruct_block": any(block.reconstruction for block in report.blocks), "finetune": report.finetune}
    more = [report.allocation.method] if report.allocation else []
    return ", ".join(["+".join(named), *more, *(section for section, there in trained.items() if there)])


def _sparsity(report: RunReport) -> tuple[bool, float, str]:
    """Return whether a run's pattern is N:M, the fraction of zeros that was asked for, and both in words."""
    weights = sum(math.prod(layer.shape) for layer in report.layers)
    asked = round(sum(math.prod(layer.shape) * layer.target for layer in report.layers) / max(1, weights), 4)
    patterns = {layer.pattern for layer in report.layers}
    nm = len(patterns) == 1 and ":" in min(patterns)
    return nm, asked, min(patterns) if nm else f"{100 * asked:.4g}%"


def _csv(shown: Section) -> str:
    """Return numbers in full: for each sparsity the mean, the deviation and the number of runs."""
    names, writer = shown.table.names, csv.writer(stream := io.StringIO(), lineterminator="\n")
    writer.writerow([names[0], *(f"{name}{of}" for name in names[1:] for of in ("", " deviation", " runs"))])
    for method, *row in shown.table.rows:
        cells = [(float(x), x.deviation, len(x.values)) if isinstance(x, Mean) else ("", "", "") for x in row]
        writer.writerow([method, *(number for cell in cells for number in cell)])
    return stream.getvalue()


def _latex(shown: Section) -> str:
    """Return a tabular for the package booktabs."""
    head, *texts = [[x.translate(_LATEX) for x in row] for row in (shown.table.names, *shown.table.texts)]
    rows = [
        [rf"\textbf{{{text}}}" if isinstance(value, Best) else text for text, value in zip(*row, strict=True)]
        for row in zip(texts, shown.table.rows, strict=True)
    ]
    first, *others = [f"{' & '.join(row)} \\\\" for row in (head, *rows)]
    begin = rf"\begin{{tabular}}{{l{'r' * len(head[1:])}}}"
    return "\n".join([begin, r"\toprule", first, r"\midrule", *others, r"\bottomrule", r"\end{tabular}", ""])


FORMATS: Mapping[str, Callable[[Section], str]] = {
    "markdown": lambda shown: to_markdown([shown]), "csv": _csv, "latex": _latex
}  # fmt: skip
