"""Several runs side by side, the best first: what each reached, at what cost."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from compressx.api.record import RunReport
from compressx.report import plots
from compressx.report.contents import model_name
from compressx.report.flips import Flips, flips_in
from compressx.report.markdown import to_markdown
from compressx.report.section import Best, Column, Section, Table, table
from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import atomic_write, os_errors_named

_REPORT: TypeAdapter[RunReport] = TypeAdapter(RunReport)

_LESS = ("perplexity", "bits_per_byte", "perplexity_ratio", "kl_divergence")
_MORE = ("acc", "acc_norm", "exact_match", "f1", "mcc", "top1_agreement")
"""Ends of the names of measures of which less, or more, is better."""


@dataclass(frozen=True)
class Compared:
    """One run.

    Attributes:
        name: of its folder, below that which all share.
        report: what it did.
        measures: by name and model (`dense`, `pruned`, `finetuned`), every number that it measured.
        flips: likewise, of documents beside the dense model's.
    """

    name: str
    report: RunReport
    measures: dict[tuple[str, str], float]
    flips: dict[tuple[str, str], Flips]


@dataclass(frozen=True)
class Comparison:
    """Several runs.

    Attributes:
        runs: by the first measured perplexity of the last model that each made, the least first; those without one in
            the order given.
        warnings: why their numbers may not be comparable.
    """

    runs: tuple[Compared, ...]
    warnings: tuple[str, ...]

    @property
    def measures(self) -> list[tuple[str, str]]:
        """Name what was measured, and of which model, in any run."""
        order = ("dense", "pruned", "finetuned")
        return sorted({key: 0 for run in self.runs for key in run.measures}, key=lambda key: order.index(key[1]))

    @property
    def table(self) -> Table:
        """A row for each run; what it did not measure is empty."""
        named = [f"{name.replace('_', ' ')}, {of}" for name, of in self.measures]
        measures = chain(*((Column(name, ".4g"), Column(f"{name}: flips")) for name in named))
        gpu = any(run.report.peak_gpu_memory_bytes for run in self.runs)
        rows = [
            (run.name, run.report.pruners, run.report.sparsity,
             *chain(*((self._value(run, key), run.flips.get(key)) for key in self.measures)),
             run.report.seconds.get("total", 0.0), run.report.peak_memory_bytes / 2**30,
             run.report.peak_gpu_memory_bytes / 2**30 if gpu else None)
            for run in self.runs
        ]  # fmt: skip
        costs = Column("seconds", ".0f"), Column("GiB", ".1f"), Column("GPU GiB", ".1f")
        return table(["run", "pruners", Column("sparsity", ".2%"), *measures, *costs], rows)

    def _value(self, run: Compared, key: tuple[str, str]) -> float | None:
        """Return what a run measured, marked if it is the best of comparable runs that are as sparse or sparser."""
        value, sign = run.measures.get(key), sign_of(key[0])
        others = [x for x in self.runs if x is not run and key in x.measures]
        if value is None or not sign or key[1] == "dense" or not others or self.warnings:
            return value
        rivals = [x for x in others if round(x.report.sparsity, 3) >= round(run.report.sparsity, 3)]
        return value if any(sign * x.measures[key] > sign * value for x in rivals) else Best(value)

    def sections(self) -> tuple[Section, ...]:
        """Return the table and the warnings."""
        marked = any(isinstance(value, Best) for row in self.table.rows for value in row)
        note = "The best of each column is marked: no run that is as sparse or sparser has a better value."
        return Section(note=note if marked else "", table=self.table), *(
            Section(note=f"warning: {text}") for text in self.warnings
        )

    def write(self, folder: Path) -> list[Path]:
        """Write `compare.md`, `compare.csv` with numbers in full and, where something was measured, `compare.svg`."""
        written = [folder / "compare.md", folder / "compare.csv"]
        atomic_write(written[0], to_markdown(self.sections()).encode())
        csv.writer(stream := io.StringIO(), lineterminator="\n").writerows([self.table.names, *self.table.rows])
        atomic_write(written[1], stream.getvalue().encode())
        if self.measures:
            written.append(folder / "compare.svg")
            plots.lines(written[-1], self._panels(), plots.BY_SPARSITY)
        return written

    def _panels(self) -> dict[str, dict[str, plots.Line]]:
        """Give each measure a panel, and in it each combination of pruners a line of values over sparsity in percent.

        Runs of one combination that share a sparsity differ in something else, and no line joins them.
        """
        panels: dict[str, dict[str, set[tuple[float, float]]]] = {}
        for name, of in self.measures:
            if name.partition(",")[0].endswith("stderr"):  # of the harness's filters: `exact_match_stderr,strict`
                continue
            points = panels.setdefault(name.replace("_", " "), {})
            measured = [run for run in self.runs if (name, of) in run.measures]
            for run in measured:
                alike = [x.report.sparsity for x in measured if x.report.pruners == run.report.pruners]
                label = run.report.pruners + (", fine-tuned" if of == "finetuned" else "")
                if len({*alike}) < len(alike):
                    label = f"{run.name}: {label}"
                place = (label, 100 * run.report.sparsity) if of != "dense" else ("dense", 0.0)
                points.setdefault(place[0], set()).add((place[1], run.measures[name, of]))
        return {
            title: {label: ([x for x, _ in sorted(of)], [y for _, y in sorted(of)]) for label, of in points.items()}
            for title, points in panels.items()
        }


def read_runs(folders: Sequence[Path]) -> list[Compared]:
    """Read the reports of several runs, given by output folders or `report.json` files."""
    folders = [folder.parent if folder.name == "report.json" else folder for folder in folders]
    common = os.path.commonpath([folder.resolve().parent for folder in folders])
    found = []
    for folder in folders:
        report, name = read_report(folder), str(folder.resolve().relative_to(common))
        found.append(Compared(name, report, report.measures(), flips_in(report.evaluation)))
    return found


def side_by_side(folders: Sequence[Path]) -> Comparison:
    """Compare several runs, given as for `read_runs`."""
    runs = tuple(sorted(read_runs(folders), key=_perplexity))
    return Comparison(runs, tuple(warnings_about(runs)))


def _perplexity(run: Compared) -> float:
    """Return what runs are sorted by."""
    found = {of: value for (name, of), value in reversed(run.measures.items()) if name.endswith(_LESS[0])}
    return found.get("finetuned", found.get("pruned", math.inf))


def sign_of(name: str) -> int:
    """Return whether more is better (1), less is better (-1), or neither is known (0)."""
    metric = name.rsplit(" ", 1)[-1].partition(",")[0]
    return -1 if metric.endswith(_LESS) else int(metric in _MORE)


def read_report(folder: Path) -> RunReport:
    """Read a run's `report.json`."""
    path = folder / "report.json"
    if not path.is_file():
        raise ArtifactError(f"{folder}: it holds no report.json; expected the output folder of a finished run")
    with os_errors_named("read", path):
        content = path.read_bytes()
    try:
        return _REPORT.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ArtifactError(f"{path}: {place}: {first['msg']}; was it written by this version of compressx?") from None


def warnings_about(runs: Sequence[Compared]) -> list[str]:
    """Say what makes numbers of different runs differ besides pruning."""
    said = []
    models = {model_name(run.report.model) for run in runs}
    if len(models) > 1:
        said.append(f"Different models: {', '.join(sorted(models))}.")
    for name, of in dict.fromkeys(key for run in runs for key in run.measures):
        values = {f"{run.measures[name, of]:.6g}" for run in runs if (name, of) in run.measures}
        if of == "dense" and len(values) > 1 and len(models) == 1:
            said.append(
                f"The dense model's {name.replace('_', ' ')} differs ({', '.join(sorted(values))}): it was measured in "
                "different ways, such as on another text, so the others are not comparable either."
            )
    return said
