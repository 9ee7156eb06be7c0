from __future__ import annotations

import io

import pytest
from rich.console import Console

from compressx.cli import tables, terminal
from compressx.masks.inspect import Inspected, Inspection
from compressx.report.section import Best, Column, Section, table


def test_kinds_are_summed_up_and_many_patterns_are_counted():
    def one(block: int, kind: str, zeros: int) -> Inspected:
        return Inspected(f"model.layers.{block}.mlp.{kind}", (10, 10), zeros, f"{zeros}%")

    found = Inspection("here", (*(one(i, "up", 10 * i) for i in range(5)), one(0, "down", 50)), None)
    linears, sums, _ = tables.of_inspection(found)
    assert linears.table.names == ["linear", "pattern", "sparsity"]
    assert sums.table.texts == [["up", "0%, 10%, 3 others", "5", "20.00%"], ["down", "50%", "1", "50.00%"]]


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_no_number_is_cut_short_and_no_name_is_left_out_however_narrow_the_terminal_is(width):
    measures = [Column(f"token perplexity of the text {i}, pruned", ".4g") for i in range(3)]
    rows = [("one", "wanda", 0.5, 345.7, Best(297.3), 0.0123, 0.4), ("two", "attnprune", 0.4, 345.7, 304.5, 1e9, 2)]
    found = table(["run", "pruners", Column("sparsity", ".2%"), *measures, Column("GiB", ".1f")], rows)
    console = Console(width=width, file=io.StringIO(), highlight=False)
    terminal.show(Section(table=found), console=console)
    lines = console.file.getvalue().splitlines()
    words = {word for line in lines for word in line.split()}
    assert {"run", "pruners", "sparsity", "perplexity", "pruned", "GiB", "one", "two", "wanda"} <= words
    assert {"50.00%", "40.00%", "345.7", "297.3*", "304.5", "0.0123", "1e+09", "0.4", "2.0"} <= words
    assert width < 80 or max(map(len, lines)) <= width
