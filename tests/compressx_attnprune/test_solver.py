"""Budgets, modes, and the rule that a layer's result is never worse than Wanda's and SparseGPT's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx_attnprune.pruning import MODES, OBJECTIVES, OF_MODE, PATTERNS
from tests.pairs import pairs
from torch import Tensor

from compressx import NM, FixedMask, Pattern, Unstructured
from compressx_attnprune import gauss_newton, solver, training
from compressx_attnprune.attention import Attention, Pair, Projection
from compressx_attnprune.baselines import Budget, InputStatistics
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss, relative_errors
from compressx_attnprune.options import AttnPruneOptions
from compressx_attnprune.solver import Candidate, QueryKeyLayer, QueryKeySolution, Text

ATTENTION = Attention(Projection(4), Projection(2), head_dim=8, scaling=0.5)
WIDTH = 24
SHAPES = ((32, WIDTH), (16, WIDTH))
each_mode = pytest.mark.parametrize("mode", MODES)
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(objective: str = "attention-matrix", *, sequences: int = 20, held_out: int = 4) -> QueryKeyLayer:
    """Draw a layer whose input features differ in size and hang together, as real ones do."""
    x = normal(sequences, 20, WIDTH, seed=0) @ normal(WIDTH, WIDTH, seed=1) * torch.linspace(0.05, 0.5, WIDTH)
    dense = (normal(32, WIDTH, seed=2) * 0.3, normal(16, WIDTH, seed=3) * 0.3)
    losses: dict[str, Loss] = {
        "attention-matrix": MatrixLoss(ATTENTION),
        "attention-output": OutputLoss(ATTENTION, normal(16, WIDTH, seed=4), None, normal(10, 32, seed=5)),
    }
    return QueryKeyLayer(losses[objective], Text(x[:-held_out], x[-held_out:]), dense)


def both(pattern: Pattern) -> Budget:
    return Budget(pattern, pattern)


def solve(layer: QueryKeyLayer, budget: Budget, mode: str = "gauss-newton") -> QueryKeySolution:
    return solver.solve(layer, budget, AttnPruneOptions(**OF_MODE[mode]))


def error(layer: QueryKeyLayer, weights: Pair) -> float:
    return relative_errors(layer.loss, layer.text.held_out, layer.dense, [weights])[0]


def masked(layer: QueryKeyLayer, keeps: Pair) -> Pair:
    return layer.dense[0] * keeps[0], layer.dense[1] * keeps[1]


def by_magnitude(layer: QueryKeyLayer, budget: Budget) -> Pair:
    return masked(layer, budget.choose((layer.dense[0].abs(), layer.dense[1].abs())))


def assert_budget(keeps: Pair, pattern: Pattern) -> None:
    dropped = [int((~k).sum()) for k in keeps]
    if isinstance(pattern, NM):
        assert all((k.view(-1, pattern.of).sum(dim=1) == pattern.keep).all() for k in keeps)
    elif isinstance(pattern, Unstructured) and pattern.group == "row":
        assert {n for k in keeps for n in (~k).sum(dim=1).tolist()} == {round(pattern.sparsity * WIDTH)}
    elif isinstance(pattern, Unstructured) and pattern.group == "layer":
        assert dropped == [round(pattern.sparsity * k.numel()) for k in keeps]
    else:
        assert sum(dropped) == round(pattern.sparsity * sum(k.numel() for k in keeps))


# --- budgets


# --- the closed form


@pytest.mark.parametrize(("objective", "pattern"), list(zip([*OBJECTIVES] * 2, PATTERNS, strict=True)), ids=str)
def test_the_closed_form_beats_magnitude_wanda_and_sparsegpt(objective: str, pattern: Pattern):
    layer = make_layer(objective)
    solution = solve(layer, both(pattern))
    others = [*solution.starts.values(), by_magnitude(layer, both(pattern))]
    assert not solution.fell_back
    assert 0 < error(layer, solution.weights) < 0.9 * min(error(layer, w) for w in others)


def test_nothing_is_learnt_from_the_held_out_text():
    layer, budget = make_layer(), both(Unstructured(0.5, "joint"))
    other = QueryKeyLayer(layer.loss, Text(layer.text.train, 0.5 * layer.text.held_out.flip(1)), layer.dense)
    closed = [solver.judge(of, [solver.closed_form(of, budget)])[0] for of in (layer, other)]
    learnt = [solver.mask(of, budget, regularization=0.1) for of in (layer, other)]
    solved = [solve(of, budget) for of in (layer, other)]
    pairs = [(closed[0].weights, closed[1].weights), (learnt[0].weights, learnt[1].weights)]
    pairs += [(solved[0].starts[name], solved[1].starts[name]) for name in ("wanda", "sparsegpt")]
    for first, second in pairs:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert closed[0].error != closed[1].error


@each_mode
def test_given_masks_are_kept_and_reconstructed_in_closed_form_whatever_the_mode(mode: str):
    layer = make_layer()
    keeps = both(Unstructured(0.5, "row")).choose((layer.dense[0].abs(), layer.dense[1].abs()))
    given = Budget(*(FixedMask(k, Unstructured(0.5, "row")) for k in keeps))
    assert given.fixed
    solution = solve(layer, given, mode)
    for side in range(2):
        assert torch.equal(solution.keeps[side], keeps[side])
        assert torch.equal(solution.weights[side] != 0, keeps[side])
    assert solution.losses == ()
    assert torch.equal(solution.starts["wanda"][0], layer.dense[0] * keeps[0])
    by_start = [error(layer, w) for w in solution.starts.values()]  # as they are, and with SparseGPT's update
    assert error(layer, solution.weights) < 0.9 * min(by_start)


# --- masks and weights by gradient descent


def test_mask_mode_leaves_the_survivors_values_and_beats_magnitude(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "STEPS", 60)
    layer, budget = make_layer(), both(Unstructured(0.5, "joint"))
    learnt = solver.mask(layer, budget)
    assert all(torch.equal(a, b) for a, b in zip(learnt.weights, masked(layer, learnt.keeps), strict=True))
    assert learnt.error == error(layer, learnt.weights)
    assert len(learnt.losses) == 60
    assert learnt.error < error(layer, by_magnitude(layer, budget))


def test_without_a_lambda_the_best_of_four_on_the_held_out_text_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "STEPS", 30)
    layer, budget = make_layer(), both(Unstructured(0.7, "joint"))
    single = {value: solver.mask(layer, budget, regularization=value) for value in solver.REGULARIZATIONS}
    assert len({t.error for t in single.values()}) == 4  # lambda does matter here
    best, chosen = min(single.values(), key=lambda t: t.error), solver.mask(layer, budget)
    assert chosen.error == best.error
    assert chosen.losses == best.losses
    assert torch.equal(chosen.weights[0], best.weights[0])


def test_ties_between_relaxed_masks_fall_to_the_smaller_weight_times_feature_norm():
    x = torch.tensor([1.0, 10.0, 0.1]).expand(1, 4, 3)
    weights = (torch.tensor([[3.0, -2.0, 1.0]]), torch.tensor([[0.5, 4.0, 0.1]]))
    masks = (torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, torch.finfo(torch.float32).eps, 1.0]]))
    query, key = solver.ranked(masks, InputStatistics(x), weights)
    order = torch.cat([query, key], dim=1).flatten().argsort().tolist()
    assert order == [2, 4, 5, 3, 0, 1]  # 0, then eps, then 0.1 * 0.1, 0.5 * 1, 3 * 1 and 2 * 10


# --- never worse than Wanda and SparseGPT


HOWS = [(mode, objective) for mode in MODES for objective in OBJECTIVES if (mode, objective) != (
    "mask", "attention-output")]  # fmt: skip


@pytest.mark.parametrize(("pattern", "how"), pairs(PATTERNS, HOWS), ids=str)
def test_no_result_is_worse_on_the_held_out_text_than_wanda_and_sparsegpt(how: tuple[str, str], pattern: Pattern):
    """Two sequences are far too few, and five steps too: most modes lose here by themselves."""
    layer = make_layer(how[1], sequences=4, held_out=2)
    solution = solve(layer, both(pattern), how[0])
    errors = {name: error(layer, weights) for name, weights in solution.starts.items()}
    assert set(errors) == {"wanda", "sparsegpt"}
    assert error(layer, solution.weights) <= min(errors.values())
    assert solution.fell_back == any(solution.weights[0] is w[0] for w in solution.starts.values())


@pytest.mark.parametrize(
    ("own", "better"), [(1e9, "wanda"), (float("inf"), "sparsegpt"), (float("nan"), "wanda")], ids=str
)
def test_a_mode_that_fails_gives_way_to_the_better_start(own: float, better: str, monkeypatch: pytest.MonkeyPatch):
    layer, budget = make_layer(), both(Unstructured(0.6, "joint"))
    zeros = (torch.zeros(SHAPES[0]), torch.zeros(SHAPES[1]))
    monkeypatch.setattr(
        solver, "mask", lambda *_, **__: Candidate(zeros, (zeros[0] > 0, zeros[1] > 0), own, (3.0, 2.0))
    )
    worse = {"wanda": "sparsegpt", "sparsegpt": "wanda"}[better]
    original = getattr(solver.baselines, worse)

    def spoilt(*args: Any) -> tuple[Pair, Pair]:
        keeps, weights = original(*args)
        return keeps, (-weights[0], weights[1])

    monkeypatch.setattr(solver.baselines, worse, spoilt)
    solution = solve(layer, budget, "mask")
    assert solution.fell_back
    assert solution.weights is solution.starts[better]
    assert_budget(solution.keeps, budget.query)
    assert all(torch.equal(w != 0, k) for w, k in zip(solution.weights, solution.keeps, strict=True))
    assert solution.losses == (3.0, 2.0)  # what failed is shown all the same


@pytest.mark.parametrize(
    ("enough", "tried", "fell_back"),
    [(0.003, [0.003], False), (0.03, [0.003, 0.03], False), (0.3, [0.003, 0.03, 0.3], False),
     (3.0, [0.003, 0.03, 0.3], True)],
)  # fmt: skip
def test_a_closed_form_that_loses_is_tried_with_more_damping(enough, tried, fell_back, monkeypatch):
    layer, dampings = make_layer(), []

    def closed_form(
        layer: QueryKeyLayer, budget: Budget, problem: gauss_newton.KroneckerProblem | None = None
    ) -> tuple[Pair, Pair]:
        dampings.append((problem or layer.problem).damping)
        good = dampings[-1] > 0.9 * enough
        return budget.choose(layer.dense), layer.dense if good else (-layer.dense[0], layer.dense[1])

    monkeypatch.setattr(solver, "closed_form", closed_form)
    solution = solve(layer, both(Unstructured(0.5, "joint")))
    assert dampings == pytest.approx(tried)
    assert solution.fell_back == fell_back
    assert (solution.weights is layer.dense) != fell_back


# --- on an accelerator


def on_device(layer: QueryKeyLayer) -> QueryKeyLayer:
    """Return a layer whose tensors are on the device that is pretended."""
    loss = layer.loss
    if isinstance(loss, OutputLoss):
        loss = replace(loss, value_weight=loss.value_weight.cuda(), output_weight=loss.output_weight.cuda())
    text = Text(layer.text.train.cuda(), layer.text.held_out.cuda())
    return QueryKeyLayer(loss, text, (layer.dense[0].cuda(), layer.dense[1].cuda()))


@pytest.mark.parametrize(
    ("objective", "pattern", "mode"),
    [
        ("attention-output", Unstructured(0.5, "joint"), "gauss-newton"),
        pytest.param("attention-matrix", NM(2, 4), "gauss-newton", marks=pytest.mark.slow),
        ("attention-matrix", Unstructured(0.5, "joint"), "mask"),
    ],
    ids=["closed form", "closed form, 2:4", "mask"],
)
def test_no_step_waits_for_the_device(objective, pattern, mode, monkeypatch: pytest.MonkeyPatch):
    """Twice the steps, or twice the iterations of ADMM, wait no more often: numbers are read when all are computed."""
    original, waits = gauss_newton.select, []
    for steps in (4, 8):
        monkeypatch.setattr(gauss_newton, "select", partial(original, iterations=steps))
        monkeypatch.setattr(training, "STEPS", steps)
        monkeypatch.setattr(solver, "REGULARIZATIONS", (0.1,))
        with pretended_accelerator() as device:
            layer = on_device(make_layer(objective))
            with device.counted() as counted:
                solve(layer, both(pattern), mode)
            assert counted.synchronisations <= 30, counted.places()
            waits.append(counted.synchronisations)
    assert waits[1] <= waits[0]
