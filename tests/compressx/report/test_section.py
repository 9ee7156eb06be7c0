from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from tests.compressx.cli.commands import refused
from tests.compressx.report.reports import Page

from compressx.cli import terminal
from compressx.report.html import to_html
from compressx.report.markdown import to_markdown
from compressx.report.section import Column, Section, Table, table
from compressx.runtime.errors import ArtifactError
from compressx.stages.log import FORMAT


def test_columns_write_their_values_and_nothing_where_there_is_none() -> None:
    found = table(["name", Column("share", ".1%"), Column("shape", "s")], [("a", 0.25, "2 x 2"), ("b", None, None)])
    assert found.names == ["name", "share", "shape"]
    assert found.texts == [["a", "25.0%", "2 x 2"], ["b", "", ""]]


def test_a_column_that_is_empty_in_every_row_is_left_out_and_zero_is_not_empty() -> None:
    found = table(
        ["name", Column("none", ".1f"), "text", Column("zero", "d")], [("a", None, "", 0), ("b", None, "", 0)]
    )
    assert found.names == ["name", "zero"]
    assert table(["name"], []) == Table()


def test_html_folds_what_is_long_and_for_reference_unless_it_is_shaded(tmp_path) -> None:
    many = [(str(i), 0.5) for i in range(13)]
    plain, shaded = (table(["n", Column("x", ".1f", look)], many) for look in ("", "heat"))

    def folded(section: Section) -> bool:
        return "<details>" in to_html([Section("Head"), section], tmp_path)

    assert folded(Section("Long", table=plain, brief="13 rows"))
    assert not folded(Section("Long", table=plain))
    assert not folded(Section("Coloured", table=shaded, brief="13 rows"))
    assert not folded(Section("Short", table=table(["n"], [("1",)]), brief="1 row"))


HOSTILE = {
    "tag": "<img src=x onerror=alert(1)>",
    "bar": "a|b",
    "tag after code": "a `b`<img src=x>`c`",
    "tag in escaped code": "\\`<img src=x>`",
    "link": "[x](javascript:alert(1))",
    "link to another model": "[org/good](https://huggingface.co/org/evil)",
    "image": "![x](https://example.com/track.png)",
    "end of the text of an image": "x](https://example.com/track.png) ![y",
    "autolink": "<javascript:alert(1)>",
    "new row": "a | b |\n| c | d",
    "new block": "a\n\n<script>alert(1)</script>\n",
    "end of the fence": "a\n```\n<img src=x>\n",
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_names_are_no_markup_wherever_they_stand(name: str) -> None:
    shown = [
        Section(f"Pruned {name}", f"compressx, of {name}", table(["layer", "zeros"], [[name, "1"]])),
        Section("Figures", figures=({"caption": f"error of {name}", "file": "plots/a.svg"},)),
        Section("Recipe", text=f"model: {name}", language="yaml"),
        Section("Sample", table=table([Column("dense", look="prose")], [[name]])),
    ]
    page = Page(MarkdownIt("commonmark").enable("table").render(to_markdown(shown)))
    allowed = "h1 h2 p table thead tbody tr th td img pre code em strong" + (" br" if "\n" in name else "")
    assert {*page.elements} <= {*allowed.split()}
    assert page.links == ["plots/a.svg"]
    assert (page.elements.count("tr"), page.elements.count("td")) == (4, 3)
    assert page.elements.count("pre") == 1


def test_a_link_to_the_base_model_and_code_in_a_note_stay() -> None:
    note = "[org/a_model](https://huggingface.co/org/a_model) by `run`"
    page = Page(MarkdownIt("commonmark").render(to_markdown([Section("Model", note)])))
    assert page.links == ["https://huggingface.co/org/a_model"]
    assert "code" in page.elements


@pytest.mark.parametrize("name", ["`<b>`", "a'\"><script>x</script>"])
def test_names_are_no_markup_in_html(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<svg></svg>")
    figure = {"caption": name, "file": "a.svg"}
    made = [Section(name, name, table(["measure", "value", "note"], [[name, name, name]])),
            Section(name, name, table([name, "b"], [[name, "1"]]), (figure,), name)]  # fmt: skip
    page, plain = (Page(to_html(x, tmp_path)) for x in (made, [
        Section("a", "a", table(["measure", "value", "note"], [["a", "a", "a"]])),
        Section("a", "a", table(["a", "b"], [["a", "1"]]), ({**figure, "caption": "a"},), "a"),
    ]))  # fmt: skip
    assert [x for x in page.elements if x != "code"] == [x for x in plain.elements if x != "code"]
    assert ("code" in page.elements) == ("`" in name)


FORGED = "w\x1b[2K\x1b[1A\rerror: \x9b31m\u202e\u2028x\x00"


def test_control_characters_of_names_reach_neither_terminal_nor_pages(capsys: Any, tmp_path: Path) -> None:
    made = [Section(FORGED, FORGED, table(["measure", "value", "note"], [[FORGED, FORGED, "1"]])),
            Section(FORGED, FORGED, table(["a", "b"], [[FORGED, "1"]]), text=FORGED)]  # fmt: skip
    terminal.show(*made)
    for text in (capsys.readouterr().out, to_markdown(made[:1])):
        assert text.replace("\n", "").isprintable()
        assert r"w\x1b[2K" in text.replace(r"\\x1b\[", r"\x1b[")
    assert "\x1b" not in to_html(made[:1], tmp_path)


def test_an_error_does_not_move_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **_more: object) -> None:
        raise ArtifactError(f"{FORGED}\nanother line")

    monkeypatch.setattr("compressx.masks.inspect.inspect_model", fails)
    told = refused("inspect", "m")
    assert told.startswith(r"error: w\x1b[2K\x1b[1A\rerror: ")
    assert all(line.isprintable() for line in told.splitlines())
    assert told.count("\n") == 2, "lines that we write stay"


def test_the_log_has_no_control_characters() -> None:
    record = logging.makeLogRecord({"msg": "library: %s", "args": (FORGED,)})
    assert FORMAT.format(record).isprintable()
