"""`report.md`: sections as a page for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from compressx.report.section import Best, Column, Section, Table, Value


def page(sections: Sequence[Section]) -> str:
    """Return the content of `report.md`; the first section's title is the page's."""
    return (
        "\n\n".join(part for i, section in enumerate(sections) for part in _parts(section, "##" if i else "#")) + "\n"
    )


def _parts(section: Section, level: str) -> Iterator[str]:
    if section.title:
        yield f"{level} {section.title}"
    if section.note:
        yield section.note
    if section.table.rows:
        yield "\n".join(_lines(section.table))
    for figure in section.figures:
        yield figure["caption"]
        yield f"![{figure['caption']}]({figure['file']})"
    if section.text:
        yield f"```{section.language}\n{section.text.rstrip()}\n```"


def _lines(table: Table) -> list[str]:
    rows = [[_cell(column, value) for column, value in zip(table.columns, row, strict=True)] for row in table.rows]
    return [f"| {' | '.join(row)} |" for row in (table.names, ["---"] * len(table.columns), *rows)]


def _cell(column: Column, value: Value) -> str:
    text = column.text(value)
    if column.look == "prose":  # a model's own words are no markup
        text = re.sub(r"([\\`*_{}\[\]<>#~$&])", r"\\\1", text).replace("\n", "<br>")
    text = text.replace("|", r"\|")
    return f"**{text}**" if isinstance(value, Best) else text
