"""`report.html`: sections as one page that needs no network, for narrow and wide screens, light and dark."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from compressx.report.section import Column, Section, Table, Value
from compressx.runtime.files import os_errors_named

_COLOURS = {
    "#ffffff": "none", "#000000": "currentColor", "#dddddd": "var(--line)", "#0072b2": "var(--accent)",
    "#56b4e9": "var(--sky)",
}  # fmt: skip
"""What a drawing's ground, text, grid and darkest lines become, so that they follow the page."""

_WIDE = 500
"""Points of a drawing's width above which it gets the whole page, and is not made smaller than is legible."""

_LONG = 12
"""Rows and figures of a section for reference above which it is folded, unless its table is shaded."""
_MANY = 4
"""Columns of a table above which it needs the whole width."""


@dataclass(frozen=True)
class _TableCell:
    """A cell: its text, its class (`text`, or its column's look), and how much of it is shaded, in percent."""

    text: str
    kind: str
    share: float | None


@dataclass(frozen=True)
class _PageFigure:
    """A figure within the page: an SVG as markup, or a PNG as a data URI."""

    caption: str
    svg: Any = None
    data: str = ""

    @property
    def wide(self) -> bool:
        """Whether its text would be too small in half of a page, or on a phone."""
        width = re.search(r'width="([\d.]+)pt"', self.svg or "")
        return width is not None and float(width[1]) > _WIDE


@dataclass(frozen=True)
class _Shown:
    """A section as the page shows it."""

    section: Section
    header: list[_TableCell]
    rows: list[list[_TableCell]]
    figures: list[_PageFigure]

    @property
    def looks(self) -> str:
        """The looks of its columns."""
        return " ".join(dict.fromkeys(column.look for column in self.section.table.columns if column.look))

    @property
    def wide(self) -> bool:
        """Whether nothing stands beside it, which would leave half of the page empty."""
        return bool(self.figures or self.section.text) or len(self.rows) > _LONG or len(self.header) > _MANY

    @property
    def folded(self) -> bool:
        """Whether a reader has to open it."""
        return bool(self.section.brief) and not self.looks and len(self.rows) + len(self.figures) > _LONG


def page(sections: Sequence[Section], folder: Path) -> str:
    """Return the content of `report.html`.

    Args:
        sections: the first is the head, and its rows, `[name, value, note]`, are shown as cards.
        folder: the output folder, which holds the files that the sections' figures name.

    Raises:
        ArtifactError: a figure's file that cannot be read.
    """
    numbers = count()
    head, *others = (
        _Shown(
            section,
            [_TableCell(column.name, _kind(column), None) for column in section.table.columns],
            _cells(section.table),
            [_figure(next(numbers), figure, folder) for figure in section.figures],
        )
        for section in sections
    )
    return str(_template().render(head=head, others=others))


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader("compressx.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["plain"] = lambda text: text.replace("`", "")
    environment.filters["coded"] = lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped
    # Names that are too long go on below after one of these, and are not broken elsewhere.
    places = re.compile(r"(?<=\w)(?:[./](?=\w)|_(?=\w{5}))")
    environment.filters["breakable"] = lambda text: Markup(places.sub(r"\g<0><wbr>", str(escape(text))))  # noqa: S704 - escaped
    return environment.get_template("report.html.jinja")


def _cells(table: Table) -> list[list[_TableCell]]:
    shares = [_shares(column, [row[i] for row in table.rows]) for i, column in enumerate(table.columns)]
    return [
        [
            _TableCell(text, _kind(column), share[i])
            for text, column, share in zip(row, table.columns, shares, strict=True)
        ]
        for i, row in enumerate(table.texts)
    ]


def _kind(column: Column) -> str:
    return column.look or ("" if column.form else "text")


def _shares(column: Column, values: Sequence[Value]) -> list[float | None]:
    """Return how much of each cell is shaded, in percent; None where nothing is."""
    numbers = [x if column.look and isinstance(x, int | float) else None for x in values]
    whole = 1.0 if column.look == "heat" else max((x for x in numbers if x is not None), default=0.0) or 1.0
    return [None if x is None else 100 * x / whole for x in numbers]


def _figure(number: int, figure: Mapping[str, str], folder: Path) -> _PageFigure:
    path = folder / figure["file"]
    with os_errors_named("read", path):
        content = path.read_bytes()
    if path.suffix == ".svg":
        return _PageFigure(figure["caption"], svg=_inline(content.decode(), f"f{number}-"))
    return _PageFigure(figure["caption"], data="data:image/png;base64," + base64.b64encode(content).decode())


def _inline(svg: str, prefix: str) -> Any:
    """Make a drawing part of the page: its colours follow the page's, and its ids differ from other drawings'."""
    from markupsafe import Markup

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for drawn, followed in _COLOURS.items():
        svg = svg.replace(drawn, followed)
    return Markup(svg)  # noqa: S704 - drawn by matplotlib, which escapes its texts
