"""Budgets, modes, and the rule that a layer's result is never worse than Wanda's and SparseGPT's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx_attnprune import drawn
from tests.compressx_attnprune.pruning import MODES, OBJECTIVES, OF_MODE, PATTERNS
from tests.pairs import pairs

from compressx import NM, FixedMask, Pattern, Unstructured
from compressx_attnprune import gauss_newton, solver, training
from compressx_attnprune.attention import Attention, Pair, Projection
from compressx_attnprune.baselines import Budget, InputStatistics
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss, relative_errors
from compressx_attnprune.options import AttnPruneOptions
from compressx_attnprune.solver import Candidate, QueryKeyLayer, Solution

ATTENTION = Attention(Projection(4), Projection(2), head_dim=8, scaling=0.5)
WIDTH = 24
normal = partial(drawn.normal, dtype=torch.float32)


def make_layer(objective: str = "attention-matrix", *, sequences: int = 20, held_out: int = 4) -> QueryKeyLayer:
    """Draw a layer whose input features differ in size and hang together, as real ones do."""
    x = normal(sequences, 20, WIDTH, seed=0) @ normal(WIDTH, WIDTH, seed=1) * torch.linspace(0.05, 0.5, WIDTH)
    dense = (normal(32, WIDTH, seed=2) * 0.3, normal(16, WIDTH, seed=3) * 0.3)
    losses: dict[str, Loss] = {
        "attention-matrix": MatrixLoss(ATTENTION),
        "attention-output": OutputLoss(ATTENTION, normal(16, WIDTH, seed=4), None, normal(10, 32, seed=5)),
    }
    return QueryKeyLayer(losses[objective], x[:-held_out], x[-held_out:], dense)


def both(pattern: Pattern) -> Budget:
    return Budget(pattern, pattern)


def solve(layer: QueryKeyLayer, budget: Budget, mode: str = "gauss-newton") -> Solution:
    return solver.prune_layer(layer, budget, AttnPruneOptions(**OF_MODE[mode]))


def error(layer: QueryKeyLayer, weights: Pair) -> float:
    return relative_errors(layer.loss, layer.held_out, layer.dense, [weights])[0]


def masked(layer: QueryKeyLayer, keeps: Pair) -> Pair:
    return layer.dense[0] * keeps[0], layer.dense[1] * keeps[1]


def by_magnitude(layer: QueryKeyLayer, budget: Budget) -> Pair:
    return masked(layer, budget.choose((layer.dense[0].abs(), layer.dense[1].abs())))


@pytest.mark.parametrize(("objective", "pattern"), list(zip([*OBJECTIVES] * 2, PATTERNS, strict=True)), ids=str)
def test_the_closed_form_beats_magnitude_wanda_and_sparsegpt(objective: str, pattern: Pattern):
    layer = make_layer(objective)
    solution = solve(layer, both(pattern))
    others = [*(start.weights for start in solution.starts.values()), by_magnitude(layer, both(pattern))]
    assert solution.best is solution.ours
    assert 0 < error(layer, solution.best.weights) < 0.9 * min(error(layer, w) for w in others)


def test_nothing_is_learnt_from_the_held_out_text():
    layer, budget = make_layer(), both(Unstructured(0.5, "joint"))
    other = replace(layer, held_out=0.5 * layer.held_out.flip(1))
    closed = [solver.judge(of, [solver.closed_form(of, budget)])[0] for of in (layer, other)]
    learnt = [solver.mask(of, budget, regularization=0.1) for of in (layer, other)]
    started = [[*solve(of, budget).starts.values()] for of in (layer, other)]
    for first, second in (closed, learnt, *zip(*started, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
    assert closed[0].error != closed[1].error


@pytest.mark.parametrize("mode", MODES)
def test_given_masks_are_kept_and_reconstructed_in_closed_form_whatever_the_mode(mode: str):
    layer = make_layer()
    keeps = both(Unstructured(0.5, "row")).choose((layer.dense[0].abs(), layer.dense[1].abs()))
    given = Budget(*(FixedMask(k, Unstructured(0.5, "row")) for k in keeps))
    assert given.fixed
    solution = solve(layer, given, mode)
    for keep, weight, wanted in zip(solution.best.keeps, solution.best.weights, keeps, strict=True):
        assert torch.equal(keep, wanted)
        assert torch.equal(weight != 0, wanted)
    assert solution.ours.losses == ()
    starts = [start.weights for start in solution.starts.values()]  # as they are, and with SparseGPT's update
    assert torch.equal(starts[0][0], layer.dense[0] * keeps[0])
    assert error(layer, solution.best.weights) < 0.9 * min(error(layer, w) for w in starts)


def test_mask_mode_leaves_the_kept_values_and_takes_the_best_lambda_on_the_held_out_text(monkeypatch):
    monkeypatch.setattr(training, "STEPS", 30)
    layer, budget = make_layer(), both(Unstructured(0.7, "joint"))
    single = {value: solver.mask(layer, budget, regularization=value) for value in solver.REGULARIZATIONS}
    assert len({t.error for t in single.values()}) == 4  # lambda does matter here
    best, chosen = min(single.values(), key=lambda t: t.error), solver.mask(layer, budget)
    assert (chosen.error, chosen.losses) == (best.error, best.losses)
    assert len(chosen.losses) == 30
    for weight, kept in zip(chosen.weights, masked(layer, best.keeps), strict=True):
        assert torch.equal(weight, kept)
    assert chosen.error == error(layer, chosen.weights) < error(layer, by_magnitude(layer, budget))


def test_ties_between_relaxed_masks_fall_to_the_smaller_weight_times_feature_norm():
    x = torch.tensor([1.0, 10.0, 0.1]).expand(1, 4, 3)
    weights = (torch.tensor([[3.0, -2.0, 1.0]]), torch.tensor([[0.5, 4.0, 0.1]]))
    masks = (torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, torch.finfo(torch.float32).eps, 1.0]]))
    query, key = solver.ranked(masks, InputStatistics(x), weights)
    order = torch.cat([query, key], dim=1).flatten().argsort().tolist()
    assert order == [2, 4, 5, 3, 0, 1]  # 0, then eps, then 0.1 * 0.1, 0.5 * 1, 3 * 1 and 2 * 10


HOWS = [(mode, objective) for mode in MODES for objective in OBJECTIVES if (mode, objective) != (
    "mask", "attention-output")]  # fmt: skip


@pytest.mark.parametrize(("pattern", "how"), pairs(PATTERNS, HOWS), ids=str)
def test_no_result_is_worse_on_the_held_out_text_than_wanda_and_sparsegpt(how: tuple[str, str], pattern: Pattern):
    """Two sequences are far too few, and five steps too: most modes lose here by themselves."""
    layer = make_layer(how[1], sequences=4, held_out=2)
    solution = solve(layer, both(pattern), how[0])
    errors = {name: error(layer, start.weights) for name, start in solution.starts.items()}
    assert set(errors) == {"wanda", "sparsegpt"}
    assert error(layer, solution.best.weights) <= min(errors.values())


@pytest.mark.parametrize(
    ("own", "better"), [(1e9, "wanda"), (float("inf"), "sparsegpt"), (float("nan"), "wanda")], ids=str
)
def test_a_mode_that_fails_gives_way_to_the_better_start(own: float, better: str, monkeypatch: pytest.MonkeyPatch):
    layer, zeros = make_layer(), (torch.zeros(32, WIDTH), torch.zeros(16, WIDTH))
    failed = Candidate((zeros[0] > 0, zeros[1] > 0), zeros, own, (3.0, 2.0))
    monkeypatch.setattr(solver, "mask", lambda *_, **__: failed)
    worse = {"wanda": "sparsegpt", "sparsegpt": "wanda"}[better]
    original = getattr(solver.baselines, worse)

    def spoilt(*args: Any) -> tuple[Pair, Pair]:
        keeps, weights = original(*args)
        return keeps, (-weights[0], weights[1])

    monkeypatch.setattr(solver.baselines, worse, spoilt)
    solution = solve(layer, both(Unstructured(0.6, "joint")), "mask")
    assert solution.best is solution.starts[better]
    assert solution.ours is failed  # its losses are shown all the same
    assert sum(int((~k).sum()) for k in solution.best.keeps) == round(0.6 * 48 * WIDTH)
    assert all(torch.equal(w != 0, k) for w, k in zip(solution.best.weights, solution.best.keeps, strict=True))


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
    assert (solution.best is not solution.ours) == (solution.best.weights is not layer.dense) == fell_back


def on_device(layer: QueryKeyLayer) -> QueryKeyLayer:
    """Return a layer whose tensors are on the device that is pretended."""
    loss = layer.loss
    if isinstance(loss, OutputLoss):
        loss = replace(loss, value_weight=loss.value_weight.cuda(), output_weight=loss.output_weight.cuda())
    return QueryKeyLayer(loss, layer.text.cuda(), layer.held_out.cuda(), (layer.dense[0].cuda(), layer.dense[1].cuda()))


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
