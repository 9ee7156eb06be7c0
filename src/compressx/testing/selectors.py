"""What a token selector promises, one function for each promise; each raises when the promise is broken.

A selector is asked for tokens by the host's own `Selection`, which refuses what breaks the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from pydantic import BaseModel
from torch import Tensor

from compressx.api.selector import AttentionRows, ModelFacts, Needle, TokenSelector, TokenSelectorSpec
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.prompts.needles import model_facts
from compressx.prompts.scores import check_global, read_scores
from compressx.prompts.selection import ReadySelector, checked_rows
from compressx.recipe.sections import Protect, SelectTokens
from compressx.runtime.errors import UnsupportedModelError, blamed_on
from compressx.testing.models import tiny_model, tiny_tokens
from compressx.testing.subject import expect, refusals
from compressx.testing.untouched import seeded

_LENGTH = 33
"""Tokens of a prompt that is not a short one."""

_NEEDLES, _TOKENS, _ASKED = 3, 64, 8
"""Synthetic prompts, their tokens, and those of the question behind them."""


class SelectorSubject:
    """A token selector on one architecture."""

    def __init__(self, spec: TokenSelectorSpec, options: BaseModel, architecture: str, device: str = "cpu") -> None:
        self.spec = spec
        self.options = options
        self.architecture = architecture
        self.access = InMemory(tiny_model(architecture).to(device))
        self.found = architecture_of(self.access.model)

    def selector(self) -> TokenSelector:
        """Build the selector, as the host does for each model."""
        return self.spec.build(self.options)

    def facts(self) -> ModelFacts:
        """Return what the selector may know of the model; needles are drawn at random, the same ones each time.

        Raises:
            UnsupportedModelError: needles for a model without a block that sees the whole prompt.
        """
        queries = 0 if self.spec.needles is None else self.spec.needles(self.options)
        expect(type(queries) is int and queries >= 0, f"needles returned {queries!r:.40}, expected a number of queries")
        facts = model_facts(self.access, self.found, None, 0)
        if not queries:
            return facts
        check_global(self.access.model, self.found, facts.global_blocks or (0,))
        generator = torch.Generator().manual_seed(0)
        return replace(facts, needles=tuple(_needle(facts, queries, generator) for _ in range(_NEEDLES)))

    def observed(self, selector: TokenSelector) -> AttentionRows:
        """Ask a selector which scores it needs, and check the answer as the host does."""
        facts = self.facts()
        with blamed_on(f"observe failed on {self.architecture}"):
            asked = selector.observe(facts)
        return checked_rows(asked, facts, self.spec.name)

    def positions(self, n: int, keep: int, protected: Tensor | None = None) -> Tensor:
        """Have the host select `keep` of a prompt's `n` tokens, int64 [keep], with those `protected`, bool [n]."""
        selector = self.selector()
        settings = SelectTokens(selector=self.spec.name, keep=keep, protect=Protect(first=0, last=0))
        selection = ReadySelector(settings, self.access, self.found, selector, self.observed(selector))
        return selection.positions(tiny_tokens(sequences=1, length=n)[0], protected)


def _needle(facts: ModelFacts, queries: int, generator: torch.Generator) -> Needle:
    """Draw a synthetic prompt's scores; a query does not see the tokens after it."""
    count = min(queries, _TOKENS + _ASKED)
    scores = torch.randn(len(facts.global_blocks), facts.heads, count, _TOKENS, generator=generator)
    last = torch.arange(_TOKENS + _ASKED - count, _TOKENS + _ASKED)
    first = int(torch.randint(_TOKENS - 6, (), generator=generator))
    return Needle(
        scores.masked_fill(torch.arange(_TOKENS) > last[:, None], -torch.inf),
        facts.global_blocks,
        torch.arange(first, first + 6),
    )


def asks(subject: SelectorSubject) -> None:
    """Check which scores it asks for, and read them; a model with which it or the host can do nothing is refused."""
    with refusals(UnsupportedModelError):
        facts, wanted = subject.facts(), subject.observed(subject.selector())
        if wanted.blocks and not facts.global_blocks:
            check_global(subject.access.model, subject.found, wanted.blocks)
        expect(
            {*wanted.blocks} <= {*facts.global_blocks},
            f"observe asks for the blocks {wanted.blocks}; expected some of facts.global_blocks, {facts.global_blocks}",
        )
        read_scores(subject.access, subject.found, tiny_tokens(sequences=1)[0], wanted)


def _counts(subject: SelectorSubject) -> None:
    """Ask for few and many tokens of short and long prompts, and of one with positions that the scores leave out."""
    for n in (2, 3, 8, _LENGTH):
        for keep in sorted({1, n // 2, n - 1}):
            subject.positions(n, keep)
    protected = torch.zeros(_LENGTH, dtype=torch.bool)
    protected[:4] = protected[12:14] = protected[-8:] = True
    for keep in (15, 20, _LENGTH - 1):
        subject.positions(_LENGTH, keep, protected)


def _deterministic(subject: SelectorSubject) -> None:
    answers = []
    for seed in (0, 1):
        with seeded(seed):
            answers.append(subject.positions(_LENGTH, _LENGTH // 2))
    expect(torch.equal(*answers), "two selectors with other global seeds selected other tokens of one prompt")


SELECTOR_CHECKS: Mapping[str, Callable[[SelectorSubject], None]] = {
    "as many positions as asked, in order": _counts,
    "deterministic": _deterministic,
}
