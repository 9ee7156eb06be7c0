"""Which figures a run has, and what is kept for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compressx.api.record import BlockReport, LayerReport, RunReport
from compressx.report import figures, plots


def layer(name: str, info: Mapping[str, float] | None = None, history: Any = None, pruner: str = "mine") -> LayerReport:
    return LayerReport(name, pruner, "50% row", (4, 4), 0.5, 0.5, 1.0, info or {}, history or {})


def report(blocks: list[BlockReport]) -> RunReport:
    return RunReport("0", {}, 0.5, tuple(blocks), (), {}, {}, 0)


def pair(index: int, info: Mapping[str, float] | None = None, history: Any = None) -> BlockReport:
    """Make a block whose query and key share everything."""
    fqn = f"m.layers.{index}"
    group = f"{fqn}.attn.q_proj"
    layers = tuple(replace(layer(f"{fqn}.attn.{kind}_proj", info, history), group=group) for kind in "qk")
    return BlockReport(index, fqn, layers, 1.0)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the drawing functions were given, by file name; they write empty files."""
    given: dict[str, dict[str, Any]] = {}

    def record(path: Path, **arguments: Any) -> None:
        given[path.name] = arguments
        path.touch()

    for name in ("lines", "heat_maps"):
        monkeypatch.setattr(plots, name, record)
    return given


def test_a_family_has_a_line_for_each_member_and_counts_what_linears_share_once(tmp_path: Path, drawn: Any) -> None:
    blocks = [pair(i, {"error": 0.1 * i, "error.wanda": 0.2 * i, "damping": 0.01}) for i in (1, 2, 5)]
    written = figures.draw(report(blocks), [], tmp_path / "plots")
    [(file, given)] = drawn.items()
    assert file == "layers_error.svg"
    assert (given["up"], given["layout"]) == ("error", plots.BY_BLOCK)
    lines = given["panels"]["q_proj, k_proj"]
    assert lines == {"mine": ([1, 2, 5], [0.1, 0.2, 0.5]), "wanda": ([1, 2, 5], [0.2, 0.4, 1.0])}
    assert written == ({"file": "plots/layers_error.svg", "caption": "`error` by decoder block: mine, wanda."},)
    assert (tmp_path / written[0]["file"]).is_file()


def test_kinds_have_a_panel_each_and_experts_stand_side_by_side_in_files_of_any_name(
    tmp_path: Path, drawn: Any
) -> None:
    names = ["m.0.up_proj", *(f"m.0.experts.down_proj.{i}" for i in range(2))]
    families = {name: 1.0 for family in ("a/b", "a b", "a?b") for name in (family, f"{family}.x")}
    layers = tuple(layer(name, {"e": float(i), "e.b": 9.0, **families}) for i, name in enumerate(names))
    written = figures.draw(report([BlockReport(3, "m.0", layers, 1.0)]), [], tmp_path / "plots")
    panels = drawn["layers_e.svg"]["panels"]
    assert panels["up_proj"]["mine"] == ([3], [0.0])
    assert panels["down_proj"]["mine"] == ([3.0, 3.5], [1.0, 2.0])
    files = ["layers_e.svg", *(f"layers_a_b{end}.svg" for end in ("", "_2", "_3"))]
    assert [f["file"] for f in written] == [f"plots/{name}" for name in files]


def test_curves_have_a_panel_for_each_block_or_for_each_linear_of_a_kind(tmp_path: Path, drawn: Any) -> None:
    histories = [{"loss": (2.0, 1.0)}, {"loss": (4.0, 3.0)}]
    experts = tuple(layer(f"m.2.experts.up.{i}", history={"loss": (float(i),)}) for i in range(2))
    head = BlockReport(3, "", (layer("lm_head", history={"loss": (5.0,)}),), 1.0)
    blocks = [*(pair(i, history=h) for i, h in enumerate(histories)), BlockReport(2, "m.2", experts, 1.0), head]
    written = figures.draw(report(blocks), [], tmp_path / "plots")
    panels = {name: given["panels"] for name, given in drawn.items()}
    assert panels["steps_q_proj_k_proj.svg"] == {
        "m.layers.0": {"loss": (range(1, 3), (2.0, 1.0))}, "m.layers.1": {"loss": (range(1, 3), (4.0, 3.0))}
    }  # fmt: skip
    assert {given["up"] for given in drawn.values()} == {"loss"}, "a single curve names the axis"
    assert list(panels["steps_up.svg"]) == ["m.2\nexperts.up.0", "m.2\nexperts.up.1"]
    assert list(panels["steps_lm_head.svg"]) == ["lm_head"]
    assert "`loss` over the steps of the solver, q_proj, k_proj" in {f["caption"][:51] for f in written}


def test_matrices_that_linears_share_are_kept_once_with_their_difference_from_before_pooling() -> None:
    checks = (torch.arange(256)[:, None] + torch.arange(256)) % 2
    both = {"dense": checks.float(), "pruned": 1.0 - checks}
    layers = [replace(layer("m.q"), group="m.q"), replace(layer("m.k"), group="m.q"), layer("m.v")]
    [kept] = figures.matrices(layers, {"m.q": both, "m.k": both, "m.v": {}})
    assert kept.linears == ("m.q", "m.k")
    assert kept.difference is not None
    assert (kept.difference.values == 1).all()  # the pooled matrices are equal: 0.5 everywhere
    assert torch.equal(kept.images["dense"].values, kept.images["pruned"].values)
    for sizes in ([4], [4, 5], [4, 4, 4]):  # only two of one shape have a difference
        images = {str(i): torch.eye(size) for i, size in enumerate(sizes)}
        [kept] = figures.matrices([layer("m.q")], {"m.q": images})
        assert kept.difference is None
        assert list(kept.images) == list(images)


def test_matrices_are_drawn_for_each_object_and_the_caption_says_what_was_done(tmp_path: Path, drawn: Any) -> None:
    large, small = torch.rand(200, 200), torch.rand(4, 4)
    images = {"m.0.q": {"dense": small, "pruned": small}, "m.1.q": {"dense": large}}
    kept = figures.matrices(map(layer, images), images)
    written = figures.draw(report([]), kept, tmp_path / "plots")
    assert list(drawn) == ["matrices_m.0.q.png", "matrices_m.1.q.png"]
    assert [f["caption"] for f in written] == [
        "`m.0.q`: dense, pruned, and their absolute difference.",
        "`m.1.q`: dense. Average-pooled.",
    ]
    assert drawn["matrices_m.0.q.png"]["title"] == "m.0.q"
