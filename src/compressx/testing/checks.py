"""The checks by name, one function for each promise of a pruner; each raises when the promise is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from pydantic import BaseModel

from compressx.api.patterns import Asked
from compressx.api.pruner import Statistic
from compressx.recipe.validation import validate_options
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing import agreement, answers, depth, untouched
from compressx.testing.subject import NoSuchPromiseError, Subject, Whole, expect


def validated_options(spec: Any, given: Mapping[str, Any]) -> BaseModel:
    """Validate options as a recipe's are."""
    model: type[BaseModel] = spec.options
    return validate_options(model, given, lambda *loc: ".".join(["options", *map(str, loc)]))


def options_round_trip(spec: Any, given: Mapping[str, Any]) -> None:
    """Check that options, written as JSON, are read back as they were."""
    options = validated_options(spec, given)
    again = validated_options(spec, options.model_dump(mode="json", by_alias=True))
    expect(again == options, f"options read back from JSON differ: {again!r}, expected {options!r}")


def plans(subject: Subject) -> None:
    """Check that a recipe can be planned: `check` and `observe` on a model without weights."""
    if not subject.claimed:
        subject.rule.build_depth()
        return
    scene = subject.scene(weights=False)
    pruner, _ = subject.rule.build()
    for name in subject.names:
        with torch.device("meta"):  # as the planner calls it
            statistic, again = pruner.observe(scene.block, name), pruner.observe(scene.block, name)
        expect(
            statistic is None or isinstance(statistic, Statistic),
            f"observe({name!r}) must return a Statistic or None, got {type(statistic).__name__}",
        )
        expect(
            statistic is None or statistic is not again, f"observe({name!r}) must return a fresh statistic each time"
        )


def _refusals(subject: Subject) -> None:
    if subject.spec.check is None:
        raise NoSuchPromiseError("it refuses nothing")
    block = subject.scene(weights=False).block
    asked: list[tuple[str, Mapping[str, Asked]]] = []
    for claim in subject.claimed:
        if not isinstance(claim, Whole):
            asked += [(f"{name}, {claim}", {name: claim}) for name in block.linears]
        elif subject.why_not(block, claim) is not None:
            with suppress(UnsupportedModelError):  # what the host refuses no pruner is asked
                asked.append((str(claim), subject.asked(block, claim)))
    for what, patterns in asked:
        said = subject.refusal(block, patterns)
        named = said is None or any(known in said for known in (block.fqn, *block.linears))
        expect(named, f"refusing {what}, it names no layer: {said}")


CHECKS: Mapping[str, Callable[[Subject], None]] = {
    "refusals name the layer": _refusals,
    "exact sparsity for every pattern": answers.exact,
    "sparsity zero changes nothing": answers.dense,
    "bfloat16 and float16": answers.dtypes,
    "products narrower than the weights": answers.narrow_products,
    "deterministic": agreement.deterministic,
    "leaves statistics as they are": agreement.repeatable,
    "leaves what it prepared as it is": agreement.prepared,
    "the same for every batch size": agreement.batches,
    "the same for several processes": agreement.processes,
    "separable": agreement.separable,
    "scores blocks": depth.scores,
    "reconstructs": answers.reconstructs,
    "leaves the model as it is": untouched.model,
    "leaves every block of a model as it is": untouched.every_block,
    "leaves the process as it is": untouched.process,
    "no worse than random masks": answers.beats_chance,
    "few tokens": answers.few_tokens,
    "inputs that are always zero": answers.dead_inputs,
    "rows that are all zero": answers.dead_rows,
}
"""By name; each raises when a pruner breaks what it promises."""
