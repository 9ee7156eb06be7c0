"""The figures of a run: which there are, from what its pruners returned, and their files and captions.

Three kinds: families of figures over the blocks (`error`, `error.wanda`), curves over steps, and matrices. Those of a
group of linears, such as query and key, are shown once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from compressx.api.names import in_short, kind_of
from compressx.api.record import BlockReport, FinetuneReport, LayerReport, RunReport, grouped
from compressx.report import plots
from compressx.report.plots import Thumbnail
from compressx.runtime.files import os_errors_named

_Value = TypeVar("_Value")


@dataclass(frozen=True, eq=False)
class Matrices:
    """What is kept, until the run ends, of the matrices that a pruner returned for some linears.

    Attributes:
        linears: names of the linears.
        images: by name.
        difference: of exactly two of one shape, absolute, taken before they are made small; else None.
    """

    linears: tuple[str, ...]
    images: Mapping[str, Thumbnail]
    difference: Thumbnail | None


def matrices(layers: Iterable[LayerReport], images: Mapping[str, Mapping[str, Tensor]]) -> tuple[Matrices, ...]:
    """Keep what will be drawn of one block's matrices [rows, columns], given by linear, then by name."""
    kept = []
    for some, named in grouped((layer, images[layer.name]) for layer in layers):
        first, *others = named.values()
        difference = None
        if len(others) == 1 and others[0].shape == first.shape:
            difference = plots.thumbnail((others[0].float() - first.float()).abs())
        images_of = {name: plots.thumbnail(image) for name, image in named.items()}
        kept.append(Matrices(tuple(layer.name for layer in some), images_of, difference))
    return tuple(kept)


def draw(report: RunReport, kept: Sequence[Matrices], folder: Path) -> tuple[Mapping[str, str], ...]:
    """Draw every figure that there is something for.

    Args:
        report: of the run.
        kept: what `matrices` returned for its blocks.
        folder: where the files go; made when there is a figure, else left alone, and then matplotlib is not imported.

    Returns:
        For each figure, in the order of the report, its `file` (relative to the folder's parent) and `caption`.
    """
    blocks = report.blocks
    figures = [
        *_losses(report.finetune), *_reconstructions(blocks), *_families(blocks), *_histories(blocks),
        *map(_heat_maps, kept),
    ]  # fmt: skip
    written: dict[str, Mapping[str, str]] = {}
    for figure in figures:
        with os_errors_named("make", folder):
            folder.mkdir(exist_ok=True)
        name = _free_name(figure, written)
        figure.draw(folder / name)
        written[name] = {"file": f"{folder.name}/{name}", "caption": figure.caption}
    return tuple(written.values())


@dataclass(frozen=True, eq=False)
class _Figure:
    stem: str
    suffix: str
    caption: str
    draw: Callable[[Path], None]


def _lines(
    stem: str, caption: str, panels: Mapping[str, Mapping[str, plots.Line]], layout: plots.PanelLayout, up: str
) -> _Figure:
    return _Figure(stem, ".svg", caption, partial(plots.lines, panels=panels, layout=layout, up=up))


def _losses(tuned: FinetuneReport | None) -> Iterator[_Figure]:
    if tuned is not None and tuned.losses:
        losses: dict[str, plots.Line] = {"of each step's batch": (range(1, tuned.steps + 1), tuned.losses)}
        if tuned.held_out:
            losses["held out"] = ([x.step for x in tuned.held_out], [x.loss for x in tuned.held_out])
        caption = f"Loss over the steps of fine-tuning, {' and '.join(losses)}."
        yield _lines("finetune", caption, {"": losses}, plots.LOSSES, "loss")


def _reconstructions(blocks: Sequence[BlockReport]) -> Iterator[_Figure]:
    """Yield the figure of what training each block's kept weights did, if it was asked for."""
    trained = [(block.index, block.reconstruction) for block in blocks if block.reconstruction is not None]
    if trained:
        x = [float(index) for index, _ in trained]
        lines = {"pruned": (x, [r.before for _, r in trained]), "reconstructed": (x, [r.after for _, r in trained])}
        caption = "Held-out error of each decoder block's output, pruned and then reconstructed."
        yield _lines("blocks_reconstruction", caption, {"": lines}, plots.BY_BLOCK, "block output error")


def _families(blocks: Sequence[BlockReport]) -> Iterator[_Figure]:
    """Yield a figure for each family of `info` with several members, a panel for each kind of linear."""
    members: dict[str, set[str]] = defaultdict(set)
    families: dict[str, dict[str, dict[str, tuple[list[float], list[float]]]]] = defaultdict(lambda: defaultdict(dict))
    for block in blocks:
        for kinds, groups in _by_kind((layer, layer.info) for layer in block.layers).items():
            for i, (layers, info) in enumerate(groups):
                for name, value in info.items():
                    family, _, variant = name.partition(".")
                    members[family].add(name)
                    x, y = families[family][kinds].setdefault(variant or layers[0].pruner, ([], []))
                    x.append(block.index + i / len(groups))  # experts stand side by side within their block
                    y.append(value)
    for family, panels in families.items():
        if len(members[family]) > 1:
            labels = dict.fromkeys(label for lines in panels.values() for label in lines)
            caption = f"`{family}` by decoder block: {', '.join(labels)}."
            yield _lines(f"layers_{family}", caption, panels, plots.BY_BLOCK, family.replace("_", " "))


def _histories(blocks: Sequence[BlockReport]) -> Iterator[_Figure]:
    """Yield a figure for each kind of linear that has curves, a panel for each object with curves."""
    figures: dict[str, dict[str, dict[str, plots.Line]]] = defaultdict(dict)
    for block in blocks:
        for kinds, groups in _by_kind((layer, layer.history) for layer in block.layers).items():
            for layers, history in groups:
                name = layers[0].name
                inside = f"{block.fqn}\n{name.removeprefix(f'{block.fqn}.')}" if len(groups) > 1 else block.fqn
                curves: dict[str, plots.Line] = {
                    curve: (range(1, len(values) + 1), values) for curve, values in history.items()
                }
                figures[kinds][inside if block.fqn else name] = curves
    for kinds, panels in figures.items():
        names = [*dict.fromkeys(name for curves in panels.values() for name in curves)]
        quoted = ", ".join(f"`{name}`" for name in names)
        caption = f"{quoted} over the steps of the solver, {kinds} of each decoder block."
        up = names[0] if len(names) == 1 else "value"
        yield _lines(f"steps_{kinds}", caption, panels, plots.BY_STEP, up)


def _heat_maps(kept: Matrices) -> _Figure:
    """Describe the figure of one object with matrices."""
    linears = in_short(kept.linears)
    what = ", ".join(kept.images) + ("" if kept.difference is None else ", and their absolute difference")
    pooled = " Average-pooled." if any(image.values.shape != image.shape for image in kept.images.values()) else ""
    drawn = partial(plots.heat_maps, title=linears, images=kept.images, difference=kept.difference)
    return _Figure(f"matrices_{kept.linears[0]}", ".png", f"`{linears}`: {what}.{pooled}", drawn)


def _by_kind(
    values: Iterable[tuple[LayerReport, Mapping[str, _Value]]],
) -> dict[str, list[tuple[list[LayerReport], Mapping[str, _Value]]]]:
    """Group one block's objects by the kinds of linear that share each, such as `q_proj, k_proj`."""
    groups: dict[str, list[tuple[list[LayerReport], Mapping[str, _Value]]]] = defaultdict(list)
    for layers, value in grouped(values):
        groups[", ".join(dict.fromkeys(kind_of(layer.name) for layer in layers))].append((layers, value))
    return groups


def _free_name(figure: _Figure, taken: Iterable[str]) -> str:
    """Name a figure's file with what every file system and link takes."""
    stem = re.sub(r"[^\w.-]+", "_", figure.stem, flags=re.ASCII)[:100]
    numbered = (f"{stem}{'' if i == 1 else f'_{i}'}{figure.suffix}" for i in count(1))
    return next(name for name in numbered if name not in taken)
