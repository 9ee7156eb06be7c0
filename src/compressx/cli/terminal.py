"""What the command line prints: progress, tables, and lines for layers. Plain text when not a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from compressx.allocation.units import zeros_of
from compressx.api.hooks import hookimpl
from compressx.api.record import SUMMARY_COLUMNS, BlockReport, RunReport, in_short, shared
from compressx.pipeline.context import Progress as Tell
from compressx.planning.plan import Plan
from compressx.plugins import kinds
from compressx.plugins.record import PluginRecord
from compressx.recipe.methods import MeasuredAllocation

if TYPE_CHECKING:
    from compressx.evaluation.perplexity import Figures
    from compressx.evaluation.saved import Applied
    from compressx.masks.inspect import Inspection
    from compressx.report.compare import Comparison
    from compressx.testing.conformance import Outcome


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a pipe has no width; do not wrap what a program may read
    return console


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Tell]:
    """Show the stages of a run on standard error: a bar each on a terminal, nothing when it is not one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bars:
        tasks: dict[str, object] = {}

        def tell(stage: str, done: int, total: int, note: str) -> None:
            for other, task in tasks.items():
                if other != stage:  # a new stage means that the one before it is done
                    bars.update(task, completed=bars.tasks[task].total)  # type: ignore[arg-type,call-overload]
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note=note)
            bars.update(tasks[stage], completed=done, total=total, note=note)  # type: ignore[arg-type]

        yield tell


class LayerLines:
    """A plugin that prints a line for every pruned layer, with the figures that its pruner gave, and its curves."""

    @hookimpl
    def compressx_block_pruned(self, report: BlockReport) -> None:
        """Print the layers of one block."""
        console = _console()
        for layer in report.layers:
            figures = "  ".join(f"{k} {v:.4g}" for k, v in layer.info.items())
            console.print(
                f"{layer.name}  {layer.pruner}  {layer.pattern}  sparsity {layer.sparsity:.4f}  "
                f"{layer.seconds:.2f} s  {figures}".rstrip(),
                markup=False,
            )
        for names, history in shared((layer.name, layer.history) for layer in report.layers):
            curves = "; ".join(f"{name} {_curve(values)}" for name, values in history.items())
            console.print(f"{in_short(names)}  {curves}", markup=False)
        if (error := report.output_error) is not None:
            console.print(f"{report.fqn}  output error {error:.4g}  {report.seconds:.1f} s", markup=False)
        if (trained := report.reconstruction) is not None:
            console.print(
                f"{report.fqn}  reconstructed in {trained.seconds:.1f} s  held-out error {_curve(trained.history)}",
                markup=False,
            )


def _curve(values: Sequence[float], shown: int = 5) -> str:
    """Write a curve's first and last value and a few between, evenly apart."""
    last = len(values) - 1
    steps = sorted({round(i * last / (shown - 1)) for i in range(shown)})
    between = " ... " if len(steps) < len(values) else " "
    return between.join(f"{values[i]:.3g}" for i in steps) + f" ({len(values)} steps)"


def print_summary(report: RunReport, output: Path) -> None:
    """Print what a run did: perplexities first, then sparsity by kind of module."""
    console = _console()
    if report.evaluation:
        console.print(_table(["measure", *report.evaluation_columns()[1:]], report.evaluation_rows(), left=1))
    console.print(_table(SUMMARY_COLUMNS, report.summary_rows(), left=3))
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in report.seconds.items())
    console.print(f"sparsity {report.sparsity:.2%} of the planned linears; {seconds}; "
                  f"peak memory {report.peak_memory_bytes / 2**30:.1f} GiB", markup=False)  # fmt: skip
    if report.finetune is not None:
        console.print(f"fine-tuning: {report.finetune.summary()}", markup=False)
    if report.skipped:
        console.print(f"not pruned: {len(report.skipped)} weights, listed with reasons in report.md")
    console.print(f"written to {output}", markup=False)


def print_plan(plan: Plan) -> None:
    """Print every linear with its pruner, pattern and shape, and what is skipped and why."""
    console = _console()
    rows = [[x.name, x.rule.label, plan.shown_pattern(x), f"{x.shape[0]} x {x.shape[1]}"] for x in plan.linears]
    console.print(_table(["linear", "pruner", "pattern", "shape"], rows, left=3))
    if plan.skipped:
        console.print(_table(["not pruned", "reason"], [list(s) for s in plan.skipped.items()], left=2))
    weights = sum(x.weights for x in plan.linears)
    sparsity = f"sparsity {zeros_of(plan.linears) / weights:.2%}"
    if plan.allocation is not None:
        sparsity = f"target sparsity {plan.allocation.target:.2%}"
    console.print(f"{len(plan.linears)} linears, {weights / 1e6:.1f} M weights, {sparsity}")
    if isinstance(settings := plan.allocation, MeasuredAllocation):
        console.print(
            f"{settings.method} measures {settings.measures} when the recipe is run, and chooses sparsities then "
            f"(unit {settings.unit}, scope {settings.scope}, {settings.samples} samples)",
            markup=False,
        )


def print_plugins(records: Sequence[PluginRecord]) -> None:
    """Print one row for each plugin, and below it why those that failed did."""
    console = _console()
    keys = [kind.key for kind in kinds.KINDS]
    columns = ["name", "version", "source", "status", *keys, "distribution"]
    offers = [[", ".join(r.offers.get(key, ())) for key in keys] for r in records]
    rows = [
        [r.name, r.version or "", r.source, r.status, *offered, r.distribution or ""]
        for r, offered in zip(records, offers, strict=True)
    ]
    console.print(_table(columns, rows, left=len(columns)))
    for record in records:
        if record.error:
            console.print(f"{record.name}: {record.error}", markup=False)


def print_figures(figures: Figures) -> None:
    """Print what was measured, each number under its full name."""
    rows = [
        [f"{name} {metric}".rstrip(), f"{value:.6g}"]
        for name, values in figures.items()
        for metric, value in (values.items() if isinstance(values, dict) else [("", values)])
    ]
    _console().print(_table(["measure", "value"], rows, left=1))


def print_applied(applied: Applied, output: Path) -> None:
    """Print what putting masks on a model changed."""
    dropped = sum(x.dropped_not_zero for x in applied.before.values())
    zero = sum(x.kept_zero for x in applied.before.values())
    also = f"; {zero} weights that the masks keep were zero" if zero else ""
    on = f"masks on {applied.masked} of {applied.linears} linears"
    _console().print(f"{on}: {dropped} weights became zero{also}; written to {output}", markup=False)


def print_inspection(found: Inspection) -> None:
    """Print one row for each linear, then the sum by kind."""
    console = _console()
    columns = found.columns()
    console.print(_table(columns, found.rows(), left=len(columns) - 1 - bool(found.masks)))
    console.print(_table(["module", "patterns", "linears", "sparsity"], found.kind_rows(), left=2))
    fits = sum(x.two_four for x in found.linears)
    off = sum(x.off_mask or 0 for x in found.linears)
    console.print(
        f"{found.folder}: sparsity {found.sparsity:.2%} of {len(found.linears)} linears; 2:4 holds for {fits}"
        + (f"; compared with {found.masks}, {off} weights are not zero that it drops" if found.masks else ""),
        markup=False,
    )


def print_comparison(found: Comparison, written: Sequence[Path]) -> None:
    """Print several runs side by side, and where the table and the plot went."""
    console = _console()
    console.print(_table(found.columns(), found.rows(), left=2))
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False)
    if written:
        console.print(f"written to {', '.join(map(str, written))}", markup=False)


def print_conformance(pruner: str, outcomes: Iterable[Outcome]) -> bool:
    """Print what each check of a pruner found on each architecture, and why those that failed did.

    Returns:
        Whether one failed.
    """
    console = _console()
    found: list[Outcome] = []
    with Console(stderr=True).status(f"checking {pruner}") as status:
        for outcome in outcomes:
            found.append(outcome)
            status.update(f"checking {pruner} on {outcome.architecture}: {outcome.check}")
    architectures = list(dict.fromkeys(o.architecture for o in found if o.architecture))
    by_place = {(o.check, o.architecture): o for o in found}
    refused = {o.architecture for o in found if o.status == "refused"}
    words = {"passed": "ok", "failed": "FAILED", "refused": "refused", "skipped": "-"}
    rows = []
    for check in dict.fromkeys(o.check for o in found):
        if (check, "") in by_place:
            cells = [words[by_place[check, ""].status]] * max(1, len(architectures))
        else:
            cells = [
                words[by_place[check, a].status] if (check, a) in by_place else "refused" if a in refused else ""
                for a in architectures
            ]
        rows.append([check, *cells])
    console.print(_table([pruner, *(architectures or [""])], rows, left=1 + len(architectures)))
    for outcome in found:
        if outcome.status in ("failed", "refused"):
            where = f" ({outcome.architecture})" if outcome.architecture else ""
            console.print(f"{words[outcome.status]}: {outcome.check}{where}: {outcome.detail}", markup=False)
    failed = sum(o.status == "failed" for o in found)
    passed = sum(o.status == "passed" for o in found)
    console.print(f"{pruner}: {passed} checks passed, {failed} failed"
                  + (f", {len(refused)} architectures refused" if refused else ""), markup=False)  # fmt: skip
    return failed > 0


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> Table:
    """Lay out a table whose first `left` columns are text and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        text = i < left  # what is too long for the terminal goes on below, since a name cut short names nothing
        table.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
