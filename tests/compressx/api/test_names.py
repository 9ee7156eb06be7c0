from __future__ import annotations

from compressx.api.names import folded, in_short


def test_several_linears_are_named_in_short() -> None:
    assert in_short(["m.0.q_proj"]) == "m.0.q_proj"
    assert in_short(["m.0.q_proj", "m.0.k_proj", "m.0.up.3", "m.0.up.4"]) == "m.0.q_proj, k_proj, up"


def test_rows_that_differ_only_in_numbers_of_layers_and_experts_are_folded() -> None:
    rows = [(f"m.{i}.up", "2:4") for i in range(12)] + [("head", "50%")]
    rows += [(f"m.{i}.experts.up.{j}", "dense" if (i, j) == (1, 0) else "2:4") for i in range(3) for j in range(2)]
    rows += [("m.13.up", "2:4"), ("m.15.up", "2:4")]
    assert folded(rows) == [
        ("m.0-11,13,15.up", 14, ("2:4",)),
        ("head", 1, ("50%",)),
        ("m.0,2.experts.up.0-1", 4, ("2:4",)),
        ("m.1.experts.up.0", 1, ("dense",)),
        ("m.1.experts.up.1", 1, ("2:4",)),
    ]
    assert folded([]) == []
