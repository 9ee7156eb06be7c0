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
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
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


def ours(name: str, weights: Pair, x: Tensor, patterns: tuple[Pattern, Pattern]) -> tuple[Pair, Pair]:
    return getattr(baselines, name)(weights, InputStatistics(x), Budget(*patterns))


def given_masks() -> tuple[FixedMask, FixedMask]:
    generator = torch.Generator().manual_seed(2)
    query, key = (FixedMask(torch.rand(n, WIDTH, generator=generator) < 0.4, ROW_PATTERNS[0]) for n in OUT)
    return query, key


@pytest.mark.parametrize(
    ("name", "patterns"),
    [*(("wanda", (p, p)) for p in ROW_PATTERNS), *(("sparsegpt", p) for p in (
        (Unstructured(0.33, "row"),) * 2, (Unstructured(0.9, "row"),) * 2, (NM(2, 4), NM(2, 4)), (NM(1, 4), NM(3, 4)),
        given_masks()))],
    ids=str,
)  # fmt: skip
def test_masks_and_updates_are_the_hosts_where_rows_or_groups_have_their_own_budget(
    name: str, patterns: Any, x: Tensor, weights: Pair
):
    theirs = prune(hosts(name), weights, x, patterns)
    for host, keep, weight, dense in zip(theirs, *ours(name, weights, x, patterns), weights, strict=True):
        assert torch.equal(keep, host.keep)
        assert not weight[~keep].any()
        expected = dense * keep if host.weight is None else host.weight
        torch.testing.assert_close(weight, expected, **({"rtol": 0, "atol": 0} if name == "wanda" else CLOSE))


def test_rows_of_one_weight_are_pruned_as_the_hosts_sparsegpt_prunes_a_layer(x: Tensor, weights: Pair):
    patterns = (Unstructured(0.6, "layer"),) * 2
    for host, weight in zip(prune(hosts("sparsegpt"), weights, x, patterns), weights, strict=True):
        keep, updated = baselines.sparsegpt_rows(weight, InputStatistics(x), patterns[0])
        assert torch.equal(keep, host.keep)
        torch.testing.assert_close(updated, host.weight, **CLOSE)


@pytest.mark.parametrize("name", ["wanda", "sparsegpt"])
def test_features_that_never_fire_are_dropped_first_as_by_the_hosts_pruners(name: str, x: Tensor, weights: Pair):
    x[..., 5::20] = 0.0
    patterns = (Unstructured(0.25, "row"),) * 2
    theirs = prune(hosts(name), weights, x, patterns)
    for host, keep in zip(theirs, ours(name, weights, x, patterns)[0], strict=True):
        assert not keep[:, 5::20].any()
        assert torch.equal(keep, host.keep)


@pytest.mark.parametrize(
    ("name", "pattern"), list(zip(["wanda", "sparsegpt", "sparsegpt"], WIDE_PATTERNS, strict=True)), ids=str
)
def test_wider_budgets_are_exact_to_the_weight_and_only_what_rounding_leaves_unbalances_the_rows(
    name: str, pattern: Unstructured, x: Tensor, weights: Pair
):
    """37% of 160 are 59.2: rows drop 59, and what is missing then is taken from those with the lowest scores."""
    keeps, pruned = ours(name, weights, x, (pattern, pattern))
    dropped = [int((~k).sum()) for k in keeps]
    if pattern.group == "joint":
        assert sum(dropped) == round(pattern.sparsity * WIDTH * sum(OUT))
    else:
        assert dropped == [round(pattern.sparsity * WIDTH * n) for n in OUT]
    by_row, each = torch.cat([(~k).sum(dim=1) for k in keeps]), round(pattern.sparsity * WIDTH)
    assert (by_row - each).abs().sum() == abs(sum(dropped) - each * sum(OUT)) > 0
    assert all(not w[~k].any() for w, k in zip(pruned, keeps, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_feature_norms_are_those_of_all_sequences_in_any_dtype(dtype: torch.dtype, x: Tensor):
    got = InputStatistics(x.to(dtype)).norms
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, x.to(dtype).double().flatten(0, 1).norm(dim=0), rtol=1e-6, atol=0)
