"""Needle in a haystack: how often a model answers a question whose answer is hidden in a long prompt.

Perplexity hardly sees retrieval: most tokens can be predicted from the few before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressx.api.selector import share_kept
from compressx.models.access import Access
from compressx.models.generate import check_room, greedy, readable
from compressx.prompts.needles import MEASURING, Hidden, hidden
from compressx.prompts.selection import Selection
from compressx.recipe.measuring import NeedleGrid


@dataclass(frozen=True, eq=False)
class Asked:
    """A prompt of the grid.

    Attributes:
        length: tokens of the prompt.
        depth: of the hidden sentence, from 0 to 1.
        prompt: the prompt.
    """

    length: int
    depth: float
    prompt: Hidden


def needle_figures(
    access: Access, tokenizer: Any, hay: Tensor, settings: NeedleGrid, selection: Selection | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Ask a model every question of the grid.

    Args:
        access: the model, in evaluation mode.
        tokenizer: its tokenizer.
        hay: token ids of other text, int64 [tokens].
        settings: the recipe's `evaluate.needle`.
        selection: also ask with the tokens that it selects of each prompt.
        progress: called with the number of answers and their total.

    Returns:
        `answered`, the share of right answers; with a selection also `answered, selected` and `kept, selected`, the
        mean share of the hidden sentence's tokens that it keeps; and `grid`, the same by `length` and `depth`.

    Raises:
        CalibrationError: too little text, or prompts longer than the model's positions.
    """
    asked = list(grid(tokenizer, hay, settings))
    check_room(access.model, max(settings.lengths), settings.tokens, "evaluate.needle")
    places = [selection.places(x.prompt.ids, x.prompt.protected) for x in asked] if selection else []
    reads = {"answered": [x.prompt.ids for x in asked]}
    if selection is not None:
        reads["answered, selected"] = [x.prompt.ids[kept] for x, kept in zip(asked, places, strict=True)]
    measured: dict[str, list[float]] = {}
    total = len(asked) * len(reads)
    with access.whole() as model:
        for name, prompts in reads.items():
            measured[name] = []
            for x, ids in zip(asked, prompts, strict=True):
                said = readable(tokenizer, greedy(model, tokenizer, ids[None], settings.tokens)[0])
                measured[name].append(float(x.prompt.answer.lower() in said.lower()))
                if progress is not None:
                    progress(sum(map(len, measured.values())), total)
    if selection is not None:
        measured["kept, selected"] = [share_kept(x.prompt.places, kept) for x, kept in zip(asked, places, strict=True)]
    cells = dict.fromkeys((x.length, x.depth) for x in asked)
    return {
        **{name: _mean(values) for name, values in measured.items()},
        "grid": [
            {"length": length, "depth": depth, **{
                name: _mean([v for x, v in zip(asked, values, strict=True) if (x.length, x.depth) == (length, depth)])
                for name, values in measured.items()
            }}
            for length, depth in cells
        ],
    }  # fmt: skip


def grid(tokenizer: Any, hay: Tensor, settings: NeedleGrid) -> Iterator[Asked]:
    """Yield every prompt of a grid; each begins elsewhere in the text if it can, and equally in every run."""
    depths = [i / (settings.depths - 1) for i in range(settings.depths)] if settings.depths > 1 else [0.5]
    for length in settings.lengths:
        for i, depth in enumerate(depths):
            for j, fact in enumerate(MEASURING[: settings.needles]):
                start = (i * settings.needles + j) * 1009
                yield Asked(length, depth, hidden(tokenizer, hay, fact, length, depth, start=start))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
