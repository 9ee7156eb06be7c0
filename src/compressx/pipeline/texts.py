"""The text of a run: what can be checked of it before weights are loaded, and what the dense model writes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import conint, conlist
from torch import Tensor

from compressx.models.access import Access, config_fingerprint, weights_fingerprint
from compressx.models.architecture import text_config
from compressx.models.generate import first_token, generate
from compressx.pipeline.context import RunContext
from compressx.recipe.allocation import AttentionAware, DivergenceAllocation
from compressx.recipe.schema import LoadedRecipe
from compressx.recipe.sources import Generate
from compressx.runtime.cache import cached
from compressx.runtime.code import code_versions
from compressx.runtime.errors import RecipeError


def window_mistakes(loaded: LoadedRecipe) -> Iterator[RecipeError]:
    """Yield an error for each number of windows that cannot be drawn, or of which none is left to measure on.

    Yields:
        Errors with their place: a dataset without a window, fewer generated sequences than windows drawn from them, an
        allocation that measures divergences with one window.
    """
    for name, draw in loaded.recipe.draws().items():
        places = [place for place in loaded.recipe.datasets() if place[0] == name]
        for place, (source, weight), share in zip(places, draw.sources, draw.shares(), strict=True):
            if share == 0:
                yield RecipeError(
                    f"{loaded.where(*place)}: weight {weight:g} gives this dataset none of the {draw.samples} windows; "
                    f"raise its weight or {name}.samples, or remove it"
                )
            if source.generate is not None and source.generate.samples < share:
                yield RecipeError(
                    f"{loaded.where(*place, 'generate')}: {share} windows are drawn from {source.generate.samples} "
                    f"generated sequences; expected generate.samples of {share} or more"
                )
    calibration, allocation = loaded.recipe.calibration, loaded.recipe.allocation
    if isinstance(allocation, DivergenceAllocation | AttentionAware) and calibration and calibration.samples < 2:
        yield RecipeError(
            f"{loaded.where('calibration', 'samples')}: calibration.samples is {calibration.samples}, but "
            f"{allocation.method} at {loaded.where('allocation')} measures on windows that pruners do not see; "
            "expected at least 2"
        )


def blank(settings: Generate, length: int) -> Tensor:
    """Stand in for generated text where only its amount counts: int64 [samples, length], all 0."""
    return torch.zeros(settings.samples, length, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class OwnText:
    """The dense model's own text: written by the first process, cached on disk, and sent to the others.

    Attributes:
        context: device, processes and progress of the run.
        tokenizer: the model's.
        opened: returns the model; called when text is asked for, since all other text is read without it.
    """

    context: RunContext
    tokenizer: Any
    opened: Callable[[], Access]

    def __call__(self, settings: Generate, length: int) -> Tensor:
        """Return int64 [samples, length]."""
        access, ranks = self.opened(), self.context.ranks
        return torch.tensor(ranks.broadcast(self._sequences(access, settings, length) if ranks.first else []))

    def _sequences(self, access: Access, settings: Generate, length: int) -> list[list[int]]:
        first = first_token(self.tokenizer, access.model)
        key = {
            "settings": settings.model_dump(mode="json"),
            "length": length,
            "first": first,
            "model": weights_fingerprint(access),
            "config": config_fingerprint(access.model),
            "device": access.device.type,
            "versions": code_versions(),
        }

        def compute() -> list[list[int]]:
            ids = generate(
                access.model, first, settings, length,
                lambda i, n: self.context.report_progress("calibrate", i, n, "sequences generated"),
            )  # fmt: skip
            written: list[list[int]] = ids.tolist()
            return written

        token = conint(ge=0, lt=text_config(access.model).vocab_size)
        sequences = conlist(conlist(token, min_length=length, max_length=length), min_length=settings.samples)
        return cached(key, compute, "generated", sequences)
