"""The kit on pruners of units: those that keep every promise, and the check that finds each broken one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.compressx.testing.promises import Base, Options, broken_promise
from torch import Tensor

from compressx import PruneResult, PrunerSpec, Structured
from compressx.testing import check_plugin, conformance

UNITS = ("neurons", "kv-groups")


def spec(build=Base, **fields: Any) -> PrunerSpec:
    return PrunerSpec("mine", "", Options, build, **{"groups": (), "nm": False, "units": UNITS, **fields})


def changing(change):
    class Changing(Base):
        def prune(self, block, patterns, stats):
            return change(super().prune(block, patterns, stats), block, patterns, stats)

    return Changing


def solves(results, block, patterns, stats):
    """Give surviving weights and the biases where there are some new values."""
    made = {}
    for name, result in results.items():
        linear, dropped = block.linears[name], 1.0 - result.keep.float().mean()
        bias = None if linear.bias is None else linear.bias * (1 + dropped)
        made[name] = replace(result, weight=linear.weight * (1 + dropped), bias=bias)
    return made


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "mixtral"))]
)
def test_a_pruner_of_units_that_keeps_every_promise_passes_every_check(architecture):
    outcomes = list(conformance(spec(changing(solves), reconstructs=True), architectures=[architecture]))
    assert {o.status for o in outcomes} <= {"passed", "skipped"}, [o for o in outcomes if o.status == "failed"]
    passed = {o.check for o in outcomes if o.status == "passed"}
    assert {"exact sparsity for every pattern", "deterministic", "reconstructs"} <= passed
    assert len(passed) >= 15


def test_a_pruner_of_weights_and_units_is_asked_for_both():
    seen = set()

    def watch(results, block, patterns, stats):
        seen.update(p.unit if isinstance(p, Structured) else type(p).__name__ for p in patterns.values())
        return results

    check_plugin(spec(changing(watch), groups=("row",), nm=True), architectures=["llama"])
    assert seen == {"Unstructured", "NM", *UNITS}


def tears(results, block, patterns, stats):
    """Drop rows of the first linear that belong to units which stay."""
    name = next(iter(results))
    return results | {name: PruneResult(results[name].keep.roll(1, dims=0))}


def one_more(results, block, patterns, stats):
    units = next(iter(patterns.values())).units
    keep = units.kept({n: results[n].keep for n in units.owners})
    keep[keep.nonzero()[0]] = False
    shapes = {n: (len(results[n].keep), results[n].keep.shape[1]) for n in units.owners}
    return results | {n: PruneResult(x) for n, x in units.masks(keep, shapes).items()}


def other_bias(results, block, patterns, stats):
    return {n: replace(r, bias=None if (b := block.linears[n].bias) is None else b + 1) for n, r in results.items()}


def draws_bias(results, block, patterns, stats):
    def drawn(b: Tensor | None, changed: bool) -> Tensor | None:
        return b + torch.rand(b.shape) if changed and b is not None else None

    return {n: replace(r, bias=drawn(block.linears[n].bias, not r.keep.all())) for n, r in results.items()}


def writes_bias(results, block, patterns, stats):
    for name in results:
        if (bias := block.linears[name].bias) is not None:
            bias.mul_(0.5)
    return results


@pytest.mark.parametrize(
    ("build", "check", "says"),
    [
        (changing(tears), "exact sparsity for every pattern", "go or stay whole, in all of"),
        (changing(one_more), "exact sparsity for every pattern", "of 256 units go, got"),
        (changing(other_bias), "sparsity zero changes nothing", "the bias is changed though all weights are kept"),
        (changing(draws_bias), "deterministic", "gave another bias"),
        (changing(writes_bias), "leaves the model as it is", "bias"),
    ],
    ids=lambda x: getattr(x, "__name__", None) if isinstance(x, type) else None,
)
def test_each_broken_promise_is_found_by_the_check_of_its_name(build, check, says):
    assert says in broken_promise(spec(build), check, "gpt2")


def test_units_that_a_model_has_not_are_not_asked_for_and_a_pruner_of_those_alone_is_refused():
    found = list(conformance(spec(units=("kv-groups",)), architectures=["llama", "llama-mqa"]))
    by = {o.architecture: o for o in found if o.check == "plans without weights"}
    assert by["llama"].status == "passed"
    assert (by["llama-mqa"].status, by["llama-mqa"].detail) == (
        "refused", "50% of kv-groups of 1 kv-groups of model.layers.0.self_attn are none, or all"
    )  # fmt: skip


class Search:
    windows = 6

    def __init__(self, options: Options) -> None:
        self.options = options

    def choose(self, blocks, count, divergences):
        costs = dict(zip(blocks, divergences([[fqn] for fqn in blocks]), strict=True))
        return sorted(blocks, key=lambda fqn: costs[fqn])[:count]


class DrawsSearch(Search):
    def choose(self, blocks, count, divergences):
        return [blocks[i] for i in torch.randperm(len(blocks))[:count]]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (Search, None),
        (DrawsSearch, "with other global seeds, gave others"),
    ],
)
def test_pruners_that_choose_blocks_are_asked_again_with_another_seed(build, says):
    outcomes = {o.check: o for o in conformance(spec(build, units=("blocks",)), architectures=["llama"])}
    assert (outcomes["chooses blocks"].status, says in outcomes["chooses blocks"].detail if says else True) == (
        "failed" if says else "passed", True
    )  # fmt: skip
    assert outcomes["deterministic"].detail == "it prunes whole blocks, and nothing in them"
