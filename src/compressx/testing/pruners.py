"""What a pruner promises, one function for each promise; each raises when the promise is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from compressx.api.patterns import NM, RulePattern, Structured, Units, Unstructured, keep_masks
from compressx.api.pruner import Block, NoOptions, PreparingPruner, PruneResult, PrunerSpec, Statistic
from compressx.blocks.depth import choose_blocks
from compressx.blocks.observe import SharedStatistic
from compressx.blocks.select import PreparedValues, Stats, write
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.units import find_units
from compressx.planning.plan import PlannedDepth, PlannedRule
from compressx.runtime.errors import CompressxError, UnsupportedModelError
from compressx.testing.models import tiny_model, tiny_tokens
from compressx.testing.subject import (
    IN_BLOCKS,
    Claim,
    NoSuchPromiseError,
    Scene,
    Subject,
    Whole,
    expect,
    refusals,
)
from compressx.testing.untouched import Snapshot, StatisticTensors, seeded


def plans(subject: Subject) -> None:
    """Check that a recipe can be planned: `check` and `observe` on a model without weights."""
    if not subject.claimed:
        subject.rule.build_depth()
        return
    scene = subject.scene(weights=False)
    (pruner,) = subject.rule.build()
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
    asked: list[tuple[str, Mapping[str, RulePattern]]] = []
    for claim in subject.claimed:
        if not isinstance(claim, Whole):
            asked += [(f"{name}, {claim}", {name: claim}) for name in block.linears]
        elif subject.why_not(block, claim) is not None:
            with suppress(UnsupportedModelError):  # what the host refuses no pruner is asked
                asked.append((str(claim), subject.by_linear(block, claim)))
    for what, patterns in asked:
        said = subject.refusal(block, patterns)
        named = said is None or any(known in said for known in (block.fqn, *block.linears))
        expect(named, f"refusing {what}, it names no layer: {said}")


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

_SELECTOR = PrunerSpec("by size", "the largest weights", NoOptions, lambda _: _BySize())


def _decide(subject: Subject, scene: Scene, patterns: Iterable[Claim]) -> None:
    stats = subject.statistics(scene)
    for pattern in patterns:
        subject.decided(scene, pattern, stats)


def _dense(subject: Subject) -> None:
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


def _half_precision(subject: Subject) -> None:
    """Prune 16-bit models; the host refuses new weights that do not fit their dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        _decide(subject, subject.scene(dtype=dtype), subject.different)


def _narrow_matmuls(subject: Subject) -> None:
    """Prune a float32 model that multiplies in bfloat16: most inputs are narrower than the weights then."""

    def narrowed(run: Callable[[], Any]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            run()

    scene = subject.scene()
    _decide(subject, replace(scene, passes=[partial(narrowed, run) for run in scene.passes]), subject.different)


def _reconstructs(subject: Subject) -> None:
    """Give masks that another pruner selected."""
    if not subject.spec.reconstructs:
        raise NoSuchPromiseError("it does not say reconstructs")
    rule = PlannedRule(0, ((_SELECTOR, NoOptions()), *subject.rule.pruners))
    scene = subject.scene()
    block = subject.scene(weights=False).block
    patterns: list[Claim] = [Unstructured(0.5, "row"), Unstructured(0.5, "layer")]
    patterns += [whole for unit in IN_BLOCKS if subject.why_not(block, whole := Whole(unit, 0.5)) is None]
    for pattern in patterns:
        asked = {*subject.by_linear(block, pattern)}
        if not asked or not asked <= {*subject.names}:
            continue  # it prunes whole units only, or its check was not asked about all of them
        results = subject.decided(scene, pattern, rule=rule)  # the host refuses another mask than it gave
        expect(any(r.weight is not None for r in results.values()), "it says reconstructs, and returns no new weights")


@torch.no_grad()
def _beats_chance(subject: Subject) -> None:
    """Go a tenth of the way to an answer and to random masks, and compare how far the model's predictions diverge.

    All the way one block is as good as lost by either. Random units are alike, so half of them are made weaker.
    """
    generator = torch.Generator().manual_seed(0)
    for claim in subject.different:
        scene = subject.scene()
        asked = subject.by_linear(scene.block, claim)
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


def _dead_inputs(subject: Subject) -> None:
    """Silence features of Llama's norms, which query, key, value, gate and up read."""
    if subject.architecture != "llama":
        raise NoSuchPromiseError("only Llama's norms are silenced")

    def kill(model: Any) -> None:
        model.model.layers[0].input_layernorm.weight[:7] = 0.0
        model.model.layers[0].post_attention_layernorm.weight[:7] = 0.0

    with _advice("where every input is zero so is the feature's statistic, so divide by it plus a small number"):
        _decide(subject, subject.scene(change=kill), subject.different)


def _dead_rows(subject: Subject) -> None:
    """Zero the first rows of every linear: pruned models have such rows, and the next linear then reads zeros."""
    scene = subject.scene()
    for name in subject.names:
        scene.block.linears[name].weight[:7] = 0.0
    with _advice("a row of zeros has the sum, the norm and the maximum 0, so divide by it plus a small number"):
        _decide(subject, scene, subject.few)


@contextmanager
def _advice(what: str) -> Iterator[None]:
    """Add to the message of what a pruner raises where an input or a weight is zero."""
    try:
        yield
    except (AssertionError, CompressxError) as error:
        if isinstance(error.__cause__, AttributeError | ImportError | NameError | TypeError):  # a mistake everywhere
            raise
        raise AssertionError(f"{error}; {what}") from error


SAME = 0.98
"""Fraction of mask bits that may not change with the order of sums: near ties change sides, nothing else does."""

CLOSE = 0.02
"""How far apart new weights may be in rows with the same mask, relative to their norm: rounding moves a thousandth."""

_ON_A_COPY = "other linears and an allocation's next question read it, so compute on a copy: `x * 2`, not `x.mul_(2)`"


def _deterministic(subject: Subject) -> None:
    """Run twice, with other global seeds."""
    for pattern in subject.few:
        runs = []
        for seed in (0, 1):
            with seeded(seed):
                runs.append(subject.decided(subject.scene(), pattern))
        _expect_equal(runs[0], runs[1], f"{pattern}: two runs of one recipe, with other global seeds,")


def _repeatable(subject: Subject) -> None:
    """Ask for other sparsities in between, and compare the statistics bit for bit."""
    scene = subject.scene()
    stats = subject.statistics(scene)
    before = {name: [StatisticTensors(x.statistic) for x in of.values()] for name, of in stats.items()}
    sensitivities = {name: tensor.clone() for name, tensor in scene.block.sensitivities.items()}
    first = {pattern: subject.decided(scene, pattern, stats) for pattern in subject.few}
    for pattern, results in first.items():
        again = subject.decided(scene, pattern, stats)
        _expect_equal(results, again, "asked again with the same statistics, as allocation does, it")
    for name, contents in before.items():
        changed = [tensor for of in contents for tensor in of.changed()]
        expect(not changed, f"{name}: prune changed {', '.join(changed)} of its statistic; {_ON_A_COPY}")
    for name, was in sensitivities.items():
        same = torch.equal(scene.block.sensitivities[name], was)
        expect(same, f"{name}: prune changed block.sensitivities; {_ON_A_COPY}")


def _prepared(subject: Subject) -> None:
    """Decide with values that were prepared once, as allocation does."""
    scene = subject.scene()
    if not subject.claimed or not isinstance(scene.pruners(subject.rule)[0], PreparingPruner):
        raise NoSuchPromiseError("it prepares nothing")
    stats = subject.statistics(scene)
    fresh = {pattern: subject.decided(scene, pattern, stats) for pattern in subject.few}
    values: PreparedValues = {}
    for pattern in (*fresh, *fresh):
        again = subject.decided(scene, pattern, stats, kept=values)
        _expect_equal(fresh[pattern], again, f"{pattern}: with what it had prepared it")


def _batches(subject: Subject) -> None:
    """Gather the same tokens in batches of other sizes."""
    tokens = tiny_tokens()
    tokens[-1] = 7  # one sequence is nothing like the others, so that its weight shows

    def answers(batches: tuple[int, ...]) -> dict[Claim, Mapping[str, PruneResult]]:
        scene = subject.scene(batches=batches, tokens=tokens)
        stats = subject.statistics(scene)
        return {pattern: subject.decided(scene, pattern, stats) for pattern in subject.different}

    whole = answers((8,))
    for batches in ((7, 1), (1,) * 8):
        for pattern, results in answers(batches).items():
            _expect_alike(whole[pattern], results, f"batches of {batches}")


def _processes(subject: Subject) -> None:
    """Gather two halves apart and add them up, as two processes do."""
    scene = subject.scene(batches=(4, 4))
    whole = subject.statistics(scene)
    halves: list[Stats] = []
    for half in (0, 1):
        block = replace(scene.block, calls=scene.block.calls[half : half + 1])
        halves.append(subject.statistics(Scene(scene.model, block, scene.passes[half : half + 1])))
    merged: dict[SharedStatistic, SharedStatistic] = {}
    (selector,) = scene.pruners(subject.rule)
    for name, stats in halves[0].items():
        for role, mine in stats.items():
            if mine not in merged:
                other, fresh = halves[1][name][role].statistic, partial(selector.observe, scene.block, name)
                merged[mine] = SharedStatistic(_added(mine.statistic, other, fresh))
    both = {name: {role: merged[mine] for role, mine in stats.items()} for name, stats in halves[0].items()}
    for pattern in subject.different:
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
    """Decide each linear alone, after all others were written."""
    if not subject.spec.separable:
        raise NoSuchPromiseError("it does not say separable")
    scene = subject.scene()
    stats = subject.statistics(scene)
    joint = {p for p in subject.patterns if isinstance(p, Unstructured) and p.joint}
    apart = [p for p in subject.patterns if not (p in joint or isinstance(p, Whole))]
    if not apart:
        raise NoSuchPromiseError("it says separable, and all that it prunes competes over several linears")
    for pattern in dict.fromkeys((apart[0], apart[-1])):
        together = subject.decided(scene, pattern, stats)
        for name in together:
            dense = {n: scene.block.linears[n].weight.clone() for n in together if n != name}
            for other in dense:  # in a run these may be pruned already
                write(scene.block.linears[other], together[other])
            alone = subject.decided(scene, pattern, stats, names=[name])
            _expect_equal({name: together[name]}, alone, f"{pattern}: decided after the others it")
            for other, weight in dense.items():
                scene.block.linears[other].weight.copy_(weight)


def _expect_equal(a: Mapping[str, PruneResult], b: Mapping[str, PruneResult], what: str) -> None:
    for name, mine in a.items():
        expect(torch.equal(mine.keep, b[name].keep), f"{name}: {what} gave another mask")
        one, other = (None if r.weight is None else r.weight[r.keep] for r in (mine, b[name]))
        same = one is other if one is None or other is None else torch.equal(one, other)
        expect(same, f"{name}: {what} gave other weights")
        of, to = mine.bias, b[name].bias
        expect(of is to if of is None or to is None else torch.equal(of, to), f"{name}: {what} gave another bias")


def _expect_alike(a: Mapping[str, PruneResult], b: Mapping[str, PruneResult], what: str) -> None:
    for name, mine in a.items():
        same = float((mine.keep == b[name].keep).float().mean())
        difference = f"{name}: {what} gave a mask of which {same:.1%} is the same, expected {SAME:.0%} at least"
        advice = "a statistic has to be a sum, a maximum or a list over tokens, not an average of batches"
        expect(same >= SAME, f"{difference}; {advice}")
        moved = _relative_distance(mine, b[name])
        weights = f"{name}: {what} gave new weights that are {moved:.1%} apart, expected {CLOSE:.0%} at most"
        expect(moved <= CLOSE, f"{weights}; {advice}")


def _relative_distance(one: PruneResult, other: PruneResult) -> float:
    """Return the norm of the difference of new weights, relative to the first ones', in rows with the same mask."""
    if one.weight is None or other.weight is None:
        return 0.0 if one.weight is other.weight else float("inf")
    rows = (one.keep == other.keep).all(dim=1)
    pairs = ((one.keep, one.weight), (other.keep, other.weight))
    kept, theirs = (torch.where(keep, weight, 0.0).float()[rows] for keep, weight in pairs)
    return float((kept - theirs).norm() / kept.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _chooses_blocks(subject: Subject) -> None:
    """Let it choose blocks of a model, again with another global seed."""
    if "blocks" not in subject.spec.units:
        raise NoSuchPromiseError("it does not say blocks")
    chosen = []
    for seed in (0, 1):
        model = tiny_model(subject.architecture)
        blocks = tuple(architecture_of(model).blocks)
        planned = PlannedDepth(subject.rule, Structured("blocks", 0.5, Units("blocks", "", len(blocks), {})), blocks)
        with seeded(seed), refusals(UnsupportedModelError):
            chosen.append(choose_blocks(InMemory(model), planned, torch.split(tiny_tokens(), 4)))
    expect(chosen[0] == chosen[1], "two runs of one recipe, with other global seeds, gave others")


def _model(subject: Subject) -> None:
    """Compare weights, modules and config before and after one block is observed and decided."""
    scene = subject.scene()
    before = Snapshot(scene.model)
    _decide(subject, scene, subject.different)
    before.expect_same()


PRUNER_CHECKS: Mapping[str, Callable[[Subject], None]] = {
    "refusals name the layer": _refusals,
    "exact sparsity for every pattern": lambda subject: _decide(subject, subject.scene(), subject.patterns),
    "sparsity zero changes nothing": _dense,
    "bfloat16 and float16": _half_precision,
    "matmuls narrower than the weights": _narrow_matmuls,
    "deterministic": _deterministic,
    "leaves statistics as they are": _repeatable,
    "leaves what it prepared as it is": _prepared,
    "the same for every batch size": _batches,
    "the same for several processes": _processes,
    "separable": _separable,
    "chooses blocks": _chooses_blocks,
    "reconstructs": _reconstructs,
    "leaves the model as it is": _model,
    "no worse than random masks": _beats_chance,
    # Fewer than there are features, so that a Hessian is singular.
    "few tokens": lambda subject: _decide(
        subject, subject.scene(batches=(1,), tokens=tiny_tokens(sequences=1, length=12)), subject.different
    ),
    "inputs that are always zero": _dead_inputs,
    "rows that are all zero": _dead_rows,
}
"""By name; each raises when a pruner breaks what it promises."""
