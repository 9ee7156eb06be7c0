"""The checks, one function for each promise of a pruner; each raises when the promise is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel, create_model

from compressx.api.patterns import NM, Unstructured, keep_masks, zeros_in
from compressx.api.pruner import Block, PreparingPruner, PruneResult, PrunerSpec, Statistic
from compressx.blocks.observe import Observed
from compressx.blocks.select import Kept, Stats, write
from compressx.planning.plan import PlannedRule
from compressx.recipe.validation import validate_options
from compressx.testing.models import tiny_tokens
from compressx.testing.subject import NoSuchPromiseError, Scene, Subject, expect

SAME = 0.98
"""Fraction of mask bits that may not change with the order of sums: near ties change sides, nothing else does."""


class _BySize:
    """Selects the largest weights: what a reconstructing pruner is given a mask by."""

    def observe(self, block: Block, name: str) -> None:
        """Ask for nothing."""

    def prune(self, block: Block, patterns: Mapping[str, Any], stats: Mapping[str, Statistic]) -> Any:  # noqa: ARG002
        scores = {n: block.linears[n].weight.float().abs() for n in patterns}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}


_NoOptions = create_model("_NoOptions")
_SELECTOR = PrunerSpec("by size", "the largest weights", _NoOptions, lambda _: _BySize())


def validated_options(spec: PrunerSpec, given: Mapping[str, Any]) -> BaseModel:
    """Validate options as a recipe's are."""
    return validate_options(spec.options, given, lambda *loc: ".".join(["options", *map(str, loc)]))


def options_round_trip(spec: PrunerSpec, given: Mapping[str, Any]) -> None:
    """Check that options, written as JSON, are read back as they were."""
    options = validated_options(spec, given)
    again = validated_options(spec, options.model_dump(mode="json", by_alias=True))
    expect(again == options, f"options read back from JSON differ: {again!r}, expected {options!r}")


def plans(subject: Subject) -> None:
    """Check that a recipe can be planned: `check` and `observe` on a model without weights."""
    scene = subject.scene(weights=False)
    pruner = subject.spec.build(subject.rule.options)
    for name in subject.names:
        with torch.device("meta"):  # as the planner calls it
            statistic, again = pruner.observe(scene.block, name), pruner.observe(scene.block, name)
        expect(
            statistic is None or isinstance(statistic, Statistic),
            f"observe({name!r}) must return a Statistic or None, got {type(statistic).__name__}",
        )
        expect(
            statistic is None or statistic is not again,
            f"observe({name!r}) must return a fresh statistic each time",
        )


def _refusals(subject: Subject) -> None:
    if subject.spec.check is None:
        raise NoSuchPromiseError("it refuses nothing")
    block = subject.scene(weights=False).block
    for name in block.linears:
        for pattern in subject.claimed:
            said = subject.refusal(block, {name: pattern})
            named = said is None or any(known in said for known in (block.fqn, *block.linears))
            expect(named, f"refusing {name}, {pattern}, it names no layer: {said}")


def _exact(subject: Subject) -> None:
    scene = subject.scene()
    stats = subject.gathered(scene)
    for pattern in subject.patterns:
        results = subject.decided(scene, pattern, stats)
        for name, result in results.items():
            wanted = zeros_in(pattern, *result.keep.shape)
            zeros = int((~result.keep).sum())
            expect(wanted is None or zeros == wanted, f"{name}, {pattern}: {zeros} zeros, expected {wanted}")
            if isinstance(pattern, NM):
                kept = result.keep.view(len(result.keep), -1, pattern.of).sum(dim=2)
                expect(bool((kept == pattern.keep).all()), f"{name}, {pattern}: groups do not lie along in_features")
            elif pattern.group == "row":
                each = (~result.keep).sum(dim=1)
                expect(bool((each == each[0]).all()), f"{name}, {pattern}: rows differ in their number of zeros")


def _dense(subject: Subject) -> None:
    patterns: list[Unstructured | NM] = [Unstructured(0.0, group) for group in subject.spec.groups]
    patterns += [NM(4, 4)] if subject.spec.nm else []
    scene = subject.scene()
    for pattern in patterns:
        for name, result in subject.decided(scene, pattern).items():
            weight = scene.block.linears[name].weight
            expect(bool(result.keep.all()), f"{name}, {pattern}: a weight is dropped")
            same = result.weight is None or torch.equal(result.weight.to(weight.dtype), weight)
            expect(same, f"{name}, {pattern}: weights are changed though all are kept")


def _dtypes(subject: Subject) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        scene = subject.scene(dtype=dtype)
        for name, result in subject.decided(scene, subject.patterns[0]).items():
            weight = scene.block.linears[name].weight
            expect(weight.dtype == dtype, f"{name}: the model's {dtype} became {weight.dtype}")
            if result.weight is not None:
                kept = result.weight.to(dtype)[result.keep]
                expect(bool(torch.isfinite(kept).all()), f"{name}: a weight does not fit {dtype}")


def _deterministic(subject: Subject) -> None:
    for pattern in (subject.patterns[0], subject.patterns[-1]):
        runs = []
        for seed in (0, 1):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                runs.append(subject.decided(subject.scene(), pattern))
        _expect_equal(runs[0], runs[1], f"{pattern}: two runs of one recipe, with other global seeds,")


def _repeatable(subject: Subject) -> None:
    scene = subject.scene()
    stats = subject.gathered(scene)
    first = subject.decided(scene, subject.patterns[0], stats)
    subject.decided(scene, subject.patterns[-1], stats)
    again = subject.decided(scene, subject.patterns[0], stats)
    _expect_equal(first, again, "asked again with the same statistics, as allocation does, it")


def _prepared(subject: Subject) -> None:
    scene = subject.scene()
    if not isinstance(scene.pruners(subject.rule)[0], PreparingPruner):
        raise NoSuchPromiseError("it prepares nothing")
    stats = subject.gathered(scene)
    first, last = subject.patterns[0], subject.patterns[-1]
    fresh = {pattern: subject.decided(scene, pattern, stats) for pattern in (first, last)}
    kept: Kept = {}
    for pattern in (first, last, first):
        again = subject.decided(scene, pattern, stats, kept=kept)
        _expect_equal(fresh[pattern], again, f"{pattern}: with what it had prepared it")


def _batches(subject: Subject) -> None:
    pattern = subject.patterns[0]
    tokens = tiny_tokens()
    tokens[-1] = 7  # one sequence is nothing like the others, so that its weight shows
    whole = subject.decided(subject.scene(batches=(8,), tokens=tokens), pattern)
    for batches in ((7, 1), (1,) * 8):
        results = subject.decided(subject.scene(batches=batches, tokens=tokens), pattern)
        _expect_alike(whole, results, f"batches of {batches}")


def _processes(subject: Subject) -> None:
    """Gather two halves apart and add them up, as two processes do."""
    scene = subject.scene(batches=(4, 4))
    whole = subject.gathered(scene)
    halves: list[Stats] = []
    for half in (0, 1):
        block = replace(scene.block, calls=scene.block.calls[half : half + 1])
        halves.append(subject.gathered(Scene(scene.model, block, scene.passes[half : half + 1])))
    merged: dict[Observed, Observed] = {}
    selector, _ = scene.pruners(subject.rule)
    for name, stats in halves[0].items():
        for role, mine in stats.items():
            if mine not in merged:
                other, fresh = halves[1][name][role].statistic, partial(selector.observe, scene.block, name)
                merged[mine] = Observed(_added(mine.statistic, other, fresh))
    pattern = subject.patterns[0]
    both = {name: {role: merged[mine] for role, mine in stats.items()} for name, stats in halves[0].items()}
    added = subject.decided(scene, pattern, both)
    _expect_alike(subject.decided(scene, pattern, whole), added, "statistics of two processes, added up,")


def _added(mine: Statistic, other: Statistic, fresh: Callable[[], Statistic | None]) -> Statistic:
    """Combine what two processes gathered, as `Ranks.combine` does."""
    tensors, others = mine.tensors(), other.tensors()
    joined = []
    for key, (tensor, how) in tensors.items():
        theirs = others[key][0]
        if how == "sum":
            tensor.add_(theirs)
        elif how == "max":
            torch.maximum(tensor, theirs, out=tensor)
        else:
            joined += [tensor, theirs]
    if not joined:
        return mine
    merged = fresh()
    if merged is None:
        raise AssertionError("observe returned a statistic once, and then None")
    for part in joined:
        merged.update(part)
    return merged


def _separable(subject: Subject) -> None:
    if not subject.spec.separable:
        raise NoSuchPromiseError("it does not say separable")
    scene = subject.scene()
    stats = subject.gathered(scene)
    joint = {p for p in subject.patterns if isinstance(p, Unstructured) and p.group == "joint"}
    apart = [p for p in subject.patterns if p not in joint]
    if not apart:
        raise NoSuchPromiseError("it says separable, and every group of its own is joint")
    for pattern in dict.fromkeys((apart[0], apart[-1])):
        together = subject.decided(scene, pattern, stats)
        for name in subject.names:
            dense = {n: scene.block.linears[n].weight.clone() for n in subject.names if n != name}
            for other in dense:  # in a run these may be pruned already
                write(scene.block.linears[other], together[other])
            alone = subject.decided(scene, pattern, stats, names=[name])
            _expect_equal({name: together[name]}, alone, f"{pattern}: decided after the others it")
            for other, weight in dense.items():
                scene.block.linears[other].weight.copy_(weight)


def _reconstructs(subject: Subject) -> None:
    if not subject.spec.reconstructs:
        raise NoSuchPromiseError("it does not say reconstructs")
    rule = PlannedRule(0, _SELECTOR, _NoOptions(), subject.spec, subject.rule.options)
    scene = subject.scene()
    for pattern in (Unstructured(0.5, "row"), Unstructured(0.5, "layer")):
        results = subject.decided(scene, pattern, rule=rule)  # the host refuses another mask than it gave
        expect(any(r.weight is not None for r in results.values()), "it says reconstructs, and returns no new weights")


def _untouched(subject: Subject) -> None:
    scene = subject.scene()
    before = scene.state()
    before_all = (torch.get_num_threads(), torch.get_default_dtype())
    weights = {n: t.clone() for n, t in scene.tensors()}
    subject.decided(scene, subject.patterns[0])
    for name, tensor in scene.tensors():
        expect(torch.equal(tensor, weights[name]), f"{name} was changed; a pruner returns values, the host writes them")
    for name, now in scene.state().items():
        expect(now == before[name], f"{name or 'the model'}: {now}, expected {before[name]} as before")
    after = (torch.get_num_threads(), torch.get_default_dtype())
    expect(after == before_all, f"threads and default dtype are {after}, expected {before_all} as before")


def _few_tokens(subject: Subject) -> None:
    scene = subject.scene(batches=(1,), tokens=tiny_tokens(sequences=1, length=12))
    subject.decided(scene, subject.patterns[0])


def _dead_inputs(subject: Subject) -> None:
    if subject.architecture != "llama":
        raise NoSuchPromiseError("only Llama's norms are silenced")

    def kill(model: Any) -> None:
        model.model.layers[0].input_layernorm.weight[:7] = 0.0
        model.model.layers[0].post_attention_layernorm.weight[:7] = 0.0

    subject.decided(subject.scene(change=kill), subject.patterns[0])


CHECKS: Mapping[str, Callable[[Subject], None]] = {
    "refusals name the layer": _refusals,
    "exact sparsity for every pattern": _exact,
    "sparsity zero changes nothing": _dense,
    "bfloat16 and float16": _dtypes,
    "deterministic": _deterministic,
    "leaves statistics as they are": _repeatable,
    "leaves what it prepared as it is": _prepared,
    "the same for every batch size": _batches,
    "the same for several processes": _processes,
    "separable": _separable,
    "reconstructs": _reconstructs,
    "leaves the model as it is": _untouched,
    "few tokens": _few_tokens,
    "inputs that are always zero": _dead_inputs,
}
"""By name; each raises when a pruner breaks what it promises."""


def _expect_equal(a: Mapping[str, PruneResult], b: Mapping[str, PruneResult], what: str) -> None:
    for name, mine in a.items():
        expect(torch.equal(mine.keep, b[name].keep), f"{name}: {what} gave another mask")
        one, other = (None if r.weight is None else r.weight[r.keep] for r in (mine, b[name]))
        same = one is other if one is None or other is None else torch.equal(one, other)
        expect(same, f"{name}: {what} gave other weights")


def _expect_alike(a: Mapping[str, PruneResult], b: Mapping[str, PruneResult], what: str) -> None:
    for name, mine in a.items():
        same = float((mine.keep == b[name].keep).float().mean())
        difference = f"{name}: {what} gave a mask of which {same:.1%} is the same, expected {SAME:.0%} at least"
        advice = "a statistic has to be a sum, a maximum or a list over tokens, not an average of batches"
        expect(same >= SAME, f"{difference}; {advice}")
