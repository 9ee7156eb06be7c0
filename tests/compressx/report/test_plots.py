"""Drawings: what stands in the files, and what must not change them."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

from compressx.report import plots
from compressx.runtime.errors import ArtifactError

BLOCKS, STEPS = range(4), range(1, 4)
PANELS = {"q_proj, k_proj": {"attnprune": (BLOCKS, [0.01, 0.02, 0.04, 0.2]), "wanda": (BLOCKS, [0.1, 0.2, 0.4, 0.9])}}


def texts(path: Path) -> list[str]:
    """Return what can be read in an SVG."""
    tree = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 - our own file
    return [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text") if element.text]


def curve_heights(path: Path) -> list[list[float]]:
    """Return the vertical positions of every line of more than two points in an SVG, from the top."""
    tree = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 - our own file
    found = []
    for element in tree.iter("{http://www.w3.org/2000/svg}path"):
        words = element.get("d", "").split()
        if words.count("L") >= 2 and "z" not in words and "C" not in words:
            found.append([float(words[i + 2]) for i, word in enumerate(words) if word in "ML"])
    return found


def test_axes_panels_and_lines_are_named_and_names_are_no_formulas(tmp_path: Path) -> None:
    panels = {"$$": {"$a_1$": (BLOCKS, [1] * 4), "b": (BLOCKS, [2] * 4)}}
    plots.lines(tmp_path / "a.svg", panels, plots.BY_BLOCK, "$\\frac$")
    assert {"$\\frac$", "decoder block", "$$", "$a_1$", "b"} <= set(texts(tmp_path / "a.svg"))
    panels = {f"block {i}": {"loss": (STEPS, [3.0, 2.0, 1.0]), "other": (STEPS, [1.0, 2.0, 3.0])} for i in range(7)}
    plots.lines(tmp_path / "b.svg", panels, plots.BY_STEP, "value")
    assert {"step", "value", "loss", "other", *panels} <= set(texts(tmp_path / "b.svg"))
    assert len(curve_heights(tmp_path / "b.svg")) == 14 + 2, "those of the panels and the legend's"


def test_positive_values_are_logarithmic_and_others_are_not_and_one_that_is_not_finite_leaves_a_gap(
    tmp_path: Path,
) -> None:
    ratios = [1.0, 10.0, 100.0]
    plots.lines(tmp_path / "log.svg", {"": {"a": (range(3), ratios)}}, plots.BY_BLOCK)
    plots.lines(tmp_path / "linear.svg", {"": {"a": (range(3), [-1.0, *ratios[1:]])}}, plots.BY_BLOCK)
    [log], [linear] = curve_heights(tmp_path / "log.svg"), curve_heights(tmp_path / "linear.svg")
    assert log[0] - log[1] == pytest.approx(log[1] - log[2], rel=1e-3)  # a decade each
    assert (linear[1] - linear[2]) / (linear[0] - linear[1]) == pytest.approx(90 / 11, rel=1e-3)
    assert {"1", "10", "100"} <= set(texts(tmp_path / "log.svg"))
    values = [1.0, math.nan, math.inf, 2.0, 4.0]
    plots.lines(tmp_path / "gap.svg", {"": {"a": (range(5), values)}}, plots.BY_BLOCK)
    assert {"1", "2"} <= set(texts(tmp_path / "gap.svg"))
    assert sum(map(len, curve_heights(tmp_path / "gap.svg"))) < 5
    plots.lines(tmp_path / "short.svg", {"": {"loss": (STEPS, [0.0312, 0.0320, 0.0381])}}, plots.BY_STEP)
    found = texts(tmp_path / "short.svg")
    assert "loss" not in found, "a single curve needs no legend"
    assert len([t for t in found if t.startswith("0.03")]) >= 2, "a logarithmic axis of a short range has its numbers"


@pytest.mark.slow
def test_the_same_values_give_the_same_bytes_whatever_a_user_set_in_matplotlib(tmp_path: Path) -> None:
    import matplotlib as mpl

    def drawn(name: str) -> list[bytes]:
        plots.lines(tmp_path / f"{name}.svg", PANELS, plots.BY_BLOCK, "e")
        plots.heat_maps(tmp_path / f"{name}.png", "layer", {"dense": plots.thumbnail(torch.eye(8))}, None)
        return [(tmp_path / f"{name}{suffix}").read_bytes() for suffix in (".svg", ".png")]

    first = drawn("first")
    with mpl.rc_context({"font.size": 30.0, "axes.facecolor": "black", "savefig.transparent": True}):
        assert drawn("second") == first
        assert mpl.rcParams["font.size"] == 30.0


def pixels(path: Path) -> torch.Tensor:
    """Read a PNG as bytes [rows, columns, 3]."""
    from matplotlib.image import imread

    return torch.from_numpy(imread(path)[..., :3] * 255).round().to(torch.uint8)


@pytest.mark.slow
def test_heat_maps_share_one_scale_and_the_ground_is_white(tmp_path: Path) -> None:
    images = {"low": plots.thumbnail(torch.full((8, 8), 0.25)), "high": plots.thumbnail(torch.full((8, 8), 1.0))}
    plots.heat_maps(tmp_path / "a.png", "layer", images, None)
    drawn = pixels(tmp_path / "a.png")
    assert drawn[0, 0].tolist() == drawn[-1, -1].tolist() == [255, 255, 255]
    colours, counts = drawn.flatten(0, 1).unique(dim=0, return_counts=True)
    large = {tuple(c) for c in colours[counts > 0.08 * counts.sum()].tolist()} - {(255, 255, 255)}
    from matplotlib import colormaps

    viridis = colormaps["viridis"]
    assert large == {tuple(int(255 * v) for v in viridis(x)[:3]) for x in (0.5, 1.0)}  # sqrt(0.25) and sqrt(1)


def test_a_small_matrix_is_kept_and_a_large_one_averaged() -> None:
    small = torch.rand(128, 3, dtype=torch.float64)
    assert torch.equal(plots.thumbnail(small).values, small.float())
    large = torch.rand(256, 384)
    small = plots.thumbnail(large)
    assert small.shape == (256, 384)
    torch.testing.assert_close(small.values, large.view(128, 2, 128, 3).mean(dim=(1, 3)))
    mask = plots.thumbnail(torch.ones(200, 7, dtype=torch.bool))
    assert (mask.values.shape, mask.values.dtype) == ((128, 7), torch.float32)
    assert (mask.values == 1).all()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot write .*missing/a\.svg"):
        plots.lines(tmp_path / "missing/a.svg", {"": {"loss": ([1], [1.0])}}, plots.BY_STEP)
