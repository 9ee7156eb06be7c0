from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from tests.compressx.built_in import SELECTORS

from compressx import AttentionRows, TokenSelectorSpec, UnsupportedModelError
from compressx.numerics.tokens import attention_mass, highest
from compressx.testing import check_plugin, conformance


@pytest.mark.slow
@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_that_is_shipped_keeps_its_promises(name: str) -> None:
    check_plugin(SELECTORS[name])


def test_so_do_several_heads_with_more_queries_than_a_prompt_has_tokens() -> None:
    several = spec(observing(lambda rows, _: replace(rows, heads=(0, 1, 2))))
    check_plugin(several, options={"queries": 100}, architectures=["llama"])


class Options(BaseModel):
    queries: int = 4


class Base:
    """The attention of the last tokens, as an author would write it; each test breaks one thing."""

    def __init__(self, options: Options) -> None:
        self.queries = options.queries

    def observe(self, facts):
        return AttentionRows(facts.global_blocks[-1:] or (0,), queries=self.queries)

    def mass(self, scores):
        return attention_mass(scores[0])

    def select(self, scores, keep):
        return highest(self.mass(scores), keep)


def spec(build: Any = Base, *, options: type[BaseModel] = Options, **fields: Any) -> TokenSelectorSpec:
    return TokenSelectorSpec("mine", "for a test", options, build, **fields)


def test_a_selector_that_keeps_every_promise_passes_every_check() -> None:
    outcomes = list(conformance(spec(), architectures=["llama", "gemma3"]))
    assert {o.status for o in outcomes} == {"passed"}
    assert len({o.check for o in outcomes}) >= 4


def observing(change: Callable[[AttentionRows, Any], Any]) -> type[Base]:
    class Observing(Base):
        def observe(self, facts):
            return change(super().observe(facts), facts)

    return Observing


def answering(change: Callable[[torch.Tensor, torch.Tensor, int], Any]) -> type[Base]:
    class Answering(Base):
        def select(self, scores, keep):
            return change(super().select(scores, keep), scores, keep)

    return Answering


def at_random(generator: torch.Generator | None) -> Callable[..., torch.Tensor]:
    return lambda _, scores, keep: torch.randperm(scores.shape[-1], generator=generator)[:keep].sort().values


def causal_alone(answer, scores, keep):
    if scores[0, 0, 0, -1] != -torch.inf:
        raise ValueError("the first query sees the last token")
    return answer


ASKS, COUNTS = "asks for scores that are there", "as many positions as asked, in order"


@pytest.mark.parametrize(
    ("broken", "check", "says"),
    [
        (spec(observing(lambda rows, _: rows.blocks)), ASKS, "must return AttentionRows of ascending blocks"),
        (spec(observing(lambda *_: 1 / 0)), ASKS, "failed on LlamaForCausalLM: ZeroDivisionError: division by zero"),
        (spec(needles=lambda _: "16"), ASKS, "must return a number of queries, 0 or more; got '16'"),
        (spec(answering(lambda _, scores, keep: highest(scores[0, 0, -1], keep + 1))), COUNTS, "got torch.int64 [2]"),
        (spec(answering(lambda answer, *_: answer + 1)), COUNTS, "different positions from 0 to"),
        (spec(answering(causal_alone)), COUNTS, "the first query sees the last token"),
        (spec(answering(at_random(None))), "deterministic", "other global seeds selected other tokens"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_each_broken_promise_is_found_by_the_check_of_its_name(broken, check, says) -> None:
    found = (o for o in conformance(broken, architectures=["llama"]) if (o.check, o.status) == (check, "failed"))
    assert says in next(found).detail


def refuses(rows, facts):
    raise UnsupportedModelError("only for butterflies")


@pytest.mark.parametrize(
    ("broken", "architecture", "says"),
    [
        (spec(), "mistral", "no block does; use a selector that reads no attention"),
        (spec(observing(lambda rows, _: replace(rows, blocks=(3,)))), "llama", "has no block 3; expected 0 to 2"),
        (spec(observing(lambda rows, _: replace(rows, blocks=(0,)))), "gemma3", "does not see the whole prompt"),
        (spec(), "bloom", "does not go through transformers' AttentionInterface"),
        (spec(observing(refuses)), "llama", "only for butterflies"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused_and_one_has_to_be_accepted(broken, architecture, says) -> None:
    options, refused, none = conformance(broken, architectures=[architecture])
    assert [options.status, refused.status, none.status] == ["passed", "refused", "failed"]
    assert says in refused.detail
    assert none.detail == f"every one of {architecture} was refused"


def test_a_selector_that_reads_no_attention_is_accepted_by_every_model() -> None:
    check_plugin(SELECTORS["recent"], architectures=["mistral", "bloom"])
