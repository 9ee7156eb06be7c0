"""Plots of a run: lines over blocks or steps as SVG, matrices as PNG.

The only module that imports matplotlib, and only to draw. It uses `Figure` without pyplot, and matplotlib's defaults
instead of the user's matplotlibrc, so the same values give the same bytes. The background is white in dark themes too.
Lines use the colour-blind safe palette of Okabe and Ito (Wong, Nature Methods 8:441, 2011). A figure that cannot be
written to its `path` raises `ArtifactError`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from compressx.runtime.files import os_errors_named
from compressx.runtime.quiet import quiet_libraries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LARGEST_SIDE = 128
"""Maximum rows and columns of a drawn matrix."""


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """A matrix made small for drawing.

    Attributes:
        values: float32 on the CPU, each side at most 128.
        shape: rows and columns before.
    """

    values: Tensor
    shape: tuple[int, int]


Line: TypeAlias = tuple[Sequence[float], Sequence[float]]  # x, y

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "text.parse_math": False,  # a `$` in a plugin's names is not a formula
    "svg.fonttype": "none",  # text stays text, for small files
    "svg.hashsalt": "compressx",
}


@dataclass(frozen=True)
class PanelLayout:
    """How panels of lines are arranged.

    Attributes:
        across: label of the horizontal axis.
        columns: panels in a row.
        size: of a panel, in inches.
        marked: whether points are marked.
        one_scale: whether all panels share both axes, or each has a vertical axis of its own.
    """

    across: str
    columns: int
    size: tuple[float, float]
    marked: bool = False
    one_scale: bool = True


BY_BLOCK = PanelLayout("decoder block", 3, (4.6, 3.2), marked=True)
BY_STEP = PanelLayout("step", 5, (2.6, 2.0))
LOSSES = PanelLayout("step", 1, (5.0, 2.6))
BY_SPARSITY = PanelLayout("sparsity, %", 2, (5.0, 3.6), marked=True, one_scale=False)


def lines(path: Path, panels: Mapping[str, Mapping[str, Line]], layout: PanelLayout, up: str = "") -> None:
    """Draw lines in panels, with one legend above; logarithmic where all values are positive.

    Lines are given by panel title and label; `up` is the label of the vertical axis.
    """
    columns = min(layout.columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    labels = list(dict.fromkeys(label for named in panels.values() for label in named))
    looks = dict(zip(labels, cycle(zip(_COLOURS, _MARKERS, strict=True)), strict=False))
    shown: dict[str, Any] = {}
    with _drawing(path, (max(layout.size[0] * columns, 5.0), layout.size[1] * rows + 0.5)) as figure:
        axes = figure.subplots(rows, columns, sharex=True, sharey=layout.one_scale, squeeze=False)
        for ax, (title, named) in zip(axes.flat, panels.items(), strict=False):
            ax.set_title(title)
            for label, (x, y) in named.items():
                colour, marker = looks[label]
                [shown[label]] = ax.plot(x, y, color=colour, marker=marker if layout.marked or len(x) == 1 else None)
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for ax in axes.flat[max(0, len(panels) - columns) : len(panels)]:
            ax.tick_params(labelbottom=True)  # the lowest panel of a column may not be in the last row
        each = [[v for _, y in named.values() for v in y] for named in panels.values()]
        for ax, values in zip(axes.flat, [list(chain(*each))] if layout.one_scale else each, strict=False):
            _set_scales(ax, values)
        figure.supxlabel(layout.across)
        figure.supylabel(up)
        if len(labels) > 1:
            _add_legend(figure, shown)


def heat_maps(path: Path, title: str, images: Mapping[str, Thumbnail], difference: Thumbnail | None) -> None:
    """Draw matrices side by side with a common colour scale, and their absolute difference with its own.

    Without negative entries colours follow the square root, so that an attention matrix shows more than its few large
    entries; otherwise they are linear, and white is zero.
    """
    every = torch.cat([image.values.flatten() for image in images.values()])
    panels = len(images) + (difference is not None)
    with _drawing(path, (3.3 * panels + 0.6, 3.3)) as figure:
        figure.suptitle(title)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        scale = _colours(every)
        for ax, (name, image) in zip(axes, images.items(), strict=False):
            drawn = _matrix(ax, name, image, scale)
        figure.colorbar(drawn, ax=list(axes[: len(images)]), label="value", shrink=0.8)
        if difference is not None:
            drawn = _matrix(axes[-1], "absolute difference", difference, _colours(difference.values))
            figure.colorbar(drawn, ax=axes[-1], label="absolute difference", shrink=0.8)


def thumbnail(matrix: Tensor) -> Thumbnail:
    """Average a matrix [rows, columns] of any dtype and device over tiles, so that it is small."""
    rows, columns = matrix.shape
    size = (min(rows, _LARGEST_SIDE), min(columns, _LARGEST_SIDE))
    values = torch.nn.functional.adaptive_avg_pool2d(matrix.detach().float()[None], size)[0]
    return Thumbnail(values.cpu(), (rows, columns))


@contextmanager
def _drawing(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure of a size in inches, and write it when the block ends."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with quiet_libraries(), mpl.rc_context():  # a font without a glyph of someone's path, or a size too small
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=size, layout="constrained", facecolor="white", dpi=110)
        yield figure
        with os_errors_named("write", path):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def _add_legend(figure: Figure, shown: Mapping[str, Any]) -> None:
    """Put a legend above, in as many columns as the figure is wide enough for; more rows make the figure higher."""
    labels = [fill(label, 60) for label in shown]
    columns = len(labels)
    while True:
        legend = figure.legend(shown.values(), labels, loc="outside upper center", ncols=columns)
        box = legend.get_window_extent()
        if columns == 1 or box.width <= 0.98 * figure.bbox.width:
            break
        legend.remove()
        columns -= 1
    figure.set_figheight(figure.get_figheight() + max(0.0, box.height / figure.dpi - 0.3))


def _set_scales(ax: Axes, values: Sequence[float]) -> None:
    """Use whole numbers on the horizontal axis, and a logarithmic vertical one if all values are positive."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _colours(values: Tensor) -> dict[str, Any]:
    """Choose the colour map and normalization for values."""
    from matplotlib.colors import Normalize, PowerNorm

    top = float(values.abs().max()) or 1.0
    if (values < 0).any():
        return {"cmap": "PuOr", "norm": Normalize(-top, top)}
    return {"cmap": "viridis", "norm": PowerNorm(0.5, 0.0, top)}


def _matrix(ax: Axes, title: str, image: Thumbnail, scale: Mapping[str, Any]) -> Any:
    """Draw one matrix, with the rows and columns before pooling on its axes."""
    ax.set_title(title)
    ax.set_xlabel("column")
    ax.set_ylabel("row")
    ax.grid(visible=False)
    ax.set_box_aspect(1)
    rows, columns = image.shape
    extent = (0, columns, rows, 0)
    return ax.imshow(image.values.numpy(), extent=extent, aspect="auto", interpolation="nearest", **scale)
