"""Wanda and SparseGPT beside attention pruning, against the host's own pruners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compressx.built_in import BUILT_IN
from torch import Tensor, nn

from compressx import NM, Block, FixedMask, Linear, Pattern, Pruner, PruneResult, Unstructured
from compressx.blocks.contract import answer_of
from compressx.blocks.observe import SharedStatistic
from compressx_attnprune import baselines
from compressx_attnprune.attention import Pair
from compressx_attnprune.baselines import Budget, InputStatistics

WIDTH = 160  # more than one column block of the sweep
OUT = (24, 12)
ROW_PATTERNS = [Unstructured(0.5, "row"), Unstructured(0.33, "row"), NM(2, 4)]
WIDE_PATTERNS = [Unstructured(0.37, "joint"), Unstructured(0.81, "joint"), Unstructured(0.37, "layer")]


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return torch.randn(6, 50, WIDTH, generator=generator) @ mixed * torch.linspace(0.3, 2.0, WIDTH)


@pytest.fixture
def weights() -> Pair:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(OUT[0], WIDTH, generator=generator), 0.4 * torch.randn(OUT[1], WIDTH, generator=generator)


def hosts(name: str) -> Pruner:
    return BUILT_IN[name].build(BUILT_IN[name].options())


def prune(pruner: Pruner, weights: Pair, x: Tensor, patterns: tuple[Pattern, Pattern]) -> list[PruneResult]:
    """Let one of the host's pruners prune both weights as linears of a block."""
    linears = {}
    for name, weight in zip(("q", "k"), weights, strict=True):
        module = nn.Linear(WIDTH, len(weight), bias=False)
        module.weight = nn.Parameter(weight.clone())
        linears[name] = Linear(name, module)
    block = Block(0, "", nn.Module(), linears, (), None)
    observed = SharedStatistic(pruner.observe(block, "q"))
    for batch in x.split(2):
        observed.statistic.update(batch)
    asked = dict(zip(linears, patterns, strict=True))
    results = answer_of("host", pruner, block, asked, dict.fromkeys(linears, observed))
    return [results[name] for name in linears]


@pytest.mark.parametrize("pattern", ROW_PATTERNS, ids=str)
def test_wanda_is_the_hosts_where_rows_or_groups_have_their_own_budget(pattern: Pattern, x: Tensor, weights: Pair):
    keeps, pruned = baselines.wanda(weights, InputStatistics(x), Budget(pattern, pattern))
    for host, keep, weight, dense in zip(
        prune(hosts("wanda"), weights, x, (pattern, pattern)), keeps, pruned, weights, strict=True
    ):
        assert torch.equal(keep, host.keep)
        assert torch.equal(weight, dense * keep)


def given_masks() -> tuple[FixedMask, FixedMask]:
    generator = torch.Generator().manual_seed(2)
    query, key = (FixedMask(torch.rand(n, WIDTH, generator=generator) < 0.4, ROW_PATTERNS[0]) for n in OUT)
    return query, key


def like_sparsegpt(weights: Pair, x: Tensor, patterns: tuple[Pattern, Pattern]) -> tuple[Pair, Pair]:
    """Prune both weights by whichever of our functions is for the patterns."""
    if isinstance(patterns[0], Unstructured) and patterns[0].group == "layer":
        by_weight = [baselines.sparsegpt_rows(w, InputStatistics(x), p) for w, p in zip(weights, patterns, strict=True)]
        return tuple(zip(*by_weight, strict=True))
    return baselines.sparsegpt(weights, InputStatistics(x), Budget(*patterns))


@pytest.mark.parametrize(
    "patterns",
    [(Unstructured(0.33, "row"),) * 2, (Unstructured(0.9, "row"),) * 2, (Unstructured(0.6, "layer"),) * 2,
     (NM(2, 4), NM(2, 4)), (NM(1, 4), NM(3, 4)), given_masks()],
    ids=str,
)  # fmt: skip
def test_sparsegpt_chooses_and_updates_as_the_hosts_does(patterns: Any, x: Tensor, weights: Pair):
    keeps, pruned = like_sparsegpt(weights, x, patterns)
    theirs = prune(hosts("sparsegpt"), weights, x, patterns)
    for host, keep, weight in zip(theirs, keeps, pruned, strict=True):
        assert torch.equal(keep, host.keep)
        assert not weight[~keep].any()
        torch.testing.assert_close(weight, host.weight, rtol=1e-4, atol=1e-4)


def test_features_that_never_fire_are_dropped_first_as_by_the_hosts_pruners(x: Tensor, weights: Pair):
    x[..., 5::20] = 0.0
    pattern = Unstructured(0.25, "row")
    for keeps, host in (
        (
            baselines.wanda(weights, InputStatistics(x), Budget(pattern, pattern))[0],
            prune(hosts("wanda"), weights, x, (pattern, pattern)),
        ),
        (
            baselines.sparsegpt(weights, InputStatistics(x), Budget(pattern, pattern))[0],
            prune(hosts("sparsegpt"), weights, x, (pattern, pattern)),
        ),
    ):
        for keep, result in zip(keeps, host, strict=True):
            assert not keep[:, 5::20].any()
            assert torch.equal(keep, result.keep)
    assert not baselines.sparsegpt_rows(weights[0], InputStatistics(x), pattern)[0][:, 5::20].any()


METHODS = {
    "wanda": lambda w, x, pattern: baselines.wanda(w, InputStatistics(x), Budget(pattern, pattern)),
    "sparsegpt": lambda w, x, pattern: baselines.sparsegpt(w, InputStatistics(x), Budget(pattern, pattern)),
}


@pytest.mark.parametrize(
    ("method", "pattern"), list(zip([*METHODS.values(), METHODS["sparsegpt"]], WIDE_PATTERNS, strict=True))
)
def test_wider_budgets_are_exact_to_the_weight_and_only_what_rounding_leaves_unbalances_the_rows(
    method, pattern, x: Tensor, weights: Pair
):
    """37% of 160 are 59.2: rows drop 59, and what is missing then is taken from those with the lowest scores."""
    keeps, pruned = method(weights, x, pattern)
    dropped = [int((~k).sum()) for k in keeps]
    if pattern.group == "joint":
        assert sum(dropped) == round(pattern.sparsity * WIDTH * sum(OUT))
    else:
        assert dropped == [round(pattern.sparsity * WIDTH * n) for n in OUT]
    by_row, each = torch.cat([(~k).sum(dim=1) for k in keeps]), round(pattern.sparsity * WIDTH)
    assert (by_row - each).abs().sum() == abs(sum(dropped) - each * sum(OUT)) > 0
    assert all(not w[~k].any() for w, k in zip(pruned, keeps, strict=True))


def test_feature_norms_are_those_of_all_sequences_in_any_dtype(x: Tensor):
    expected = x.double().flatten(0, 1).norm(dim=0)
    got = InputStatistics(x).norms
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    halves = x.bfloat16()
    torch.testing.assert_close(
        InputStatistics(halves).norms, halves.double().flatten(0, 1).norm(dim=0), rtol=1e-6, atol=0
    )
