"""The built-in pruners against each other's limits, on one linear with correlated inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compressx import Block, Linear, UnsupportedModelError
from compressx.patterns import NM, FixedMask, Unstructured, zeros_in
from compressx.pruners import magnitude, sparsegpt, wanda

SPECS = {s.name: s for m in (magnitude, wanda, sparsegpt) for s in m.compressx_pruners()}


def one_linear(rows: int = 24, columns: int = 48, seed: int = 0, **names: tuple[int, int]) -> Block:
    generator = torch.Generator().manual_seed(seed)
    shapes = names or {"fc": (rows, columns)}
    modules = {n: nn.Linear(s[1], s[0]) for n, s in shapes.items()}
    for module in modules.values():
        with torch.no_grad():
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
    return Block(0, "block", nn.ModuleDict(modules), {n: Linear(n, m) for n, m in modules.items()}, (), None)


def correlated_inputs(columns: int = 48, tokens: int = 600, seed: int = 1) -> torch.Tensor:
    """Few directions carry most of the variance and features differ in scale: [1, tokens, columns]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, columns // 4, generator=generator)
    mix = torch.randn(columns // 4, columns, generator=generator)
    scale = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    return ((hidden @ mix + 0.3 * torch.randn(tokens, columns, generator=generator)) * scale)[None]


def prune(name: str, block: Block, pattern, x: torch.Tensor, **options):
    spec = SPECS[name]
    pruner = spec.build(spec.options(**options))
    stats = {}
    for linear in block.linears:
        statistic = pruner.observe(block, linear)
        if statistic is not None:
            for part in x.split(1):
                statistic.update(part)
            stats[linear] = statistic
    patterns = pattern if isinstance(pattern, dict) else dict.fromkeys(block.linears, pattern)
    return pruner.prune(block, patterns, stats)


def output_error(block: Block, result, x: torch.Tensor, name: str = "fc") -> float:
    weight = block.linears[name].weight
    new = torch.where(result.keep, weight if result.weight is None else result.weight.to(weight.dtype), 0.0)
    y = x @ weight.T
    return float((x @ new.T - y).square().sum() / y.square().sum())


@pytest.mark.parametrize("pattern", [Unstructured(0.5, "row"), Unstructured(0.7, "layer"), NM(2, 4)], ids=str)
def test_on_correlated_inputs_sparsegpt_is_below_wanda_and_wanda_below_magnitude(pattern):
    block, x = one_linear(), correlated_inputs()
    error = {name: output_error(block, prune(name, block, pattern, x)["fc"], x) for name in SPECS}
    assert error["sparsegpt"] < 0.7 * error["wanda"]
    assert error["wanda"] < error["magnitude"]


def test_with_equal_norms_wanda_is_magnitude_pruning():
    block = one_linear()
    x = torch.ones(1, 5, 48)
    masks = [prune(n, block, Unstructured(0.5, "row"), x)["fc"].keep for n in ("wanda", "magnitude")]
    assert torch.equal(*masks)


def test_with_independent_inputs_sparsegpt_chooses_as_wanda_and_updates_nothing():
    block = one_linear()
    x = torch.diag(torch.logspace(-1, 1, 48))[None]  # X^T X is diagonal
    pattern = Unstructured(0.5, "row")
    second_order = prune("sparsegpt", block, pattern, x, damping=1e-7)["fc"]
    assert torch.equal(second_order.keep, prune("wanda", block, pattern, x)["fc"].keep)
    kept = second_order.keep
    torch.testing.assert_close(second_order.weight[kept], block.linears["fc"].weight[kept], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_every_group_that_a_pruner_claims_is_exact(name):
    block, x = one_linear(q=(16, 48), k=(8, 48)), correlated_inputs()
    for group in SPECS[name].groups:
        pattern = Unstructured(0.6, group)
        results = prune(name, block, pattern, x)
        zeros = {n: int((~r.keep).sum()) for n, r in results.items()}
        if group == "joint":
            assert sum(zeros.values()) == round(0.6 * 24 * 48)
            assert zeros["q"] != round(0.6 * 16 * 48)
        else:
            assert zeros == {n: zeros_in(pattern, *block.linears[n].weight.shape) for n in ("q", "k")}


@pytest.mark.parametrize("name", SPECS)
def test_the_model_is_only_read(name):
    block, x = one_linear(), correlated_inputs()
    before = block.linears["fc"].weight.clone()
    prune(name, block, Unstructured(0.5, "row"), x)
    assert torch.equal(block.linears["fc"].weight, before)


def test_sparsegpt_reconstructs_a_given_mask_below_the_error_of_only_masking():
    block, x = one_linear(), correlated_inputs()
    chosen = prune("wanda", block, Unstructured(0.5, "row"), x)["fc"]
    rebuilt = prune("sparsegpt", block, FixedMask(chosen.keep, Unstructured(0.5, "row")), x)["fc"]
    assert torch.equal(rebuilt.keep, chosen.keep)
    assert output_error(block, rebuilt, x) < 0.7 * output_error(block, chosen, x)
    assert SPECS["sparsegpt"].reconstructs
    assert not SPECS["wanda"].reconstructs


def test_sparsegpt_reports_the_damping_and_fails_with_the_layers_name():
    block = one_linear()
    result = prune("sparsegpt", block, Unstructured(0.5, "layer"), correlated_inputs(), damping=0.05)["fc"]
    assert result.info["damping"] == 0.05
    x = correlated_inputs()
    x[0, 0, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match="fc: the Hessian has NaN"):
        prune("sparsegpt", block, Unstructured(0.5, "layer"), x)


def test_features_that_never_fire_are_dropped_first_by_wanda_and_sparsegpt():
    block, x = one_linear(), correlated_inputs()
    dead = [3, 17, 40]
    x[..., dead] = 0
    for name in ("wanda", "sparsegpt"):
        result = prune(name, block, Unstructured(3 / 48, "row"), x)["fc"]
        assert (~result.keep).nonzero()[:, 1].unique().tolist() == dead, name
