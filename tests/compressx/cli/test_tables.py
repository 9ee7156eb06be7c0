from __future__ import annotations

from compressx.cli import tables
from compressx.masks.inspect import Inspected, Inspection


def test_kinds_are_summed_up_and_many_patterns_are_counted():
    def one(block: int, kind: str, zeros: int) -> Inspected:
        return Inspected(f"model.layers.{block}.mlp.{kind}", (10, 10), zeros, f"{zeros}%", two_four=False)

    found = Inspection("here", (*(one(i, "up", 10 * i) for i in range(5)), one(0, "down", 50)), None)
    linears, sums, _ = tables.of_inspection(found)
    assert linears.table.names == ["linear", "pattern", "2:4", "sparsity"]
    assert sums.table.texts == [["up", "0%, 10%, 3 others", "5", "20.00%"], ["down", "50%", "1", "50.00%"]]
