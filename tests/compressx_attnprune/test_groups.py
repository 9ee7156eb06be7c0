"""Which groups go and what the output projection becomes, against trying every set on the tokens themselves."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.pruning import SEQUENCES, SPEC, asked, observed
from torch import Tensor

from compressx import FixedMask, Pattern, PruneResult, Structured, find_units
from compressx.blocks.contract import _check_form, check_numbers
from compressx.blocks.observe import Observed
from compressx.blocks.select import write
from compressx.numerics.obs import NotPositiveDefiniteError
from compressx_attnprune import groups, layer, training
from compressx_attnprune.groups import Moments, solve

TOKENS, OUTPUTS = 400, 9
each_bias = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "a bias"])
LLAMA = "llama-mha"
"""Four groups; the others have two."""


# --- the choice


def drawn(groups_: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw W and mixed values of groups that are alike in parts, with means, in float64."""
    generator = torch.Generator().manual_seed(seed)
    m = torch.randn(TOKENS, groups_ * size, generator=generator, dtype=torch.float64)
    mixing = torch.randn(groups_ * size, groups_ * size, generator=generator, dtype=torch.float64)
    w = torch.randn(OUTPUTS, groups_ * size, generator=generator, dtype=torch.float64)
    return w, m @ mixing + torch.randn(groups_ * size, generator=generator, dtype=torch.float64)


def lost(w: Tensor, m: Tensor, gone: tuple[int, ...], size: int, damping: float, bias: bool) -> float:
    """Solve without some groups by lstsq, and return the damped error; a lost column is damped like the others."""
    a = m - bias * m.mean(dim=0)
    kept = [j for j in range(m.shape[1]) if j // size not in gone]
    pull = torch.diag((damping * a.square().sum(dim=0)).sqrt())
    left = torch.cat([a, pull])[:, kept]
    right = torch.cat([a, pull]) @ w.T
    return float((left @ torch.linalg.lstsq(left, right).solution - right).square().sum())


@each_bias
@pytest.mark.parametrize("most", [groups.MOST_SETS, 1], ids=["every set", "one after the other"])
@pytest.mark.parametrize("dropped", [1, 2, 3])
def test_the_groups_that_go_are_those_missed_least_after_the_others_were_solved_for(dropped, most, bias, monkeypatch):
    monkeypatch.setattr(groups, "MOST_SETS", most)
    count, size, differ = 5, 3, 0
    for seed in range(8):
        w, m = drawn(count, size, seed)
        keep = groups.choose(Moments.dense([m], w), w, count, dropped, 0.1, bias=bias)
        if most > 1:
            sets = itertools.combinations(range(count), dropped)
            best = min(sets, key=lambda gone: lost(w, m, gone, size, 0.1, bias))
        else:
            best = ()
            for _ in range(dropped):
                more = [tuple(sorted((*best, g))) for g in range(count) if g not in best]
                best = min(more, key=lambda gone: lost(w, m, gone, size, 0.1, bias))
        assert tuple((~keep).nonzero().view(-1).tolist()) == best
        cheapest = w.square().view(OUTPUTS, count, size).sum(dim=(0, 2))
        differ += set(cheapest.argsort()[:dropped].tolist()) != set(best)
    assert differ  # than by magnitude


def test_what_is_never_mixed_goes_first_however_large_its_weights():
    w, m = drawn(4, 3)
    m[:, 3:6] = 0.0
    w[:, 3:6] = 1e6
    assert groups.choose(Moments.dense([m], w), w, 4, 1, 0.1, bias=False).tolist() == [True, False, True, True]


# --- a layer, inside its model


def record(architecture: str, **how: Any) -> blocks.Recorded:
    """Record a block whose second half of groups is much like the first, so that others can make up for one."""
    recorded = blocks.record(architecture, sequences=SEQUENCES, **how)
    found = layer.find_projections(recorded.block)
    generator = torch.Generator().manual_seed(0)
    for rows in (found.query, found.key, found.value):
        at = torch.arange(rows.linear.out_features) if rows.index is None else rows.index
        first, second = at.chunk(2)
        noise = torch.randn(len(second), rows.linear.in_features, generator=generator)
        rows.linear.weight[second] = rows.linear.weight[first] + 0.05 * noise
    return recorded


def structured(recorded: blocks.Recorded, sparsity: float = 0.5) -> dict[str, Pattern]:
    (units,) = find_units("kv-groups", recorded.block)
    return dict.fromkeys(units.owners, Structured("kv-groups", sparsity, units))


def stats_of(recorded: blocks.Recorded, pruner: Any) -> dict[str, Observed]:
    """Let queries, keys and values share one sample, and give the output projection none, as it asks for."""
    found = layer.find_projections(recorded.block)
    assert pruner.observe(recorded.block, found.output.name) is None
    stats = observed(recorded, pruner)
    return {**stats, found.value.name: stats[found.query.name]}


def prune(recorded: blocks.Recorded, patterns: dict[str, Pattern] | None = None, **options: Any) -> Any:
    pruner = SPEC.build(SPEC.options(**options))
    patterns = patterns or structured(recorded)
    layer.check(recorded.block, patterns)
    results = asked(pruner, recorded.block, patterns, stats_of(recorded, pruner))
    for name, result in results.items():
        _check_form("attnprune", recorded.block.linears[name], result)
    check_numbers("attnprune", recorded.block, patterns, results)
    return results


def attend(recorded: blocks.Recorded, results: dict[str, PruneResult], x: Tensor) -> Tensor:
    """Run the model's attention with what the host would write, less its output's dense bias."""
    block = replace(recorded.block, module=copy.deepcopy(recorded.block.module))
    block = replace(block, linears={
        n: replace(x, module=block.submodule(n)) for n, x in recorded.block.linears.items() if x.expert is None
    })  # fmt: skip
    for name, result in results.items():
        write(block.linears[name], result)
    found = layer.find_projections(block)
    with torch.no_grad():
        outputs = torch.cat([layer.attend(block, found, layer.arguments(block), one[None]) for one in x])
    bias = recorded.block.linears[found.output.name].bias
    return outputs if bias is None else outputs - bias


def error_of(recorded: blocks.Recorded, results: dict[str, PruneResult], x: Tensor) -> float:
    dense = attend(recorded, {}, x)
    return float((attend(recorded, results, x) - dense).square().sum() / dense.square().sum())


ONE_GROUP = ("llama-mqa", "gemma3", "falcon", "bigcode-multi-query")
SEVERAL = [a for a in (*blocks.EVERY, "mixtral") if a not in ONE_GROUP]


@pytest.mark.parametrize("refit", [0, 4])
@pytest.mark.parametrize("architecture", SEVERAL)
def test_the_error_that_is_told_is_that_of_the_models_own_attention_after_writing(architecture: str, refit: int):
    recorded = record(architecture)
    results = prune(recorded, refit=refit)
    info = next(iter(results.values())).info
    held_out = recorded.x[-2:]
    assert info["output_error"] == pytest.approx(error_of(recorded, results, held_out), rel=1e-3)
    assert info["output_error"] < info["output_error.cut"]
    cut = {n: PruneResult(r.keep) for n, r in results.items()}
    if recorded.block.linears[layer.find_projections(recorded.block).output.name].bias is None:
        assert info["output_error.cut"] == pytest.approx(error_of(recorded, cut, held_out), rel=1e-3)
    else:  # the mean of what is lost is in the bias
        assert info["output_error.cut"] < error_of(recorded, cut, held_out)


@pytest.mark.parametrize("architecture", ["gpt2", "phi3", "mixtral", LLAMA])
def test_queries_keys_and_values_that_stay_are_left_alone_without_a_refit(architecture: str):
    recorded = record(architecture)
    output = layer.find_projections(recorded.block).output.name
    for name, result in prune(recorded).items():
        weight = recorded.block.linears[name].weight
        assert torch.equal(result.weight, weight * result.keep) == (name != output)
        assert result.bias is None or name == output


def test_a_refit_lowers_the_error_and_shows_its_losses_or_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    recorded = record(LLAMA)
    dense = prune(recorded)
    plain, refit = (next(iter(results.values())) for results in (dense, prune(recorded, refit=30)))
    assert torch.equal(plain.keep, refit.keep)
    assert refit.info["output_error"] < 0.95 * plain.info["output_error"]
    assert refit.info["output_error.cut"] == plain.info["output_error.cut"]
    assert len(refit.history["refit"]) == 30
    assert not plain.history
    monkeypatch.setattr(training.Descent, "step", lambda self, _: [w.mul_(-1.0) for w in self.weights])
    for name, result in prune(recorded, refit=1).items():
        assert torch.equal(result.weight, dense[name].weight)
        assert result.info == dense[name].info


def test_nothing_to_prune_is_bit_identical():
    recorded = record("gpt2")
    for name, result in prune(recorded, structured(recorded, 0.0)).items():
        linear = recorded.block.linears[name]
        assert torch.equal(result.weight, linear.weight)
        assert result.bias is None or torch.equal(result.bias, linear.bias)
        assert result.info["output_error"] == 0.0


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_given_groups_are_kept_and_the_rest_is_solved_for(architecture: str):
    recorded = record(architecture)
    patterns = structured(recorded)
    own = prune(recorded)
    units = next(iter(patterns.values())).units
    shapes = {n: (x.out_features, x.in_features) for n, x in recorded.block.linears.items()}
    other = units.masks(~units.kept({n: r.keep for n, r in own.items()}), shapes)
    given: dict[str, Pattern] = {n: FixedMask(other[n], patterns[n]) for n in patterns}
    results = prune(recorded, given)
    assert all(torch.equal(results[n].keep, other[n]) for n in patterns)
    info = next(iter(results.values())).info
    assert info["output_error"] == pytest.approx(error_of(recorded, results, recorded.x[-2:]), rel=1e-3)
    assert info["output_error"] < info["output_error.cut"]


# --- what held-out text decides


def a_layer(recorded: blocks.Recorded, train: int) -> groups.GroupedLayer:
    found = layer.find_projections(recorded.block)
    mixing = groups.Mixing(layer.describe(recorded.block), found.value.bias)
    text = training.Text(recorded.x[:train], recorded.x[-4:])
    dense = (found.query.weight, found.key.weight, found.value.weight)
    return groups.GroupedLayer(mixing, text, dense, found.output.weight, found.output.bias is not None)


@pytest.mark.parametrize(("architecture", "count"), [("llama", 2), ("gpt2", 4)])
def test_the_damping_is_the_best_on_the_held_out_text_or_the_one_that_is_asked_for(architecture: str, count: int):
    recorded = record(architecture)
    of = a_layer(recorded, 3)
    single = {d: groups.remove_groups(of, count, 1, dampings=(d,)) for d in groups.DAMPINGS}
    best = groups.remove_groups(of, count, 1)
    assert best.error == min(s.error for s in single.values())
    assert best.error == single[best.damping].error
    assert len({s.error for s in single.values()}) == 4
    assert next(iter(prune(recorded, damping=0.7).values())).info["damping"] == 0.7


def test_weights_stay_as_they_are_where_solving_for_them_does_harm():
    recorded = blocks.record("llama", sequences=SEQUENCES)  # random groups know nothing of one another
    little = a_layer(recorded, 1)
    solution = groups.remove_groups(little, 2, 1, dampings=(1e-5,))
    assert solution.damping == math.inf
    assert solution.error == solution.cut
    columns = groups.spread(solution.keep, 64)
    assert torch.equal(solution.output, little.output * columns)
    train, held_out = little.moments()
    assert held_out.error(*solve(train, little.output, columns, 1e-5, bias=False)) > solution.error


@pytest.mark.parametrize("chosen", [1, torch.tensor([True, False])], ids=["to be chosen", "given"])
def test_second_moments_without_a_factor_say_what_to_do(chosen: int | Tensor, monkeypatch: pytest.MonkeyPatch):
    of = a_layer(record("llama"), 3)
    train, held_out = of.moments()
    monkeypatch.setattr(groups.GroupedLayer, "moments", lambda *_: (replace(train, mixed=-train.mixed), held_out))
    with pytest.raises(NotPositiveDefiniteError, match=r"no Cholesky factor with damping 0.001; use a larger damping"):
        groups.remove_groups(of, 2, chosen, dampings=(1e-3,))


# --- refusals


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [("kv-groups", {"mode": "mask"}, r"mode: mask has no effect on kv-groups, .*; leave mode out"),
     ("kv-groups", {"objective": "attention-matrix"},
      r"objective: attention-matrix has no effect on kv-groups, .*; leave obj"),
     ("neurons", {}, "this rule's units are neurons; of units it takes kv-groups")],
)  # fmt: skip
def test_other_units_and_options_without_effect_on_groups_are_refused_before_weights_are_loaded(kind, options, message):
    block = blocks.skeleton("llama")
    (units,) = find_units(kind, block)
    patterns: dict[str, Pattern] = dict.fromkeys(units.owners, Structured(kind, 0.5, units))
    assert SPEC.check is not None
    if kind == "kv-groups":
        SPEC.check(block, patterns, SPEC.options())
    with pytest.raises(layer.RecipeError, match=message):
        SPEC.check(block, patterns, SPEC.options(**options))
