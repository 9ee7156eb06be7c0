"""The evaluator `needle`: how often a model answers a question whose answer is hidden in a long prompt.

Perplexity hardly sees retrieval: most tokens can be predicted from the few before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pydantic import Field, StrictInt, model_validator
from torch import Tensor

from compressx.api.evaluator import At, EvaluatedModel, EvaluatorSpec, Figures
from compressx.api.hooks import hookimpl
from compressx.api.selector import share_kept
from compressx.data.documents import texts
from compressx.data.windows import fingerprint
from compressx.models.access import Access
from compressx.models.generate import check_ids, check_room, greedy, readable
from compressx.prompts.needles import MEASURING, NeedlePrompt, needle_prompt
from compressx.prompts.selection import ReadySelector
from compressx.prompts.templates import text_ids
from compressx.recipe.sources import DatasetField
from compressx.recipe.validation import Strict, refuse_if

ANSWER_TOKENS = 16
"""Tokens of an answer, at most."""


class NeedleGrid(Strict):
    """Sentences hidden in other text, and whether a model answers a question about each."""

    dataset: DatasetField = Field(description="the other text", examples=["wikitext"])
    lengths: list[StrictInt] = Field([1024, 2048, 4096], min_length=1, description="tokens of a prompt")
    depths: StrictInt = Field(9, ge=1, description="positions of the sentence, evenly spaced from beginning to end")
    needles: StrictInt = Field(5, ge=1, le=5, description="different sentences at each length and depth")

    @model_validator(mode="after")
    def _different_lengths(self) -> NeedleGrid:
        wrong = len({*self.lengths}) < len(self.lengths) or min(self.lengths) < 64
        refuse_if(wrong, f"lengths are {self.lengths}; expected different ones, of 64 or more", "lengths")
        return self


def needle_figures(
    access: Access, tokenizer: Any, hay: Tensor, settings: NeedleGrid, selection: ReadySelector | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Ask a model in evaluation mode every question of the grid, in other text, int64 [tokens].

    Returns:
        `answered`, the share of right answers; with a selection also `answered, selected` and `kept, selected`, the
        mean share of the hidden sentence's tokens that it keeps; and `grid`, the same by `length` and `depth`.
    """
    asked = list(grid_prompts(tokenizer, hay, settings))
    places = [selection.positions(x.ids, x.protected) for x in asked] if selection else []
    reads = {"answered": [x.ids for x in asked]}
    if selection is not None:
        reads["answered, selected"] = [x.ids[kept] for x, kept in zip(asked, places, strict=True)]
    measured: dict[str, list[float]] = {}
    total = len(asked) * len(reads)
    with access.whole() as model:
        for name, prompts in reads.items():
            measured[name] = []
            for x, ids in zip(asked, prompts, strict=True):
                said = readable(tokenizer, greedy(model, tokenizer, ids[None], ANSWER_TOKENS)[0])
                measured[name].append(float(x.answer.lower() in said.lower()))
                if progress is not None:
                    progress(sum(map(len, measured.values())), total)
    if selection is not None:
        measured["kept, selected"] = [share_kept(x.places, kept) for x, kept in zip(asked, places, strict=True)]
    cells = dict.fromkeys((len(x.ids), x.depth) for x in asked)
    return {
        **{name: fmean(values) for name, values in measured.items()},
        "grid": [
            {"length": length, "depth": depth, **{
                name: fmean([v for x, v in zip(asked, values, strict=True) if (len(x.ids), x.depth) == (length, depth)])
                for name, values in measured.items()
            }}
            for length, depth in cells
        ],
    }  # fmt: skip


def grid_prompts(tokenizer: Any, hay: Tensor, settings: NeedleGrid) -> Iterator[NeedlePrompt]:
    """Yield every prompt of a grid; each begins elsewhere in the text if it can, and equally in every run."""
    depths = [i / (settings.depths - 1) for i in range(settings.depths)] if settings.depths > 1 else [0.5]
    for length in settings.lengths:
        for i, depth in enumerate(depths):
            for j, fact in enumerate(MEASURING[: settings.needles]):
                start = (i * settings.needles + j) * 1009
                yield needle_prompt(tokenizer, hay, fact, length, depth, start=start)


@dataclass(frozen=True)
class NeedleEvaluator:
    """Asks every question of the grid."""

    options: NeedleGrid

    def check(self, model: Any | None, tokenizer: Any | None, at: At) -> None:  # noqa: ARG002 - text is read later
        for i, length in enumerate(self.options.lengths if model is not None else ()):
            with at("lengths", i):
                check_room(model, length, ANSWER_TOKENS, "evaluate.needle")

    def read(self, model: Any, tokenizer: Any) -> Tensor:
        """Return the text in which sentences are hidden, int64 [tokens]."""
        hay = text_ids(tokenizer, "\n\n".join(texts(self.options.dataset, "evaluation")))
        for asked in grid_prompts(tokenizer, hay, self.options):
            check_ids(model, asked.ids, tokenizer, "needle: the prompt")
        return hay

    def fingerprint(self, text: Tensor) -> str:
        return fingerprint(text)

    def evaluate(self, model: EvaluatedModel) -> Figures:
        selection = None if model.selection is None else model.selection()
        return {"needle": needle_figures(
            model.access, model.tokenizer, model.text, self.options, selection, model.progress
        )}  # fmt: skip


@hookimpl
def compressx_evaluators() -> list[EvaluatorSpec]:
    """Offer the evaluator to recipes."""
    return [
        EvaluatorSpec(
            "needle",
            "sentences found in long prompts",
            NeedleGrid,
            NeedleEvaluator,
            prompts=True,
            figures=lambda _: ["needle"],
        )
    ]
