from __future__ import annotations

from compressx.report import html, markdown
from compressx.report.section import Column, Section, Table, table


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


def test_a_bar_in_a_table_of_markdown_does_not_end_the_cell() -> None:
    head = Section("Head", table=table(["pattern"], [("a|b",)]))
    assert markdown.page([head]) == "# Head\n\n| pattern |\n| --- |\n| a\\|b |\n"


def test_html_folds_what_is_long_and_for_reference_unless_it_is_shaded(tmp_path) -> None:
    many = [(str(i), 0.5) for i in range(13)]
    plain, shaded = (table(["n", Column("x", ".1f", look)], many) for look in ("", "heat"))

    def folded(section: Section) -> bool:
        return "<details>" in html.page([Section("Head"), section], tmp_path)

    assert folded(Section("Long", table=plain, brief="13 rows"))
    assert not folded(Section("Long", table=plain))
    assert not folded(Section("Coloured", table=shaded, brief="13 rows"))
    assert not folded(Section("Short", table=table(["n"], [("1",)]), brief="1 row"))


def test_html_escapes_and_marks_code(tmp_path) -> None:
    page = html.page([Section("Head"), Section("A `b`", "c < `d`", text="<e>")], tmp_path)
    assert "<h2>A <code>b</code></h2>" in page
    assert "<p>c &lt; <code>d</code></p>" in page
    assert "<pre>&lt;e&gt;</pre>" in page
