"""The shallow transformer of `benchmarks/token_sparsification.py`, and what it measures on tokens of known patterns."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SEEDS, SAMPLES = 2, 4


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return importlib.import_module("token_sparsification")


@pytest.fixture
def data(program: ModuleType) -> Any:
    """30 of 50 tokens relevant, 18 for the label; 15 noisy."""
    each = [program.draw(seed, SAMPLES, relevant=0.6, noisy=0.3) for seed in range(SEEDS)]
    return program.Data(*map(torch.stack, zip(*each, strict=True)))


@pytest.fixture
def model(program: ModuleType) -> Any:
    """Weights so large that attention is far from uniform."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(SEEDS, 10, 10)] * 3 + [(SEEDS, 6, 10)]
    return program.Model(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


def in_double(program: ModuleType, data: Any) -> Any:
    return program.Data(*(v.double() if v.is_floating_point() else v for v in data))


def slow_output(model: Any, seed: int, tokens: Tensor) -> float:
    """F as the docstring has it, token by token."""
    query, key, value, hidden = (w[seed] for w in model)
    total = 0.0
    for x_l in tokens:
        weights = torch.stack([torch.exp(x_s @ key.T @ query @ x_l) for x_s in tokens])
        mixed = sum(w * (value @ x_s) for w, x_s in zip(weights / weights.sum(), tokens, strict=True))
        for neuron, row in enumerate(hidden):
            total += (-1) ** neuron / len(hidden) ** 0.5 * max(float(row @ mixed), 0.0) / len(tokens)
    return total


def test_the_output_is_the_formula_of_the_paper(program, model, data):
    tokens = in_double(program, data).tokens[:, :2, :5]
    expected = [[slow_output(model, seed, sample) for sample in tokens[seed]] for seed in range(SEEDS)]
    torch.testing.assert_close(model.outputs(tokens), torch.tensor(expected, dtype=torch.float64))


def test_the_gradient_of_each_seed_is_that_of_finite_differences(program, model, data):
    data, step = in_double(program, data), 1e-6
    found = program.gradients(model, data)
    for name, weight, gradient in zip(model._fields, model, found, strict=True):
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        up, down = (program.hinge(model._replace(**{name: weight + s * direction}), data) for s in (step, -step))
        along = (gradient * direction).sum(dim=(1, 2))
        torch.testing.assert_close(along, (up - down) / (2 * step), rtol=1e-4, atol=1e-7)


def test_each_removal_takes_as_many_tokens_of_its_own_kind(program, model, data):
    trained = program.Model(*(w.float() for w in model))
    left = {removal: program.without(data, removal, trained) for removal in program.REMOVALS}
    assert left["none"] is data
    for removal in program.REMOVALS[1:]:
        one = left[removal]
        assert [v.shape[2] for v in (one.tokens, one.relevant, one.noise)] == [35] * 3
        assert torch.equal(one.labels, data.labels)
        before = [{tuple(x) for x in sample} for sample in data.tokens.flatten(0, 1).tolist()]
        after = [{tuple(x) for x in sample} for sample in one.tokens.flatten(0, 1).tolist()]
        assert all(len(few) == 35 and few < many for few, many in zip(after, before, strict=True))
    assert (left["irrelevant"].relevant.sum(dim=-1) == 30).all()
    assert (left["noisiest"].noise.amax(dim=-1) <= data.noise.sort(dim=-1).values[..., 34]).all()


def run(program: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["token_sparsification.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        program.main()
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_the_command_writes_its_files_and_ends_with_status_1_if_a_claim_does_not_hold(
    program, tmp_path, monkeypatch, capsys
):
    tiny = {"samples": 20, "steps": 20, "relevant": 0.6, "noisy": 0.3}
    for name, value in {"ATTENTION": tiny, "REMOVAL": tiny, "TEST_SAMPLES": 4, "EVERY": 10}.items():
        monkeypatch.setattr(program, name, value)
    status = run(program, monkeypatch, "--output", tmp_path / "new", "--seeds", 2)
    path = tmp_path / "new" / "token-sparsification.csv"
    held = json.loads(path.with_suffix(".json").read_text())["claims"]
    assert len(held) == 8
    assert status == (0 if all(held.values()) else 1) == 1  # 20 steps learn nothing
    table = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "DOES NOT HOLD" in table
    assert table in capsys.readouterr().out
    with path.open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == (6 * 4 + 7) * 3 * 2  # a row of each measure, step and seed


@pytest.mark.slow
def test_the_claims_hold_with_five_seeds(program, tmp_path, monkeypatch):
    assert run(program, monkeypatch, "--output", tmp_path, "--seeds", 5) == 0
