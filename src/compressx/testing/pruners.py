"""What a pruner promises, one function for each promise; each raises when the promise is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from compressx.api.patterns import NM, Structured, Units, Unstructured, keep_masks
from compressx.api.pruner import NoOptions, PreparingPruner, PruneResult, Statistic
from compressx.api.scores import score_pruner
from compressx.blocks.depth import choose_blocks
from compressx.blocks.observe import SharedStatistic
from compressx.blocks.select import PreparedValues, Stats, combined, restored, write
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.units import find_units
from compressx.planning.plan import PlannedDepth, PlannedRule
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.ranks import Ranks
from compressx.testing.models import tiny_model, tiny_tokens
from compressx.testing.subject import IN_BLOCKS, Claim, NoSuchPromiseError, Scene, Subject, Whole, expect, refusals
from compressx.testing.untouched import Snapshot, seeded

Check: TypeAlias = Callable[[Subject], None]


def _plans(subject: Subject) -> None:
    """Check that a recipe can be planned: `check` and `observe` on a model without weights."""
    if not subject.claimed:
        subject.rule.build_depth()
        return
    scene = subject.scene(weights=False)
    (pruner,) = subject.rule.build()
    for name in subject.names:
        with torch.device("meta"):  # as the planner calls it
            statistic, again = (pruner.observe(scene.block, name) for _ in range(2))
        fresh: Any = statistic is not again
        told = f"observe({name!r}) must return a fresh Statistic each time, or None, got {type(statistic).__name__}"
        expect(statistic is None or (fresh and isinstance(statistic, Statistic)), told)


def _deciding(*scenes: Mapping[str, Any], on: Callable[[Subject], Sequence[Claim]] = lambda x: x.different) -> Check:
    """Make a check that decides on scenes, given by their arguments; the host refuses what breaks the contract."""

    def check(subject: Subject) -> None:
        for given in scenes:
            scene = subject.scene(**given)
            stats = subject.statistics(scene)
            for claim in on(subject):
                subject.decided(scene, claim, stats)

    return check


def _silence(model: Any) -> None:
    """Silence features of Llama's norms, which query, key, value, gate and up read."""
    if model.config.model_type != "llama":
        raise NoSuchPromiseError("only Llama's norms are silenced")
    for norm in (model.model.layers[0].input_layernorm, model.model.layers[0].post_attention_layernorm):
        norm.weight[:7] = 0.0


def _zero_rows(model: Any) -> None:
    """Zero the first rows of every linear: pruned models have such rows, and the next linear then reads zeros."""
    for linear in architecture_of(model).linears.values():
        linear.weight[:7] = 0.0


def _dense(subject: Subject) -> None:
    """Ask for no zeros."""
    claims: list[Claim] = [Unstructured(0.0, group) for group in subject.spec.groups]
    claims += [NM(4, 4)] if subject.spec.nm else []
    claims += [Whole(claim.unit, 0.0) for claim in subject.different if isinstance(claim, Whole)]
    scene = subject.scene()
    for claim in claims:
        for name, result in subject.decided(scene, claim).items():
            linear = scene.block.linears[name]
            expect(bool(result.keep.all()), f"{name}, {claim}: a weight is dropped")
            for what, new in (("weight", result.weight), ("bias", result.bias)):
                old: Tensor | None = getattr(linear, what)
                same = new is None or old is None or torch.equal(new.to(old.dtype), old)
                expect(same, f"{name}, {claim}: the {what} is changed though all weights are kept")


@score_pruner("largest")
def _largest(weight: Tensor) -> Tensor:
    """Select the largest weights: what a reconstructing pruner is given a mask by."""
    return weight.abs()


def _reconstructs(subject: Subject) -> None:
    """Give masks that another pruner selected; the host refuses another mask than it gave."""
    if not subject.spec.reconstructs:
        raise NoSuchPromiseError("it does not say reconstructs")
    rule = PlannedRule(0, ((_largest()[0], NoOptions()), *subject.rule.pruners))
    scene = subject.scene()
    block = subject.scene(weights=False).block
    claims: list[Claim] = [Unstructured(0.5, "row"), Unstructured(0.5, "layer")]
    claims += [whole for unit in IN_BLOCKS if subject.why_not(block, whole := Whole(unit, 0.5)) is None]
    for claim in claims:
        asked = {*subject.by_linear(block, claim)}
        if asked and asked <= {*subject.names}:  # else it prunes whole units only, or was not asked about all of them
            results = subject.decided(scene, claim, rule=rule)
            solved = any(r.weight is not None for r in results.values())
            expect(solved, "it says reconstructs, and returns no new weights")


_DRAWS = 5
_CHANCE = 1.25
"""Number of random masks; times their mean divergence that is no chance: of weights one has 1.13, wrong signs 1.4."""


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
        answers = [subject.decided(scene, claim)]
        for _ in range(_DRAWS):
            scores = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
            answers.append({name: PruneResult(keep) for name, keep in keep_masks(scores, asked).items()})
        mine, *random = (_divergence(scene, answer) for answer in answers)
        chance = math.fsum(random) / _DRAWS
        expect(
            mine <= _CHANCE * chance,
            f"{claim}: the model's predictions diverge {mine / chance:.3g} times as far as with random masks: is the "
            "sign of its scores flipped? Only a pruner that is random on purpose may fail here",
        )


def _divergence(scene: Scene, answer: Mapping[str, PruneResult]) -> float:
    """Return how far predictions diverge a tenth of the way to an answer: Kullback-Leibler, the mean over tokens."""
    linears = {name: scene.block.linears[name] for name in answer}
    dense = scene.model(tiny_tokens()).logits.double().log_softmax(-1)
    with restored(linears.values()) as tensors:
        before = [x.clone() for x in tensors]
        for name, linear in linears.items():
            write(linear, answer[name])
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old.lerp(tensor, 0.1))
        pruned = scene.model(tiny_tokens()).logits.double().log_softmax(-1)
    return float((dense.exp() * (dense - pruned)).sum(-1).mean())


SAME = 0.98
"""Fraction of mask bits that may not change with the order of sums: near ties change sides, nothing else does."""

CLOSE = 0.02
"""How far apart new weights may be in rows with the same mask, relative to their norm: rounding moves a thousandth."""


def _deterministic(subject: Subject) -> None:
    """Run twice, with other global seeds."""
    for claim in subject.few:
        runs = []
        for seed in (0, 1):
            with seeded(seed):
                runs.append(subject.decided(subject.scene(), claim))
        _expect_equal(runs[0], runs[1], f"{claim}: two runs of one recipe, with other global seeds,")


def _repeatable(subject: Subject) -> None:
    """Ask for other sparsities in between, and compare what pruners only read, bit for bit."""
    scene = subject.scene()
    stats = subject.statistics(scene)

    def contents() -> dict[str, Tensor]:
        found = {f"block.sensitivities[{name!r}]": tensor for name, tensor in scene.block.sensitivities.items()}
        for name, of in stats.items():
            for statistic in (x.statistic for x in of.values()):
                held = {**getattr(statistic, "__dict__", {}), **{n: x for n, (x, _) in statistic.tensors().items()}}
                found |= {f"{n} of the statistic of {name}": x for n, x in held.items() if isinstance(x, Tensor)}
        return found

    before = {what: tensor.clone() for what, tensor in contents().items()}
    first = {claim: subject.decided(scene, claim, stats) for claim in subject.few}
    for claim, results in first.items():
        again = subject.decided(scene, claim, stats)
        _expect_equal(results, again, "asked again with the same statistics, as allocation does, it")
    changed = [what for what, tensor in contents().items() if not torch.equal(tensor, before.get(what, tensor))]
    expect(
        not changed,
        f"prune changed {', '.join(changed)}; other linears and an allocation's next question read it, so compute on a "
        "copy: `x * 2`, not `x.mul_(2)`",
    )


def _prepared(subject: Subject) -> None:
    """Decide with values that were prepared once, as allocation does."""
    scene = subject.scene()
    if not subject.claimed or not isinstance(scene.pruners(subject.rule)[0], PreparingPruner):
        raise NoSuchPromiseError("it prepares nothing")
    stats = subject.statistics(scene)
    fresh = {claim: subject.decided(scene, claim, stats) for claim in subject.few}
    values: PreparedValues = {}
    for claim in (*fresh, *fresh):
        again = subject.decided(scene, claim, stats, kept=values)
        _expect_equal(fresh[claim], again, f"{claim}: with what it had prepared it")


def _batches(subject: Subject) -> None:
    """Gather the same tokens in batches of other sizes."""
    tokens = tiny_tokens()
    tokens[-1] = 7  # one sequence is nothing like the others, so that its weight shows

    def answers(batches: tuple[int, ...]) -> dict[Claim, Mapping[str, PruneResult]]:
        scene = subject.scene(batches=batches, tokens=tokens)
        stats = subject.statistics(scene)
        return {claim: subject.decided(scene, claim, stats) for claim in subject.different}

    whole = answers((8,))
    for batches in ((7, 1), (1,) * 8):
        for claim, results in answers(batches).items():
            _expect_alike(whole[claim], results, f"batches of {batches}")


@dataclass(frozen=True)
class _TwoProcesses(Ranks):
    """This process, beside one whose tensors of a statistic are at hand in the order in which they are asked for."""

    theirs: Iterator[Tensor] = field(default_factory=lambda: iter(()))

    def all_reduce_(self, tensor: Tensor, operation: Literal["sum", "max"] = "sum") -> None:
        other = next(self.theirs)
        tensor.copy_(tensor + other if operation == "sum" else torch.maximum(tensor, other))

    def all_gather(self, value: Any) -> list[Any]:
        return [value, next(self.theirs)]


def _processes(subject: Subject) -> None:
    """Gather two halves apart and combine them, as two processes do."""
    scene = subject.scene(batches=(4, 4))
    whole = subject.statistics(scene)
    mine, theirs = (
        subject.statistics(
            Scene(scene.model, replace(scene.block, calls=scene.block.calls[i : i + 1]), scene.passes[i : i + 1])
        )
        for i in (0, 1)
    )
    merged: dict[SharedStatistic, SharedStatistic] = {}
    for name, stats in mine.items():
        for role, one in stats.items():
            if one not in merged:
                other = sorted(theirs[name][role].statistic.tensors().values(), key=lambda x: x[1] == "cat")
                merged[one] = combined(_TwoProcesses(theirs=(tensor for tensor, _ in other)), one)
    both: Stats = {name: {role: merged[one] for role, one in stats.items()} for name, stats in mine.items()}
    for claim in subject.different:
        added = subject.decided(scene, claim, both)
        _expect_alike(subject.decided(scene, claim, whole), added, "statistics of two processes, added up,")


def _separable(subject: Subject) -> None:
    """Decide each linear alone, after all others were written."""
    apart = [p for p in subject.patterns if isinstance(p, NM) or (isinstance(p, Unstructured) and not p.joint)]
    if not subject.spec.separable or not apart:
        raise NoSuchPromiseError("it does not say separable, or all that it prunes competes over several linears")
    scene = subject.scene()
    stats = subject.statistics(scene)
    for claim in dict.fromkeys((apart[0], apart[-1])):
        together = subject.decided(scene, claim, stats)
        for name in together:
            with torch.no_grad(), restored(scene.block.linears[n] for n in together if n != name):
                for other in together.keys() - {name}:  # in a run these may be pruned already
                    write(scene.block.linears[other], together[other])
                alone = subject.decided(scene, claim, stats, names=[name])
            _expect_equal({name: together[name]}, alone, f"{claim}: decided after the others it")


def _parts(result: PruneResult) -> dict[str, Tensor]:
    """Return what a result says: its mask, and if there are any its kept weights and its bias."""
    weights = None if result.weight is None else result.weight[result.keep]
    parts = {"mask": result.keep, "weight": weights, "bias": result.bias}
    return {what: x for what, x in parts.items() if x is not None}


def _expect_equal(a: Mapping[str, PruneResult], b: Mapping[str, PruneResult], what: str) -> None:
    for name, result in a.items():
        one, other = _parts(result), _parts(b[name])
        expect(one.keys() == other.keys(), f"{name}: {what} gave {', '.join(other)}, not {', '.join(one)}")
        for part, x in one.items():
            expect(torch.equal(x, other[part]), f"{name}: {what} gave another {part}")


def _expect_alike(a: Mapping[str, PruneResult], b: Mapping[str, PruneResult], what: str) -> None:
    advice = "a statistic has to be a sum, a maximum or a list over tokens, not an average of batches"
    for name, mine in a.items():
        same, moved = float((mine.keep == b[name].keep).float().mean()), _relative_distance(mine, b[name])
        masks = f"a mask of which {same:.1%} is the same, expected {SAME:.0%} at least"
        weights = f"new weights that are {moved:.1%} apart, expected {CLOSE:.0%} at most"
        expect(same >= SAME and moved <= CLOSE, f"{name}: {what} gave {masks}, and {weights}; {advice}")


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
    stats = subject.statistics(scene)
    for claim in subject.different:
        subject.decided(scene, claim, stats)
    before.expect_same()


PRUNER_CHECKS: Mapping[str, Check] = {
    "plans without weights": _plans,
    "exact sparsity for every pattern": _deciding({}, on=lambda subject: subject.patterns),
    "sparsity zero changes nothing": _dense,
    "bfloat16 and float16": _deciding({"dtype": torch.bfloat16}, {"dtype": torch.float16}),
    "matmuls narrower than the weights": _deciding({"matmul_dtype": torch.bfloat16}),
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
    "few tokens": _deciding({"batches": (1,), "tokens": tiny_tokens(sequences=1, length=12)}),
    "inputs that are always zero": _deciding({"change": _silence}),
    "rows that are all zero": _deciding({"change": _zero_rows}),
}
"""By name; each raises when a pruner breaks what it promises."""
