"""What a token selector promises, one function for each promise; each raises when the promise is broken.

The host itself builds the selector, asks it for scores and for tokens, and refuses what breaks the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import pluggy
import torch
from pydantic import BaseModel
from torch import Tensor

from compressx.api.selector import TokenSelectorSpec
from compressx.models.access import InMemory
from compressx.plugins.kinds import TOKEN_SELECTOR
from compressx.plugins.manager import Plugins
from compressx.prompts.scores import read_scores
from compressx.prompts.selection import ReadySelector, SelectorSettings
from compressx.recipe.sections import Protect, SelectTokens
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing.models import tiny_model, tiny_tokenizer, tiny_tokens
from compressx.testing.subject import expect, refusals
from compressx.testing.untouched import seeded

_LENGTH = 33
"""Tokens of a prompt that is not a short one."""


class SelectorSubject:
    """A token selector on one architecture."""

    def __init__(self, spec: TokenSelectorSpec, options: BaseModel, architecture: str, device: str = "cpu") -> None:
        given = options.model_dump(mode="json", by_alias=True)
        settings = SelectTokens(selector=spec.name, keep=1, options=given, protect=Protect(first=0, last=0))
        plugins = Plugins(pluggy.PluginManager("compressx"), (), {TOKEN_SELECTOR.key: {spec.name: spec}})
        self._settings = SelectorSettings(settings, plugins)
        self._access = InMemory(tiny_model(architecture).to(device))

    def ready(self) -> ReadySelector:
        """Build the selector, and ask it once which scores it needs."""
        return self._settings.prepare(self._access, tiny_tokenizer())

    @cached_property
    def first(self) -> ReadySelector:
        """The selector as most checks use it: synthetic prompts take a second."""
        return self.ready()


def _positions(ready: ReadySelector, n: int, keep: int, protected: Tensor | None = None) -> Tensor:
    """Have the host select `keep` of a prompt's `n` tokens, int64 [keep], with those `protected`, bool [n]."""
    settings = ready.settings.model_copy(update={"keep": keep})
    return replace(ready, settings=settings).positions(tiny_tokens(sequences=1, length=n)[0], protected)


def _asks(subject: SelectorSubject) -> None:
    """Ask for scores and read them; a model with which the selector or the host can do nothing is refused."""
    with refusals(UnsupportedModelError):
        ready = subject.first
        read_scores(ready.access, ready.found, tiny_tokens(sequences=1)[0], ready.rows)


def _counts(subject: SelectorSubject) -> None:
    """Ask for few and many tokens of short and long prompts, and of one with positions that the scores leave out."""
    ready = subject.first
    for n in (2, 3, 8, _LENGTH):
        for keep in sorted({1, n // 2, n - 1}):
            _positions(ready, n, keep)
    protected = torch.zeros(_LENGTH, dtype=torch.bool)
    protected[:4] = protected[12:14] = protected[-8:] = True
    for keep in (15, 20, _LENGTH - 1):
        _positions(ready, _LENGTH, keep, protected)


def _deterministic(subject: SelectorSubject) -> None:
    with seeded(0):
        one = _positions(subject.first, _LENGTH, _LENGTH // 2)
    with seeded(1):
        other = _positions(subject.ready(), _LENGTH, _LENGTH // 2)
    expect(torch.equal(one, other), "two selectors with other global seeds selected other tokens of one prompt")


SELECTOR_CHECKS: Mapping[str, Callable[[SelectorSubject], None]] = {
    "asks for scores that are there": _asks,
    "as many positions as asked, in order": _counts,
    "deterministic": _deterministic,
}
