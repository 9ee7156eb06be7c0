"""How the command line prints: progress and sections. Plain text when not a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.table
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from compressx.report.section import Best, Section, Table, Value
from compressx.stages.log import FORMAT, LOG
from compressx.stages.state import Progress as Tell

_TEXT = 12
"""Least width of a column of text that is longer."""


@contextmanager
def progress(*, quiet: bool = False, verbose: bool = False) -> Iterator[Tell]:
    """Show the stages of a run on standard error: a bar each on a terminal, else the lines of its log.

    `quiet` shows warnings only; `verbose` the lines on a terminal, too, and everywhere those with details.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False))  # fmt: skip
    bare = quiet or (console.is_terminal and not verbose)
    level = logging.WARNING if bare else logging.DEBUG if verbose else logging.INFO
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bars, _lines(level):
        tasks: dict[str, object] = {}

        def tell(stage: str, done: int, total: int, note: str) -> None:
            for other, task in tasks.items():
                if other != stage:  # a new stage means that the one before it is done
                    bars.update(task, completed=bars.tasks[task].total)  # type: ignore[arg-type,call-overload]
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, note=note)
            bars.update(tasks[stage], completed=done, total=total, note=note)  # type: ignore[arg-type]

        yield tell


@contextmanager
def under_way() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows on standard error, if it is a terminal, what is under way."""
    with Console(stderr=True).status("") as status, _lines(logging.WARNING):
        yield status.update


@contextmanager
def _lines(level: int) -> Iterator[None]:
    """Show the lines of runs from a level on, on standard error."""
    handler = logging.StreamHandler(sys.stderr)  # above the bars, if there are any: they have replaced `sys.stderr`
    handler.setFormatter(FORMAT)
    before = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(level)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(before)


def show(*sections: Section, console: Console | None = None, stderr: bool = False) -> None:
    """Print sections, on standard output if nothing else is given; those for reference are only named, in one line."""
    if console is None:
        console = Console(highlight=False, stderr=stderr)
        if not console.is_terminal:
            console.width = 200  # a pipe has no width; do not wrap what a program may read
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
        console.print(_table(section.table), crop=False)  # what is too narrow for its numbers wraps whole lines
    for figure in section.figures:
        console.print(f"{figure['caption']} {figure['file']}", markup=False)
    if section.text:
        console.print(section.text, markup=False)


def _table(shown: Table) -> rich.table.Table:
    laid_out = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(shown.names))
    marked = [any(isinstance(row[i], Best) for row in shown.rows) for i in range(len(shown.columns))]
    rows = [list(map(_cell, *row, marked)) for row in zip(shown.texts, shown.rows, strict=True)]
    for i, column in enumerate(shown.columns):
        number, longest = bool(column.form), max((row[i].cell_len for row in rows), default=0)
        # Headings and text that is too long go on below, since a name cut short names nothing; a number cannot.
        words = max(map(len, column.name.split()), default=0)
        least = max(words, longest if number else min(longest, _TEXT))
        laid_out.add_column(column.name, justify="right" if number else "left", min_width=least, overflow="fold")
    for row in rows:
        laid_out.add_row(*row)
    return laid_out


def _cell(text: str, value: Value, marked: bool) -> Text:
    """Write a cell; in a column where something is marked as best, the others have a space in place of the mark."""
    if isinstance(value, Best):
        return Text(f"{text}*", style="bold")
    return Text(f"{text} " if marked else text)
