"""What a token selector promises, one function for each promise; each raises when the promise is broken.

A selector is asked for tokens by the host's own `Selection`, which refuses what breaks the contract.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from pydantic import BaseModel
from torch import Tensor

from compressx.api.selector import AttentionRows, ModelFacts, Needle, TokenSelector, TokenSelectorSpec
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.prompts.needles import model_facts
from compressx.prompts.scores import check_global, read_scores
from compressx.prompts.selection import Selection, checked_rows
from compressx.recipe.sections import Protect, SelectTokens
from compressx.runtime.errors import UnsupportedModelError, blamed_on
from compressx.testing.models import tiny_model, tiny_tokens
from compressx.testing.subject import NoSuchPromiseError, expect, refusals
from compressx.testing.untouched import expect_same_process, seeded

_LENGTH = 33
"""Tokens of a prompt where a check says nothing else."""

_NEEDLES, _TOKENS, _ASKED = 3, 64, 8
"""Synthetic prompts, their tokens, and those of the question behind them."""


class SelectorSubject:
    """A token selector on one architecture."""

    def __init__(self, spec: TokenSelectorSpec, options: BaseModel, architecture: str, device: str = "cpu") -> None:
        self.spec = spec
        self.options = options
        self.architecture = architecture
        self.access = InMemory(tiny_model(architecture).to(device))
        self.found = survey(self.access.model)

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

    def places(
        self, n: int, keep: int, selector: TokenSelector | None = None, *, wanted: AttentionRows | None = None,
        protected: Tensor | None = None, seed: int = 0,
    ) -> Tensor:  # fmt: skip
        """Have the host select `keep` of a prompt's `n` tokens, int64 [keep], with those `protected`, bool [n].

        The selector is a fresh one when absent; `wanted` is what it observed, when it was asked already.
        """
        selector = selector or self.selector()
        wanted = wanted or self.observed(selector)
        settings = SelectTokens(selector=self.spec.name, keep=keep, protect=Protect(first=0, last=0))
        selection = Selection(settings, self.access, self.found, selector, wanted)
        return selection.places(tiny_tokens(sequences=1, length=n, seed=seed)[0], protected)


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


class _Watched:
    """A selector that may be given other scores than the host's, and remembers whether it changed them."""

    def __init__(self, selector: TokenSelector, change: Callable[[Tensor], Tensor] = lambda scores: scores) -> None:
        self._selector = selector
        self._change = change
        self.changed = False

    def observe(self, facts: ModelFacts) -> AttentionRows:
        """Ask the selector."""
        return self._selector.observe(facts)

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Ask the selector."""
        given = self._change(scores)
        before = given.clone()
        with blamed_on(f"select failed on {given.shape[-1]} tokens, {keep} to keep"):
            answer = self._selector.select(given, keep)
        self.changed |= not torch.equal(given, before)
        return answer


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


def _asks_again(subject: SelectorSubject) -> None:
    selector = subject.selector()
    first = subject.observed(selector)
    for again in (selector, subject.selector()):
        with seeded(1):
            wanted = subject.observed(again)
        expect(wanted == first, f"observe asked for {first}, and for {wanted} when it was asked again")


def _counts(subject: SelectorSubject) -> None:
    for keep in (1, _LENGTH // 2, _LENGTH - 1):
        subject.places(_LENGTH, keep)


def _short(subject: SelectorSubject) -> None:
    for n in (2, 3, 8):
        for keep in sorted({1, n // 2, n - 1}):
            subject.places(n, keep)


def _protected(subject: SelectorSubject) -> None:
    """Leave places out at the beginning, at the end and between; the scores say nothing of those."""
    protected = torch.zeros(_LENGTH, dtype=torch.bool)
    protected[:4] = protected[12:14] = protected[-8:] = True
    for keep in (15, 20, _LENGTH - 1):
        subject.places(_LENGTH, keep, protected=protected)


def _blind(subject: SelectorSubject) -> None:
    """Let one token stand out: it is found as well when queries that see little or nothing are among the others."""
    wanted = subject.observed(subject.selector())
    if not wanted.blocks or wanted.queries < 2:
        raise NoSuchPromiseError("each of its queries sees every token")
    n, middle = 3 * _LENGTH, 3 * _LENGTH // 2  # longer than most neighbourhoods over which scores are pooled

    def standing_out(scores: Tensor) -> Tensor:
        return torch.zeros_like(scores).index_fill_(-1, torch.tensor([middle]), 20.0)

    def half_seen(scores: Tensor) -> Tensor:
        scores = standing_out(scores)
        scores[..., :-1, middle + 1 :] = -torch.inf
        return scores

    def not_seen(scores: Tensor) -> Tensor:
        scores = standing_out(scores)
        scores[..., 0, :] = -torch.inf
        return scores

    def found(change: Callable[[Tensor], Tensor]) -> bool:
        selector = _Watched(subject.selector(), change)
        return middle in subject.places(n, n // 4, selector, wanted=wanted).tolist()

    if not found(standing_out):
        raise NoSuchPromiseError("it does not select the token with the highest scores")
    for change, said in ((half_seen, "-inf behind it"), (not_seen, "-inf alone, of which softmax makes NaN")):
        expect(
            found(change),
            f"the token that all queries look at is selected, and not once the scores of some queries are {said}; "
            "leave such queries out, or use compressx.numerics.tokens.attention_mass",
        )


def _ties(subject: SelectorSubject) -> None:
    for keep in (1, _LENGTH // 2, _LENGTH - 1):
        subject.places(_LENGTH, keep, _Watched(subject.selector(), torch.zeros_like))


def _deterministic(subject: SelectorSubject) -> None:
    answers = []
    for seed in (0, 1):
        with seeded(seed):
            answers.append(subject.places(_LENGTH, _LENGTH // 2))
    expect(torch.equal(*answers), "two selectors with other global seeds selected other tokens of one prompt")


def _repeatable(subject: SelectorSubject) -> None:
    selector = subject.selector()
    wanted = subject.observed(selector)
    first = subject.places(_LENGTH, _LENGTH // 2, selector, wanted=wanted)
    subject.places(_LENGTH // 2, 3, selector, wanted=wanted, seed=1)
    again = subject.places(_LENGTH, _LENGTH // 2, selector, wanted=wanted)
    expect(torch.equal(first, again), "asked again after another prompt, it selected other tokens of the first one")


def _untouched(subject: SelectorSubject) -> None:
    """Compare the scores, the needles and the model's config before and after it reads them."""
    subject = SelectorSubject(subject.spec, subject.options, subject.architecture)  # with a config as it was
    facts, selector = subject.facts(), _Watched(subject.selector())
    given = [tensor for needle in facts.needles for tensor in (needle.scores, needle.places)]
    before, config = [tensor.clone() for tensor in given], copy.deepcopy(vars(facts.config))
    wanted = selector.observe(facts)
    copied = "compute on a copy: `x * 2`, not `x.mul_(2)`"
    expect(all(map(torch.equal, given, before)), f"observe changed needles, which it reads again; {copied}")
    subject.places(_LENGTH, _LENGTH // 2, selector, wanted=wanted)
    expect(not selector.changed, f"select changed the scores that it was given; {copied}")
    changed = [key for key, was in config.items() if getattr(facts.config, key) != was]
    expect(not changed, f"it changed config.{changed and changed[0]}, with which the model computes; {copied}")


def _process(subject: SelectorSubject) -> None:
    """Compare torch's settings and the random states before and after all that a selector is asked; look for prints."""

    def use() -> None:
        selector = subject.selector()
        wanted = subject.observed(selector)
        for keep in (1, _LENGTH // 2):
            subject.places(_LENGTH, keep, selector, wanted=wanted)

    expect_same_process(use)


SELECTOR_CHECKS: Mapping[str, Callable[[SelectorSubject], None]] = {
    "asks for the same again": _asks_again,
    "as many places as asked, in order": _counts,
    "short prompts": _short,
    "prompts with protected tokens": _protected,
    "queries that do not see every token": _blind,
    "equal scores": _ties,
    "deterministic": _deterministic,
    "the same when asked again": _repeatable,
    "leaves what it is given as it is": _untouched,
    "leaves the process as it is": _process,
}
