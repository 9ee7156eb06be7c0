"""The paper's experiment: its claims on means over seeds, its baselines, its files, and its command."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import experiment
import output
import pytest
import torch
from experiment import OURS, QUICK, Figure, Point, Settings
from tests.compressx.built_in import BUILT_IN

from compressx import FeatureNorms, Hessian, Unstructured

FACTORS = ["Wanda on factors", "SparseGPT on factors"]
TINY = Settings(
    seeds=2,
    tuning_seeds=1,
    width=6,
    tokens=12,
    scale=0.4,
    regularizations=(1e-3, 1e-1),
    token_counts=(8, 12),
    sparsities=(0.5, 0.75),
    steps=30,
)
TINY_OPTIONS = [
    *("--seeds", "2", "--tuning-seeds", "1", "--width", "6", "--tokens", "12", "--scale", "0.4", "--steps", "30"),
    *("--regularizations", "1e-3,1e-1", "--token-counts", "8,12", "--sparsities", "0.5,0.75"),
]


TOKENS, WIDTH = 24, 8


def draw(*options: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["figure2", *map(str, options)])
        importlib.import_module("figure2.__main__").main()


@pytest.fixture(scope="module")
def quick() -> Figure:
    """The experiment with the constants of --quick, five seeds."""
    return experiment.measure(QUICK)


@pytest.fixture(scope="module")
def tiny() -> Figure:
    return experiment.measure(TINY)


def of(figure: Figure, panel: str, method: str) -> list[Point]:
    return [p for p in figure.points if p.panel == panel and p.method == method]


@pytest.mark.slow
def test_the_error_against_lambda_is_u_shaped_with_its_minimum_inside_the_grid(quick: Figure):
    points = of(quick, "lambda", OURS)
    assert [p.regularization for p in points] == list(QUICK.regularizations)
    means = [p.mean for p in points]
    least = means.index(min(means))
    assert 0 < least < len(means) - 1
    assert all(a > b for a, b in pairwise(means[: least + 1])), "falls up to the minimum"
    assert all(a < b for a, b in pairwise(means[least:])), "rises after it"
    assert min(means[0], means[-1]) > 1.3 * means[least]
    assert all(len(p.errors) == 5 for p in points)


@pytest.mark.slow
def test_pruning_for_the_attention_matrix_has_the_lowest_error_which_grows_with_n_and_with_the_ratio(quick: Figure):
    for panel, axis, values in (("n", "tokens", QUICK.token_counts), ("rho", "sparsity", QUICK.sparsities)):
        ours = of(quick, panel, OURS)
        assert [getattr(p, axis) for p in ours] == list(values)
        assert [p.mean for p in ours] == sorted(p.mean for p in ours)
        for method in FACTORS:
            for a, b in zip(ours, of(quick, panel, method), strict=True):
                assert (a.tokens, a.sparsity) == (b.tokens, b.sparsity)
                assert a.mean < 0.7 * b.mean, f"{method} at n = {a.tokens} and rho = {a.sparsity}"


def test_masks_are_learnt_on_the_published_loss_and_end_where_its_gradient_is_zero_in_the_box(monkeypatch):
    """The loss is written out, with a gradient by autograd."""
    drawn = experiment.sample(range(3), tokens=TOKENS, width=WIDTH, scale=0.4)
    x, weight, causal = drawn.inputs, drawn.weight, torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

    def matrix(w: torch.Tensor) -> torch.Tensor:
        return (x @ w @ x.mT).masked_fill(~causal, -torch.inf).softmax(dim=-1)

    for regularization in (1e-3, 1e-1):
        relaxed = experiment.learn(drawn, regularization, steps=400).requires_grad_()
        difference = matrix(relaxed * weight) - matrix(weight)
        loss = 0.5 * difference.square().sum() + 0.5 * regularization * relaxed.square().sum()
        (gradient,) = torch.autograd.grad(loss, relaxed)
        step = (relaxed - gradient / regularization).detach().clamp(0, 1) - relaxed.detach()
        assert float(step.square().mean().sqrt()) < 0.02, "1 at the dense start"
        assert loss < 0.9 * 0.5 * regularization * relaxed.numel()
    errors = drawn.relative_error(relaxed.detach() * weight)
    expected = difference.square().sum(dim=(1, 2)) / matrix(weight).square().sum(dim=(1, 2))
    torch.testing.assert_close(errors, expected.detach())


@pytest.mark.parametrize("sparsity", [0.0, 0.77])
def test_binarising_drops_exactly_the_lowest_entries_of_each_seed_and_of_equal_ones_the_smaller_weight(sparsity):
    weight = experiment.sample(range(2), tokens=TOKENS, width=WIDTH).weight
    relaxed = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    relaxed[:, :2] = 1.0
    keep = experiment.binarize(relaxed, weight, sparsity)
    assert ((~keep).sum(dim=(1, 2)) == round(sparsity * WIDTH * WIDTH)).all()
    for mask, values, w in zip(keep, relaxed, weight.abs(), strict=True):
        if sparsity:
            assert values[~mask].max() <= values[mask].min()
        most = experiment.binarize(values[None], w[None], 0.875)[0]
        assert not most[2:].any()
        assert w[:2][~most[:2]].max() < w[:2][most[:2]].min()


def test_the_baselines_on_factors_are_the_projects_own_pruners():
    sparsity = 0.7
    drawn = experiment.sample(range(2), tokens=TOKENS, width=WIDTH, scale=0.4)
    for seed in range(2):
        x, weights = drawn.inputs[seed], {"q": drawn.query[seed], "k": drawn.key[seed]}
        block = SimpleNamespace(linears={n: SimpleNamespace(weight=w) for n, w in weights.items()})
        norms, hessian = FeatureNorms(WIDTH), Hessian(WIDTH)
        norms.update(x[None])
        hessian.update(x[None])
        wanda = BUILT_IN["wanda"].build(BUILT_IN["wanda"].options())
        by_wanda = wanda.prune(block, dict.fromkeys(weights, Unstructured(sparsity)), dict.fromkeys(weights, norms))
        masked = {n: w * by_wanda[n].keep for n, w in weights.items()}
        expected = masked["q"].T @ masked["k"]
        torch.testing.assert_close(experiment.wanda_factors(drawn, sparsity)[seed], expected)

        sparsegpt = BUILT_IN["sparsegpt"].build(BUILT_IN["sparsegpt"].options())
        by_sparsegpt = sparsegpt.prune(
            block, dict.fromkeys(weights, Unstructured(sparsity, "layer")), dict.fromkeys(weights, hessian),
            dict.fromkeys(weights, sparsegpt.prepare(block, "q", hessian)),
        )  # fmt: skip
        expected = (by_sparsegpt["q"].weight.T @ by_sparsegpt["k"].weight).double()
        torch.testing.assert_close(experiment.sparsegpt_factors(drawn, sparsity)[seed], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_command_writes_table_data_and_plots(tmp_path: Path, tiny: Figure, capsys: pytest.CaptureFixture[str]):
    from matplotlib import image

    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    out = tmp_path / "out"
    draw("--output", out, *TINY_OPTIONS)
    said = capsys.readouterr()
    assert sorted(p.name for p in out.iterdir()) == ["figure2.csv", "figure2.json", "figure2.png", "figure2.svg"]
    assert "choosing lambda on 1 tuning seeds, n = 8" in said.err
    assert "| method | rho = 0.5 | rho = 0.75 |" in said.out

    rows = list(csv.DictReader((out / "figure2.csv").read_text().splitlines()))
    for row, point in zip(rows, tiny.points, strict=True):
        assert (row["panel"], row["method"], int(row["n"])) == (point.panel, point.method, point.tokens)
        assert float(row["ci95_low"]) <= float(row["mean"]) <= float(row["ci95_high"])
        assert float(row["mean"]) == pytest.approx(point.mean, rel=1e-6)
    assert json.loads((out / "figure2.json").read_text())["settings"] == json.loads(json.dumps(vars(TINY)))
    pixels = image.imread(out / "figure2.png")
    assert (pixels[..., :3].std(axis=-1) > 0.05).sum() > 1000, "colored lines and bands"
    (tmp_path / "again").mkdir()
    output.write(tiny, tmp_path / "again")
    for name in ("figure2.csv", "figure2.json", "figure2.svg", "figure2.png"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), "the same figure, the same files"
