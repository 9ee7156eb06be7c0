"""A section of a report: one value, which the terminal, Markdown and HTML show without knowing what it is about."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Literal, TypeAlias

from compressx.api.record import BlockReport
from compressx.report.flips import Flips
from compressx.runtime.errors import printable


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error, written `0.412 ± 0.014`."""

    value: float
    error: float

    def __format__(self, form: str) -> str:
        return f"{self.value:{form}} ± {self.error:.2g}"


@dataclass(frozen=True)
class Spread:
    """Several values, at least one: their median, the least and the most, written `2.0 (1.0 to 5.0)`."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize values."""
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"


Value: TypeAlias = str | float | Estimate | Flips | None


def estimates(measured: Mapping[str, float]) -> dict[str, float | Estimate]:
    """Join numbers with their standard errors, `acc` with `acc_stderr`; the names and their order are kept."""
    # The harness calls that of `exact_match,strict` `exact_match_stderr,strict`.
    errors = {name: "{}_stderr{}{}".format(*name.partition(",")) for name in measured}
    return {
        name: Estimate(value, measured[errors[name]]) if errors[name] in measured else value
        for name, value in measured.items()
        if name not in errors.values()
    }


class Best(float):
    """A number that is marked as the best of its column."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        form: how its values are written, such as `.2%`; they are set right then. Empty for text, which is set left.
        look: what a page in colour adds to its numbers: `heat` shades a fraction of one, `bar` draws a bar as long as
            the number is in proportion to the column's largest; `prose` lets long text run over several lines.
    """

    name: str
    form: str = ""
    look: Literal["", "heat", "bar", "prose"] = ""

    def text(self, value: Value) -> str:
        """Write a value; None is empty."""
        return "" if value is None else printable(format(value, self.form))


@dataclass(frozen=True)
class Table:
    """Rows of values, one for each column."""

    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Value, ...], ...] = ()

    @property
    def names(self) -> list[str]:
        """The headings."""
        return [printable(column.name) for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """The rows as they are written."""
        return [[c.text(value) for c, value in zip(self.columns, row, strict=True)] for row in self.rows]


def table(columns: Sequence[Column | str], rows: Iterable[Sequence[Value]]) -> Table:
    """Make a table; columns that are empty in every row are left out.

    Args:
        columns: a name alone is a column of text.
        rows: one value for each column; None where there is none.
    """
    listed = list(rows)
    shown = [i for i in range(len(columns)) if any(row[i] not in (None, "") for row in listed)]
    named = [Column(c) if isinstance(c, str) else c for c in columns]
    return Table(tuple(named[i] for i in shown), tuple(tuple(row[i] for i in shown) for row in listed))


@dataclass(frozen=True)
class Section:
    """One section; what is empty is not shown.

    Attributes:
        title: the first section's is the page's. Backticks mark code in `title`, `note` and captions.
        note: a sentence or a few, above the table.
        table: of values.
        figures: `file`, inside the output folder, and `caption` of each.
        text: shown as it is, line by line.
        language: of `text`, for a Markdown page.
        brief: what it holds, such as `210 linears`, of a section for reference: the terminal shows this in its place,
            and a page folds it when it is long.
    """

    title: str = ""
    note: str = ""
    table: Table = Table()
    figures: tuple[Mapping[str, str], ...] = ()
    text: str = ""
    language: str = ""
    brief: str = ""

    def __post_init__(self) -> None:
        """Make what it says printable: names in it are a stranger's."""
        for name in ("title", "note", "text"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        object.__setattr__(self, "figures", tuple({k: printable(v) for k, v in f.items()} for f in self.figures))


def shaded(title: str, note: str, found: Table, brief: str) -> Section:
    """Return a section of a table in which shades show what differs; where nothing does, a sentence says so."""
    shades = {text for row in found.texts for text in row[1:] if text}
    if len(shades) == 1:
        return Section(title, f"{note} All are {shades.pop()}.".strip(), brief=brief)
    return Section(title, note, found, brief=brief)


def counted(what: Sized, name: str) -> str:
    """Count things, such as `1 block` or `2 blocks`."""
    return f"{len(what)} {name}" + ("" if len(what) == 1 else "s")


def number_of(block: BlockReport) -> str:
    """Return a block's number for a table."""
    return str(block.index) if block.fqn else "outside"
