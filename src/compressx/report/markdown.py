"""`report.md`: sections as a page for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from compressx.report.section import Best, Column, Section, Table, Value


def to_markdown(sections: Sequence[Section]) -> str:
    """Return the content of `report.md`; the first section's title is the page's."""
    return (
        "\n\n".join(part for i, section in enumerate(sections) for part in _parts(section, "##" if i else "#")) + "\n"
    )


def _parts(section: Section, level: str) -> Iterator[str]:
    if section.title:
        yield f"{level} {_inline(section.title)}"
    if section.note:
        yield _inline(section.note)
    if section.table.rows:
        yield "\n".join(_lines(section.table))
    for figure in section.figures:
        yield (caption := _inline(figure["caption"]))
        yield f"![{caption}]({figure['file']})"
    if section.text:
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", section.text)), 0)  # longer than any in it
        yield f"{fence}{section.language}\n{section.text.rstrip()}\n{fence}"


def _lines(table: Table) -> list[str]:
    names = [_cell(Column(""), name) for name in table.names]
    rows = [[_cell(column, value) for column, value in zip(table.columns, row, strict=True)] for row in table.rows]
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(table.columns), *rows)]


def _cell(column: Column, value: Value) -> str:
    lines = column.text(value).split("\n")
    if column.look == "prose":  # a model's own words are no markup
        lines = [re.sub(r"([\\`*_{}\[\]<>#~$&])", r"\\\1", line) for line in lines]
    else:
        lines = [*map(_inline, lines)]
    text = "<br>".join(lines).replace("|", r"\|")
    return f"**{text}**" if isinstance(value, Best) else text


_OURS = r"(?<!`)`[^`\n]+`(?!`)|\[([\w./-]+)\]\(https://huggingface\.co/\2\)"
"""Markup that a text may have: code, and links to models by their ids."""


def _inline(text: str) -> str:
    """Escape what would be a tag or another link: names are a stranger's, and the hub shows a card as a page."""
    return re.sub(rf"({_OURS})|[\\`~<\[\]]", lambda found: found[1] or f"\\{found[0]}", text.replace("\n", " "))
