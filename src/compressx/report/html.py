"""`report.html`: sections as one page that needs no network, for narrow and wide screens, light and dark."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
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


def to_html(sections: Sequence[Section], folder: Path) -> str:
    """Return the content of `report.html`.

    Args:
        sections: the first is the head, and its rows, `[name, value, note]`, are shown as cards.
        folder: the output folder, which holds the files that the sections' figures name.
    """
    numbers = count()
    head, *others = sections
    drawn = [[_figure(next(numbers), figure, folder) for figure in section.figures] for section in others]
    return str(_template().render(head=head, others=zip(others, drawn, strict=True)))


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader("compressx.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["cells"] = _cells
    environment.filters["plain"] = lambda text: text.replace("`", "")
    environment.filters["coded"] = lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped
    # Names that are too long go on below after one of these, and are not broken elsewhere.
    places = re.compile(r"(?<=\w)(?:[./](?=\w)|_(?=\w{5}))")
    environment.filters["breakable"] = lambda text: Markup(places.sub(r"\g<0><wbr>", str(escape(text))))  # noqa: S704 - escaped
    return environment.get_template("report.html.jinja")


def _cells(table: Table) -> list[list[tuple[str, str, Any]]]:
    """Return the heading and the rows: of each cell its text, its class, and how much of it is shaded, in percent."""
    kinds: list[str] = [column.look or ("" if column.form else "text") for column in table.columns]
    columns = zip(table.columns, zip(*table.rows, strict=True), strict=False)  # nothing of a table without rows
    shades = zip(*(_shares(column, values) for column, values in columns), strict=True)
    rows = [[*zip(texts, kinds, shares, strict=True)] for texts, shares in zip(table.texts, shades, strict=True)]
    return [[(name, kind, None) for name, kind in zip(table.names, kinds, strict=True)], *rows]


def _shares(column: Column, values: Sequence[Value]) -> list[float | None]:
    """Return how much of each cell is shaded, in percent; None where nothing is."""
    numbers = [x if column.look and isinstance(x, int | float) else None for x in values]
    whole = 1.0 if column.look == "heat" else max((x for x in numbers if x is not None), default=0.0) or 1.0
    return [None if x is None else 100 * x / whole for x in numbers]


def _figure(number: int, figure: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return a figure within the page: its caption, and an SVG as markup or a PNG as a data URI."""
    path = folder / figure["file"]
    with os_errors_named("read", path):
        content = path.read_bytes()
    if path.suffix != ".svg":
        data = "data:image/png;base64," + base64.b64encode(content).decode()
        return {"caption": figure["caption"], "svg": "", "data": data, "wide": False}
    svg = _inline(content.decode(), f"f{number}-")
    # In half of a page, or on a phone, the text of a wide drawing would be too small.
    width = re.search(r'width="([\d.]+)pt"', svg)
    return {"caption": figure["caption"], "svg": svg, "wide": width is not None and float(width[1]) > _WIDE}


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
