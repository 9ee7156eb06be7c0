from __future__ import annotations

from compressx.api.names import in_short


def test_several_linears_are_named_in_short() -> None:
    assert in_short(["m.0.q_proj"]) == "m.0.q_proj"
    assert in_short(["m.0.q_proj", "m.0.k_proj", "m.0.up.3", "m.0.up.4"]) == "m.0.q_proj, k_proj, up"
