"""Token selectors for tests, and plugins that offer them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

import compressx
from compressx.api.selector import AttentionRows, ModelFacts, TokenSelectorSpec
from compressx.plugins.manager import Plugins, load_plugins
from compressx.testing import tiny_model, tiny_tokens

PROTECT = {"first": 2, "last": 4}
EARLY = {"selector": "gemfilter", "options": {"block": 1}, "protect": PROTECT}


_ONE_BLOCK = AttentionRows((1,))


class NoOptions(BaseModel):
    pass


@dataclass
class Chosen:
    """Asks for `rows`, and returns what `answer` makes of the scores and the number to keep."""

    rows: Any = _ONE_BLOCK
    answer: Callable[[Tensor, int], Any] = lambda scores, keep: torch.arange(keep)
    facts: ModelFacts | None = None
    scores: Tensor | None = None

    def observe(self, facts: ModelFacts) -> Any:
        self.facts = facts
        return self.rows

    def select(self, scores: Tensor, keep: int) -> Any:
        self.scores = scores
        return self.answer(scores, keep)


def plugins_with(selector: Any, *, needles: int = 0) -> Plugins:
    """Return plugins whose one token selector is `mine`."""
    spec = TokenSelectorSpec("mine", "a selector", NoOptions, lambda _: selector, lambda _: needles)
    loaded = load_plugins()
    return replace(loaded, offers={**loaded.offers, "token_selectors": {"mine": spec}})


def prompts(count: int = 1, length: int = 60) -> Tensor:
    return tiny_tokens(sequences=count, length=length)


def chosen(selector: Any, ids: Tensor | None = None, **more: Any) -> Any:
    """Let a selector choose 10 tokens of a prompt, of which 2 + 4 are protected."""
    given = {"keep": 10, "protect": PROTECT, **more}
    ids = prompts() if ids is None else ids
    return compressx.select_tokens(tiny_model("llama"), ids, selector="mine", plugins=plugins_with(selector), **given)
