"""Checks that answers agree: asked again, in other batches and processes, and without the other linears."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from compressx.api.patterns import Unstructured
from compressx.api.pruner import PreparingPruner, PruneResult, Statistic
from compressx.blocks.observe import Observed
from compressx.blocks.select import Kept, Stats, write
from compressx.testing.models import tiny_tokens
from compressx.testing.subject import Claim, NoSuchPromiseError, Scene, Subject, Whole, expect
from compressx.testing.untouched import StatisticTensors

SAME = 0.98
"""Fraction of mask bits that may not change with the order of sums: near ties change sides, nothing else does."""

CLOSE = 0.02
"""How far apart new weights may be in rows with the same mask, relative to their norm: rounding moves a thousandth."""

_ON_A_COPY = "other linears and an allocation's next question read it, so compute on a copy: `x * 2`, not `x.mul_(2)`"


def deterministic(subject: Subject) -> None:
    """Run twice, with other global seeds."""
    for pattern in subject.few:
        runs = []
        for seed in (0, 1):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                runs.append(subject.decided(subject.scene(), pattern))
        _expect_equal(runs[0], runs[1], f"{pattern}: two runs of one recipe, with other global seeds,")


def repeatable(subject: Subject) -> None:
    """Ask for other sparsities in between, and compare the statistics bit for bit."""
    scene = subject.scene()
    stats = subject.gathered(scene)
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


def prepared(subject: Subject) -> None:
    """Decide with values that were prepared once, as allocation does."""
    scene = subject.scene()
    if not subject.claimed or not isinstance(scene.pruners(subject.rule)[0], PreparingPruner):
        raise NoSuchPromiseError("it prepares nothing")
    stats = subject.gathered(scene)
    fresh = {pattern: subject.decided(scene, pattern, stats) for pattern in subject.few}
    kept: Kept = {}
    for pattern in (*fresh, *fresh):
        again = subject.decided(scene, pattern, stats, kept=kept)
        _expect_equal(fresh[pattern], again, f"{pattern}: with what it had prepared it")


def batches(subject: Subject) -> None:
    """Gather the same tokens in batches of other sizes."""
    tokens = tiny_tokens()
    tokens[-1] = 7  # one sequence is nothing like the others, so that its weight shows

    def answers(batches: tuple[int, ...]) -> dict[Claim, Mapping[str, PruneResult]]:
        scene = subject.scene(batches=batches, tokens=tokens)
        stats = subject.gathered(scene)
        return {pattern: subject.decided(scene, pattern, stats) for pattern in subject.different}

    whole = answers((8,))
    for batches in ((7, 1), (1,) * 8):
        for pattern, results in answers(batches).items():
            _expect_alike(whole[pattern], results, f"batches of {batches}")


def processes(subject: Subject) -> None:
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


def separable(subject: Subject) -> None:
    """Decide each linear alone, after all others were written."""
    if not subject.spec.separable:
        raise NoSuchPromiseError("it does not say separable")
    scene = subject.scene()
    stats = subject.gathered(scene)
    joint = {p for p in subject.patterns if isinstance(p, Unstructured) and p.group == "joint"}
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
