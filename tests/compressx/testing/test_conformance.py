"""The kit on pruners that keep every promise, and on those that break one."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import BaseModel, Field, field_validator
from tests.compressx.built_in import BUILT_IN

from compressx import FeatureNorms, Hessian, PruneResult, PrunerSpec, Structured, UnsupportedModelError, keep_masks
from compressx.testing import ConformanceError, check_plugin, conformance
from compressx.testing.conformance import Outcome, _outcome, by_cause
from compressx.testing.pruners import PRUNER_CHECKS
from compressx.testing.subject import Subject


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), list(zip(BUILT_IN, itertools.cycle(["gpt2", "gemma3", "mixtral"]))))
def test_every_pruner_that_is_shipped_keeps_its_promises(name, other):
    of_chance = pytest.raises(ConformanceError, match=r"fails 1 checks:\n *no worse than random masks")
    with of_chance if name == "dare" else nullcontext():  # which is random, and scales what it keeps
        check_plugin(BUILT_IN[name], architectures=["mixtral" if "experts" in BUILT_IN[name].units else other])


class Options(BaseModel):
    power: float = 1.0


class Base:
    """Wanda, as an author would write it; each test breaks one thing."""

    def __init__(self, options: Options) -> None:
        self.power = options.power

    def observe(self, block, name):
        return FeatureNorms(block.linears[name].in_features)

    def scores(self, block, patterns, stats):
        return {n: block.linears[n].weight.float().abs() * stats[n].norms ** self.power for n in patterns}

    def prune(self, block, patterns, stats):
        masks = keep_masks(self.scores(block, patterns, stats), patterns)
        return {n: PruneResult(keep) for n, keep in masks.items()}


class Prepares(Base):
    def prepare(self, block, name, statistic):
        return statistic.norms.pow(self.power)

    def prune(self, block, patterns, stats, prepared):
        scores = {n: block.linears[n].weight.float().abs() * norms for n, norms in prepared.items()}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}


def scoring(change):
    class Scoring(Base):
        def scores(self, block, patterns, stats):
            return change(super().scores(block, patterns, stats), block, stats)

    return Scoring


def answering(change):
    class Answering(Base):
        def prune(self, block, patterns, stats):
            results = super().prune(block, patterns, stats)
            return change(results, block, patterns) or results

    return Answering


def observing(statistic):
    class Observing(Base):
        def observe(self, block, name):
            return statistic(block.linears[name])

    return Observing


UNITS = {"groups": (), "nm": False, "units": ("neurons", "kv-groups")}


def spec(build=Base, *, options: type[BaseModel] = Options, **fields) -> PrunerSpec:
    return PrunerSpec("mine", "for a test", options, build, **fields)


def failures(of: PrunerSpec, **given) -> dict[str, str]:
    given = {"architectures": ["llama"], **given}
    return {o.check: o.detail for o in conformance(of, **given) if o.status == "failed"}


def broken_promise(broken: PrunerSpec, check: str, architecture: str) -> str:
    """Return the message that a check ends with, without the checks before it."""
    with pytest.raises(Exception, match=r".") as found:
        PRUNER_CHECKS[check](Subject(broken, broken.options(), architecture))
    return str(found.value)


# --- those that keep every promise


def solves(results, block, patterns):
    """Give kept weights, and the biases where there are some, new values."""
    made = {}
    for name, result in results.items():
        linear, dropped = block.linears[name], 1.0 - result.keep.float().mean()
        bias = None if linear.bias is None else linear.bias * (1 + dropped)
        made[name] = replace(result, weight=linear.weight * (1 + dropped), bias=bias)
    return made


@pytest.mark.parametrize(
    ("kept", "architecture", "promised"),
    [(spec(separable=True), "llama", {"separable", "deterministic", "the same for several processes"}),
     (spec(Prepares, separable=True), "llama", {"leaves what it prepared as it is"}),
     (spec(answering(solves), reconstructs=True, **UNITS), "llama", {"reconstructs"}),
     *(pytest.param(spec(answering(solves), reconstructs=True, **UNITS), kind, {"reconstructs"}, marks=pytest.mark.slow)
       for kind in ("gpt2", "mixtral"))],
)  # fmt: skip
def test_a_pruner_that_keeps_every_promise_passes_every_check(kept, architecture, promised):
    outcomes = list(conformance(kept, architectures=[architecture]))
    assert [o for o in outcomes if o.status not in ("passed", "skipped")] == []
    passed = {o.check for o in outcomes if o.status == "passed"}
    assert promised | {"exact sparsity for every pattern"} <= passed
    assert len(passed) >= 15


def test_a_pruner_of_weights_and_units_is_asked_for_both():
    seen = set()

    def watch(results, block, patterns):
        seen.update(p.unit if isinstance(p, Structured) else type(p).__name__ for p in patterns.values())

    PRUNER_CHECKS["exact sparsity for every pattern"](
        Subject(spec(answering(watch), groups=("row",), units=UNITS["units"]), Options(), "llama")
    )
    assert seen == {"Unstructured", "NM", *UNITS["units"]}


def test_units_that_a_model_has_not_are_not_asked_for_and_a_pruner_of_those_alone_is_refused():
    found = list(conformance(spec(**UNITS | {"units": ("kv-groups",)}), architectures=["llama-mqa"]))
    refused = next(o for o in found if o.check == "plans without weights")
    assert (refused.status, refused.detail) == (
        "refused", "50% of kv-groups of 1 kv-groups of model.layers.0.self_attn are none, or all"
    )  # fmt: skip


# --- those that break one


def wrong_group(results, block, patterns):
    weights = {n: block.linears[n].weight.abs() for n in results}
    order = {n: w.flatten().argsort().argsort().view(w.shape) for n, w in weights.items()}
    return {n: PruneResult(order[n] >= int((~r.keep).sum())) for n, r in results.items()}


def changes_at_zero(results, block, patterns):
    return {n: PruneResult(r.keep, block.linears[n].weight * 1.5) for n, r in results.items()}


def not_in_half(results, block, patterns):
    large = {n: block.linears[n].weight.float() * 1e6 for n in results}
    return {n: PruneResult(r.keep, None if r.keep.all() else large[n]) for n, r in results.items()}


def config(results, block, patterns):
    block.config.num_attention_heads = 2


def attribute(results, block, patterns):
    block.module.mlp.up_proj.seen = True


def doubles(scores, block, stats):
    """Overwrite statistics so that no mask changes."""
    for statistic in stats.values():
        statistic.squares.mul_(4.0)
    return scores


def divides(by):
    return lambda scores, block, stats: {n: s / by(n, block, stats) for n, s in scores.items()}


class Inverts(Base):
    def observe(self, block, name):
        return Hessian(block.linears[name].in_features)

    def scores(self, block, patterns, stats):
        factors = {n: torch.linalg.cholesky(stats[n].matrix.float()) for n in patterns}  # without damping
        return {n: block.linears[n].weight.float().square() * factors[n].diagonal() for n in patterns}


class MeanOfBatches:
    """Averages batches, whatever their size: the mistake that the check of batch sizes is there for."""

    def __init__(self, _):
        self.mean, self.count = torch.zeros(()), torch.zeros(())

    def update(self, x):
        self.count += 1
        self.mean = self.mean + (x.float().square().mean(dim=(0, 1)) - self.mean) / self.count

    def tensors(self):
        return {"mean": (self.mean, "sum"), "count": (self.count, "sum")}

    @property
    def norms(self):
        return self.mean.sqrt()


class ScalesByTheMean(Base):
    """Takes its masks from the weights alone, and its new weights from an average of batches."""

    def observe(self, block, name):
        return MeanOfBatches(block.linears[name])

    def prune(self, block, patterns, stats):
        masks = keep_masks({n: block.linears[n].weight.float().abs() for n in patterns}, patterns)
        return {n: PruneResult(keep, block.linears[n].weight * stats[n].norms) for n, keep in masks.items()}


class Copied(FeatureNorms):
    """Says that its squares are added up across processes, and hands out a copy of them."""

    def __init__(self, linear):
        super().__init__(linear.in_features)

    def tensors(self):
        return {k: (t.clone(), how) for k, (t, how) in super().tensors().items()}


class UsesUpWhatItPrepared(Prepares):
    def prune(self, block, patterns, stats, prepared):
        results = super().prune(block, patterns, stats, prepared)
        for norms in prepared.values():
            norms.fill_(0.0).index_fill_(0, torch.arange(8), 1.0)
        return results


class MultipliesByTheWeight(FeatureNorms):
    """Takes the input to have the weight's dtype."""

    def __init__(self, linear):
        super().__init__(linear.in_features)
        self.weight = linear.weight

    def update(self, x):
        assert (x @ self.weight.T).isfinite().all()
        super().update(x)


def other_bias(results, block, patterns):
    return {n: replace(r, bias=None if (b := block.linears[n].bias) is None else b + 1) for n, r in results.items()}


class DrawsBlocks:
    windows = 6

    def __init__(self, options: Options) -> None:
        self.options = options

    def choose(self, blocks, count, divergences):
        return [blocks[i] for i in torch.randperm(len(blocks))[:count]]


EXACT, DENSE, MODEL = "exact sparsity for every pattern", "sparsity zero changes nothing", "leaves the model as it is"
STATISTICS, BATCHES, PLANS = "leaves statistics as they are", "the same for every batch size", "plans without weights"
SHARED = FeatureNorms(64)


@pytest.mark.parametrize(
    ("broken", "check", "says"),
    [
        (spec(answering(wrong_group)), EXACT, "keep others: the first, row 0, keeps"),
        (spec(answering(lambda *_: torch.set_grad_enabled(True) and None)), EXACT, "leaves gradients switched on"),
        (spec(answering(changes_at_zero)), DENSE, "the weight is changed though all weights are kept"),
        (spec(answering(not_in_half)), "bfloat16 and float16", "infinite in the model's torch.float16"),
        (spec(observing(MultipliesByTheWeight)), "matmuls narrower than the weights", "same dtype"),
        (spec(scoring(lambda scores, *_: {n: torch.rand(s.shape) for n, s in scores.items()})),
         "deterministic", "other global seeds, gave another mask"),
        (spec(scoring(doubles)), STATISTICS, "prune changed squares of the statistic of model.layers.0."),
        (spec(ScalesByTheMean), BATCHES, "apart, expected 2% at most; a statistic has to be a sum, a maximum"),
        (spec(observing(Copied)), "the same for several processes", "two processes"),
        (spec(scoring(lambda scores, *_: {n: s.roll(len(scores), dims=1) for n, s in scores.items()}), separable=True),
         "separable", "decided after the others it gave another mask"),
        (spec(UsesUpWhatItPrepared), "leaves what it prepared as it is", "with what it had prepared"),
        (spec(reconstructs=True), "reconstructs", "returns no new weights"),
        (spec(answering(lambda _, block, __: block.module.mlp.up_proj.weight.register_hook(lambda x: x) and None)),
         MODEL, "up_proj.weight: _backward_hooks["),
        (spec(answering(lambda _, block, __: block.module.train() and None)), MODEL,
         "training is True, was False; compute on a copy, or put it back in a `finally`"),
        (spec(answering(attribute)), MODEL, "mlp.up_proj: seen is True, was 'nothing'"),
        (spec(answering(config)), MODEL, "config: num_attention_heads is 2, was 4"),
        (spec(scoring(divides(lambda n, block, stats: block.linears[n].weight.abs().sum(dim=1, keepdim=True)))),
         "rows that are all zero", "finite"),
        (spec(scoring(divides(lambda n, block, stats: stats[n].norms))), "inputs that are always zero", "finite"),
        (spec(Inverts), "few tokens", "not positive-definite"),
        (spec(observing(lambda x: FeatureNorms(int(x.weight.abs().sum() * 0) + x.in_features))), PLANS, "meta"),
        (spec(observing(lambda _: SHARED)), PLANS, "must return a fresh Statistic each time, or None, got FeatureN"),
        (spec(answering(other_bias), **UNITS), DENSE, "the bias is changed though all weights are kept"),
        (spec(DrawsBlocks, **UNITS | {"units": ("blocks",)}), "chooses blocks", "with other global seeds, gave others"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_each_broken_promise_is_found_by_the_check_of_its_name(broken, check, says):
    assert says in broken_promise(broken, check, "gpt2" if "kv-groups" in broken.units else "llama")


def flipped(scores, block, stats):
    return {n: -s for n, s in scores.items()}


def drawn(scores, block, stats):
    return {n: torch.rand(s.shape, generator=torch.Generator().manual_seed(len(n))) for n, s in scores.items()}


CHANCE = "no worse than random masks"


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {}),
        ("llama", {"groups": ()}),
        *((kind, UNITS | {"units": ("neurons",)}) for kind in ("gpt2", "mixtral")),
    ],
    ids=str,
)
def test_scores_with_the_wrong_sign_are_worse_than_random_ones_and_random_ones_are_not(architecture, fields):
    says = broken_promise(spec(scoring(flipped), **fields), CHANCE, architecture)
    assert re.search(r"predictions diverge \S+ times as far as with random masks: is the sign of its scores", says)
    for pruner in (Base, scoring(drawn)):
        PRUNER_CHECKS[CHANCE](Subject(spec(pruner, **fields), Options(), architecture))


# --- options, refusals, and how failures are shown


class Named(BaseModel):
    steps: int = Field(alias="max-steps", gt=0)


class Doubled(BaseModel):
    steps: int = 3

    @field_validator("steps")
    @classmethod
    def _twice(cls, value: int) -> int:
        return 2 * value


@pytest.mark.parametrize(
    ("options", "given", "says"),
    [(Named, {}, "max-steps"), (Doubled, {"steps": 4}, "read back from JSON differ"),
     (Options, {"powr": 2.0}, "did you mean 'power'?"), (Named, {"max-steps": 4}, "")],
)  # fmt: skip
def test_options_are_given_and_read_back_by_their_names_in_recipes(options, given, says):
    first = next(conformance(spec(lambda _: Base(Options()), options=options), options=given))
    assert (first.check, first.status) == ("options round-trip", "failed" if says else "passed")
    assert says in first.detail


def refusing(why, refused):
    def check(block, patterns, options):
        if refused(patterns):
            raise UnsupportedModelError(why.format(block.fqn))

    return spec(check=check)


def test_a_refused_architecture_is_reported_once_and_a_pruner_that_refuses_all_fails():
    outcomes = list(conformance(refusing("{}: only for butterflies", any), architectures=["llama", "gpt2"]))
    assert [o.status for o in outcomes] == ["passed", "refused", "refused", "failed"]
    assert "only for butterflies" in outcomes[1].detail
    assert "llama, gpt2 was refused" in outcomes[-1].detail


@pytest.mark.parametrize(
    "refused",
    [
        lambda patterns: any("down_proj" not in n for n in patterns),
        lambda patterns: any(hasattr(p, "of") for p in patterns.values()),
        lambda patterns: {n.rsplit(".", 1)[-1] for n in patterns} != {"q_proj", "k_proj", "v_proj"},
    ],
    ids=["other linears", "N:M", "query, key and value apart"],
)
def test_what_a_pruner_refuses_is_not_asked_of_it(refused):
    asked = Subject(refusing("{}: not these", refused), Options(), "llama")
    for check in (PLANS, EXACT):
        PRUNER_CHECKS[check](asked)


class Misspells(Base):
    def scores(self, block, patterns, stats):
        return {n: block.linears[n].wieght.abs() for n in patterns}


def fails_in_check(block, patterns, options):
    raise KeyError("rope_theta")


def test_one_mistake_is_told_once_with_the_authors_own_lines_and_what_was_probably_meant():
    names = (EXACT, "few tokens", "rows that are all zero")

    def found(of: PrunerSpec) -> list[Outcome]:
        return [_outcome(name, kind, partial(PRUNER_CHECKS[name], Subject(of, Options(), kind)))
                for kind in ("llama", "gpt2") for name in names]  # fmt: skip

    outcomes = found(spec(Misspells))
    assert by_cause(outcomes) == [outcomes]
    first, *lines = outcomes[0].detail.splitlines()
    assert re.search(r"^pruner 'mine' failed on model\.layers\.0: .*; did you mean 'weight'\? \(.*, line \d+\)$", first)
    assert all(re.match(r"    .*test_conformance.py:\d+ in ", told) for told in lines)
    assert "block.linears[n].wieght.abs()" in lines[-1]
    (group,) = by_cause(found(spec(check=fails_in_check)))
    raised = rf"KeyError: 'rope_theta'\n    {re.escape(__file__)}:\d+ in fails_in_check: raise KeyErr.*"
    assert re.fullmatch(raised, group[0].detail)
    apart = [Outcome("one", "llama", "failed", "x"), Outcome("two", "llama", "failed", "x"),
             Outcome("one", "gpt2", "failed", "y")]  # fmt: skip
    assert [len(group) for group in by_cause(apart)] == [2, 1]


def test_what_a_check_says_stands_in_the_error_with_pruner_and_architecture(monkeypatch):
    for name in PRUNER_CHECKS.keys() - {PLANS, "reconstructs"}:
        monkeypatch.delitem(PRUNER_CHECKS, name)
    said = r"pruner 'mine' fails 1 checks:\n  reconstructs \(llama\): it says reconstructs"
    with pytest.raises(ConformanceError, match=said):
        check_plugin(spec(reconstructs=True), architectures=["llama"])
    with pytest.raises(UnsupportedModelError, match="no tiny model 'lama'; did you mean 'llama'"):
        check_plugin(spec(), architectures=["lama"])
