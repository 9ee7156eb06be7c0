"""How the command line prints: progress, sections, and lines for layers. Plain text when not a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import rich.table
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from compressx.api.hooks import hookimpl
from compressx.api.names import in_short
from compressx.api.record import BlockReport, shared
from compressx.pipeline.context import Progress as Tell
from compressx.report.section import Section, Table

if TYPE_CHECKING:
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


def show(*sections: Section) -> None:
    """Print sections; those for reference are only named, in one line at the end."""
    console = _console()
    for section in sections:
        if not section.brief:
            _print(console, section)
    if reference := [f"{section.title.lower()} ({section.brief})" for section in sections if section.brief]:
        console.print(f"in the report: {'; '.join(reference)}", markup=False)


def _print(console: Console, section: Section) -> None:
    if section.title:
        console.print(section.title, style="bold", markup=False)
    if section.note:
        console.print(section.note, markup=False)
    if section.table.rows:
        console.print(_table(section.table))
    for figure in section.figures:
        console.print(f"{figure['caption']} {figure['file']}", markup=False)
    if section.text:
        console.print(section.text, markup=False)


def _table(shown: Table) -> rich.table.Table:
    laid_out = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(shown.names))
    for column in shown.columns:
        number = bool(column.form)  # text that is too long goes on below, since a name cut short names nothing
        laid_out.add_column(column.name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in shown.texts:
        laid_out.add_row(*map(Text, row))
    return laid_out


def checked(pruner: str, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Go through the checks of a pruner, and show on standard error which one is under way."""
    found: list[Outcome] = []
    with Console(stderr=True).status(f"checking {pruner}") as status:
        for outcome in outcomes:
            found.append(outcome)
            status.update(f"checking {pruner} on {outcome.architecture}: {outcome.check}")
    return found
