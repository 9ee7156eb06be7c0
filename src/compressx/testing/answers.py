"""Checks of single answers: exact masks and finite weights, whatever the pattern, the dtype, the weights and inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pydantic import create_model

from compressx.api.patterns import NM, Unstructured, keep_masks
from compressx.api.pruner import Block, PruneResult, PrunerSpec, Statistic
from compressx.blocks.select import write
from compressx.models.units import find_units
from compressx.planning.plan import PlannedRule
from compressx.runtime.errors import CompressxError
from compressx.testing.models import tiny_tokens
from compressx.testing.subject import IN_BLOCKS, Claim, NoSuchPromiseError, Subject, Whole, expect


class _BySize:
    """Selects the largest weights: what a reconstructing pruner is given a mask by."""

    def observe(self, block: Block, name: str) -> None:
        """Ask for nothing."""

    def prune(self, block: Block, patterns: Mapping[str, Any], stats: Mapping[str, Statistic]) -> Any:  # noqa: ARG002
        scores = {n: block.linears[n].weight.float().abs() for n in patterns}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}


_DRAWS = 5
_CHANCE = 1.25
"""Number of random masks; times their mean divergence that is no chance: of weights one has 1.13, wrong signs 1.4."""

_NoOptions = create_model("_NoOptions")
_SELECTOR = PrunerSpec("by size", "the largest weights", _NoOptions, lambda _: _BySize())


def exact(subject: Subject) -> None:
    """Ask for every pattern that is claimed; the host counts zeros in rows, groups and wholes, and units."""
    scene = subject.scene()
    stats = subject.gathered(scene)
    for pattern in subject.patterns:
        subject.decided(scene, pattern, stats)


def dense(subject: Subject) -> None:
    """Ask for no zeros."""
    patterns: list[Claim] = [Unstructured(0.0, group) for group in subject.spec.groups]
    patterns += [NM(4, 4)] if subject.spec.nm else []
    patterns += [Whole(claim.unit, 0.0) for claim in subject.different if isinstance(claim, Whole)]
    scene = subject.scene()
    for pattern in patterns:
        for name, result in subject.decided(scene, pattern).items():
            weight = scene.block.linears[name].weight
            expect(bool(result.keep.all()), f"{name}, {pattern}: a weight is dropped")
            same = result.weight is None or torch.equal(result.weight.to(weight.dtype), weight)
            expect(same, f"{name}, {pattern}: weights are changed though all are kept")
            bias = scene.block.linears[name].bias
            same = result.bias is None or bias is None or torch.equal(result.bias.to(bias.dtype), bias)
            expect(same, f"{name}, {pattern}: the bias is changed though all weights are kept")


def dtypes(subject: Subject) -> None:
    """Prune 16-bit models; new weights have to fit their dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        scene = subject.scene(dtype=dtype)
        stats = subject.gathered(scene)
        for pattern in subject.different:
            for name in subject.decided(scene, pattern, stats):  # the host refuses weights that do not fit the dtype
                weight = scene.block.linears[name].weight
                expect(weight.dtype == dtype, f"{name}: the model's {dtype} became {weight.dtype}")


def narrow_products(subject: Subject) -> None:
    """Prune a float32 model that multiplies in bfloat16: most inputs are narrower than the weights then."""
    scene = subject.scene()
    runs = [partial(_narrowed, run) for run in scene.passes]
    stats = subject.gathered(replace(scene, passes=runs))
    for pattern in subject.different:
        for name in subject.decided(scene, pattern, stats):
            weight = scene.block.linears[name].weight
            expect(weight.dtype == torch.float32, f"{name}: the model's torch.float32 became {weight.dtype}")


def _narrowed(run: Callable[[], Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run()


def reconstructs(subject: Subject) -> None:
    """Give masks that another pruner selected."""
    if not subject.spec.reconstructs:
        raise NoSuchPromiseError("it does not say reconstructs")
    rule = PlannedRule(0, _SELECTOR, _NoOptions(), subject.spec, subject.rule.options)
    scene = subject.scene()
    block = subject.scene(weights=False).block
    patterns: list[Claim] = [Unstructured(0.5, "row"), Unstructured(0.5, "layer")]
    patterns += [whole for unit in IN_BLOCKS if subject.why_not(block, whole := Whole(unit, 0.5)) is None]
    for pattern in patterns:
        asked = {*subject.asked(block, pattern)}
        if not asked or not asked <= {*subject.names}:
            continue  # it prunes whole units only, or its check was not asked about all of them
        results = subject.decided(scene, pattern, rule=rule)  # the host refuses another mask than it gave
        expect(any(r.weight is not None for r in results.values()), "it says reconstructs, and returns no new weights")


@torch.no_grad()
def beats_chance(subject: Subject) -> None:
    """Go a tenth of the way to an answer and to random masks, and compare how far the model's predictions diverge.

    All the way one block is as good as lost by either. Random units are alike, so half of them are made weaker.
    """
    generator = torch.Generator().manual_seed(0)
    for claim in subject.different:
        scene = subject.scene()
        asked = subject.asked(scene.block, claim)
        linears = {name: scene.block.linears[name] for name in asked}
        shapes = {name: (x.out_features, x.in_features) for name, x in linears.items()}
        for units in find_units(claim.unit, scene.block) if isinstance(claim, Whole) else ():
            strong = units.masks(torch.arange(units.count) % 2 == 0, {name: shapes[name] for name in units.owners})
            for name, keep in strong.items():
                linears[name].weight.mul_(torch.where(keep, 1.0, 0.3))
        tensors = [x for linear in linears.values() for x in (linear.weight, linear.bias) if x is not None]
        before = [x.clone() for x in tensors]
        dense = scene.model(tiny_tokens()).logits.double().log_softmax(-1)
        answers = [subject.decided(scene, claim)]
        for _ in range(_DRAWS):
            scores = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
            answers.append({name: PruneResult(keep) for name, keep in keep_masks(scores, asked).items()})
        lost = []
        for answer in answers:
            for name, x in linears.items():
                write(x, answer[name])
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old.lerp(tensor, 0.1))
            pruned = scene.model(tiny_tokens()).logits.double().log_softmax(-1)
            lost.append(float((dense.exp() * (dense - pruned)).sum(-1).mean()))
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
        mine, chance = lost[0], math.fsum(lost[1:]) / _DRAWS
        expect(
            mine <= _CHANCE * chance,
            f"{claim}: the model's predictions diverge {mine / chance:.3g} times as far as with random masks: is the "
            "sign of its scores flipped? Only a pruner that is random on purpose may fail here",
        )


def few_tokens(subject: Subject) -> None:
    """Gather fewer tokens than there are features, so that a Hessian is singular."""
    scene = subject.scene(batches=(1,), tokens=tiny_tokens(sequences=1, length=12))
    stats = subject.gathered(scene)
    for pattern in subject.different:
        subject.decided(scene, pattern, stats)


def dead_inputs(subject: Subject) -> None:
    """Silence features of Llama's norms, which query, key, value, gate and up read."""
    if subject.architecture != "llama":
        raise NoSuchPromiseError("only Llama's norms are silenced")

    def kill(model: Any) -> None:
        model.model.layers[0].input_layernorm.weight[:7] = 0.0
        model.model.layers[0].post_attention_layernorm.weight[:7] = 0.0

    with _advice("where every input is zero so is the feature's statistic, so divide by it plus a small number"):
        scene = subject.scene(change=kill)
        stats = subject.gathered(scene)
        for pattern in subject.different:
            subject.decided(scene, pattern, stats)


def dead_rows(subject: Subject) -> None:
    """Zero the first rows of every linear: pruned models have such rows, and the next linear then reads zeros."""
    scene = subject.scene()
    for name in subject.names:
        scene.block.linears[name].weight[:7] = 0.0
    stats = subject.gathered(scene)
    for pattern in subject.few:
        with _advice("a row of zeros has the sum, the norm and the maximum 0, so divide by it plus a small number"):
            subject.decided(scene, pattern, stats)


@contextmanager
def _advice(what: str) -> Iterator[None]:
    """Add to the message of what a pruner raises where an input or a weight is zero."""
    try:
        yield
    except (AssertionError, CompressxError) as error:
        if isinstance(error.__cause__, AttributeError | ImportError | NameError | TypeError):  # a mistake everywhere
            raise
        raise AssertionError(f"{error}; {what}") from error
