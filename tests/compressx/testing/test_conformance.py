from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from pydantic import BaseModel, Field, field_validator
from tests.compressx.built_in import BUILT_IN
from tests.compressx.testing.promises import Base, Options, broken_promise

from compressx import FeatureNorms, Hessian, PruneResult, PrunerSpec, UnsupportedModelError, keep_masks
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


def spec(build=Base, *, options: type[BaseModel] = Options, **fields) -> PrunerSpec:
    return PrunerSpec("mine", "for a test", options, build, **fields)


def failures(of: PrunerSpec, **given) -> dict[str, str]:
    given = {"architectures": ["llama"], **given}
    return {o.check: o.detail for o in conformance(of, **given) if o.status == "failed"}


def test_a_pruner_that_keeps_every_promise_passes_every_check():
    outcomes = list(conformance(spec(separable=True), architectures=["llama"]))
    assert {o.check for o in outcomes if o.status == "skipped"} == {
        "reconstructs", "refusals name the layer", "leaves what it prepared as it is", "chooses blocks",
    }  # fmt: skip
    assert {o.status for o in outcomes} == {"passed", "skipped"}
    assert len({o.check for o in outcomes}) >= 18


def test_a_pruner_that_prepares_passes_too_and_is_checked_for_it():
    outcomes = {o.check: o.status for o in conformance(spec(Prepares, separable=True), architectures=["llama"])}
    assert outcomes["leaves what it prepared as it is"] == "passed"
    assert "failed" not in outcomes.values()


def deciding(decide):
    class Deciding(Base):
        def prune(self, block, patterns, stats):
            return {n: PruneResult(keep) for n, keep in decide(self.scores(block, patterns, stats), patterns).items()}

    return Deciding


def wrong_group(scores, patterns):
    zeros = {n: int((~k).sum()) for n, k in keep_masks(scores, patterns).items()}
    return {n: (s.flatten().argsort().argsort() >= zeros[n]).view(s.shape) for n, s in scores.items()}


def scoring(change):
    class Scoring(Base):
        def scores(self, block, patterns, stats):
            return change(super().scores(block, patterns, stats), block, stats)

    return Scoring


def uses_up(scores, block, stats):
    for statistic in stats.values():
        statistic.squares.fill_(0.0).index_fill_(0, torch.arange(8), 1.0)
    return scores


class Remembers(Base):
    """Draws from a generator of its own, which goes on from call to call."""

    def __init__(self, options):
        super().__init__(options)
        self.generator = torch.Generator().manual_seed(0)

    def scores(self, block, patterns, stats):
        return {n: torch.rand(block.linears[n].weight.shape, generator=self.generator) for n in patterns}


class Inverts(Base):
    def observe(self, block, name):
        return Hessian(block.linears[name].in_features)

    def scores(self, block, patterns, stats):
        factors = {n: torch.linalg.cholesky(stats[n].matrix.float()) for n in patterns}  # without damping
        return {n: block.linears[n].weight.float().square() * factors[n].diagonal() for n in patterns}


def answering(change):
    class Answering(Base):
        def prune(self, block, patterns, stats):
            results = super().prune(block, patterns, stats)
            return change(results, block) or results

    return Answering


def changes_at_zero(results, block):
    return {n: PruneResult(r.keep, block.linears[n].weight * 1.5) for n, r in results.items()}


def not_in_half(results, block):
    large = {n: block.linears[n].weight.float() * 1e6 for n in results}
    return {n: PruneResult(r.keep, None if r.keep.all() else large[n]) for n, r in results.items()}


def other_mask(results, block):
    return {n: PruneResult(r.keep.roll(1, dims=1)) for n, r in results.items()}


def gradients_on(results, block):
    torch.set_grad_enabled(True)


def hooks(results, block):
    block.module.register_forward_hook(lambda *_: None)


def trains(results, block):
    block.module.train()


def writes(results, block):
    for n, r in results.items():
        block.linears[n].weight.mul_(r.keep)


def observing(statistic):
    class Observing(Base):
        def observe(self, block, name):
            return statistic(block.linears[name])

    return Observing


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


class Prepares(Base):
    def prepare(self, block, name, statistic):
        return statistic.norms.pow(self.power)

    def prune(self, block, patterns, stats, prepared):
        scores = {n: block.linears[n].weight.float().abs() * norms for n, norms in prepared.items()}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}


class UsesUpWhatItPrepared(Prepares):
    def prune(self, block, patterns, stats, prepared):
        results = super().prune(block, patterns, stats, prepared)
        for norms in prepared.values():
            norms.fill_(0.0).index_fill_(0, torch.arange(8), 1.0)
        return results


def doubles(scores, block, stats):
    """Overwrite statistics so that no mask changes."""
    for statistic in stats.values():
        statistic.squares.mul_(4.0)
    return scores


def divides_by_rows(scores, block, stats):
    return {n: s / block.linears[n].weight.abs().sum(dim=1, keepdim=True) for n, s in scores.items()}


def divides_by_norms(scores, block, stats):
    return {n: s / stats[n].norms for n, s in scores.items()}


def config(results, block):
    block.config.num_attention_heads = 2


def attribute(results, block):
    block.module.mlp.up_proj.seen = True


def tensor_hook(results, block):
    block.module.mlp.up_proj.weight.register_hook(lambda gradient: gradient)


class MultipliesByTheWeight(FeatureNorms):
    """Takes the input to have the weight's dtype."""

    def __init__(self, linear):
        super().__init__(linear.in_features)
        self.weight = linear.weight

    def update(self, x):
        assert (x @ self.weight.T).isfinite().all()
        super().update(x)


MODEL = "leaves the model as it is"
SHARED = FeatureNorms(64)
APART = "decided after the others it gave another mask"


@pytest.mark.parametrize(
    ("broken", "check", "says"),
    [
        (spec(deciding(lambda scores, _: {n: s > s.mean() for n, s in scores.items()})),
         "exact sparsity for every pattern", "32 of 64 input features are kept, but"),
        (spec(deciding(wrong_group)), "exact sparsity for every pattern", "keep others: the first, row 0, keeps"),
        (spec(answering(changes_at_zero)), "sparsity zero changes nothing", "changed though all are kept"),
        (spec(answering(not_in_half)), "bfloat16 and float16", "infinite in the model's torch.float16"),
        (spec(observing(MultipliesByTheWeight)), "matmuls narrower than the weights", "same dtype"),
        (spec(scoring(lambda scores, *_: {n: torch.rand(s.shape) for n, s in scores.items()})),
         "deterministic", "other global seeds, gave another mask"),
        (spec(scoring(uses_up)), "leaves statistics as they are", "asked again with the same statistics"),
        (spec(observing(MeanOfBatches)), "the same for every batch size", "not an average of batches"),
        (spec(observing(Copied)), "the same for several processes", "two processes"),
        (spec(ScalesByTheMean), "the same for every batch size", "gave new weights that are "),
        (spec(scoring(lambda scores, *_: {n: s.roll(len(scores), dims=1) for n, s in scores.items()}), separable=True),
         "separable", APART),
        (spec(Remembers), "leaves statistics as they are", "asked again with the same statistics"),
        (spec(UsesUpWhatItPrepared), "leaves what it prepared as it is", "with what it had prepared"),
        (spec(Base, reconstructs=True), "reconstructs", "returns no new weights"),
        (spec(answering(gradients_on)), "exact sparsity for every pattern", "leaves gradients switched on"),
        (spec(answering(other_mask), reconstructs=True), "reconstructs", "must return the mask that it was given"),
        (spec(scoring(doubles)), "leaves statistics as they are", "prune changed squares of its statistic; other"),
        (spec(answering(hooks)), MODEL, "was 'nothing'; call remove() of its handle"),
        (spec(answering(tensor_hook)), MODEL, "up_proj.weight: _backward_hooks["),
        (spec(answering(trains)), MODEL, "training is True, was False; put it back in a `finally`"),
        (spec(answering(attribute)), MODEL, "mlp.up_proj: seen is True, was 'nothing'; keep it in the pruner"),
        (spec(answering(config)), MODEL, "config: num_attention_heads is 2, was 4; the model computes"),
        (spec(scoring(divides_by_rows)), "rows that are all zero", "a row of zeros has the sum, the norm"),
        (spec(scoring(divides_by_norms)), "inputs that are always zero", "divide by it plus a small number"),
        (spec(answering(writes)), "leaves the model as it is", "a pruner returns new weights"),
        (spec(Inverts), "few tokens", "not positive-definite"),
        (spec(scoring(lambda scores, *_: {n: s.log() for n, s in scores.items()})),
         "inputs that are always zero", "finite"),
        (spec(observing(lambda x: FeatureNorms(int(x.weight.abs().sum() * 0) + x.in_features))),
         "plans without weights", "meta"),
        (spec(observing(lambda _: SHARED)), "plans without weights", "fresh statistic each time"),
        (spec(observing(lambda _: "norms")), "plans without weights", "Statistic or None, got str"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_each_broken_promise_is_found_by_the_check_of_its_name(broken, check, says):
    assert says in broken_promise(broken, check, "llama")


def test_what_a_check_says_stands_in_the_error_with_pruner_and_architecture():
    with pytest.raises(
        ConformanceError, match=r"pruner 'mine' fails 1 checks:\n  reconstructs \(llama\): it says reconstructs"
    ):
        check_plugin(spec(reconstructs=True), architectures=["llama"])


class Strict(BaseModel):
    steps: int = Field(gt=0)


class Named(BaseModel):
    steps: int = Field(3, alias="max-steps")


class Doubled(BaseModel):
    steps: int = 3

    @field_validator("steps")
    @classmethod
    def _twice(cls, value: int) -> int:
        return 2 * value


@pytest.mark.parametrize(
    ("options", "given", "says"),
    [
        (Strict, {}, ["steps"]),  # has no default
        (Doubled, {"steps": 4}, ["read back from JSON differ"]),
        (Options, {"powr": 2.0}, ["powr", "did you mean 'power'?"]),
    ],
)
def test_options_that_are_not_as_in_a_recipe_are_found(options, given, says):
    found = failures(spec(lambda _: Base(Options()), options=options), options=given)["options round-trip"]
    assert all(word in found for word in says), found


@pytest.mark.parametrize(("options", "given"), [(Strict, {"steps": 3}), (Named, {"max-steps": 4})])
def test_options_are_given_and_read_back_by_their_names_in_recipes(options, given):
    assert not failures(spec(lambda _: Base(Options()), options=options), options=given)


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
    assert not failures(refusing("{}: not these", refused))


def test_a_check_that_raises_anything_else_than_a_refusal_fails():
    def check(block, patterns, options):
        raise KeyError("rope_theta")

    assert "KeyError: 'rope_theta'" in failures(spec(check=check))["plans without weights"]


class Misspells(Base):
    def scores(self, block, patterns, stats):
        return {n: block.linears[n].wieght.abs() for n in patterns}


def test_one_mistake_is_told_once_with_the_authors_own_lines_and_what_was_probably_meant():
    names = ("exact sparsity for every pattern", "few tokens", "rows that are all zero")
    found = [
        _outcome(name, architecture, partial(PRUNER_CHECKS[name], Subject(spec(Misspells), Options(), architecture)))
        for architecture in ("llama", "gpt2")
        for name in names
    ]
    assert {outcome.status for outcome in found} == {"failed"}
    (group,) = by_cause(found)
    assert group == found
    first, *lines = group[0].detail.splitlines()
    assert re.search(r"^pruner 'mine' failed on model\.layers\.0: .*; did you mean 'weight'\? \(.*, line \d+\)$", first)
    assert all(re.match(r"    .*(promises|test_conformance).py:\d+ in ", told) for told in lines)
    assert "block.linears[n].wieght.abs()" in lines[-1]
    assert "divide by it" not in "".join(outcome.detail for outcome in found), "advice for another mistake"


def test_an_exception_of_check_has_the_authors_line_and_other_failures_are_told_apart():
    def check(block, patterns, options):
        raise KeyError("rope_theta")

    asked = Subject(spec(check=check), Options(), "llama")
    found = [_outcome(name, "llama", partial(PRUNER_CHECKS[name], asked)) for name in ("few tokens", "deterministic")]
    (group,) = by_cause(found)
    assert re.fullmatch(
        rf"KeyError: 'rope_theta'\n    {re.escape(__file__)}:\d+ in check: raise KeyErr.*", group[0].detail
    )
    apart = [Outcome("one", "llama", "failed", "x"), Outcome("two", "llama", "failed", "x"),
             Outcome("one", "gpt2", "failed", "y")]  # fmt: skip
    assert [len(group) for group in by_cause(apart)] == [2, 1]


def flipped(scores, block, stats):
    return {n: -s for n, s in scores.items()}


def drawn(scores, block, stats):
    return {n: torch.rand(s.shape, generator=torch.Generator().manual_seed(len(n))) for n, s in scores.items()}


CHANCE = "no worse than random masks"


@pytest.mark.parametrize("fields", [{}, {"groups": ()}, {"units": ("neurons",), "groups": (), "nm": False}], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_scores_with_the_wrong_sign_are_worse_than_random_ones_and_random_ones_are_not(architecture, fields):
    says = broken_promise(spec(scoring(flipped), **fields), CHANCE, architecture)
    assert re.search(r"predictions diverge \S+ times as far as with random masks: is the sign of its scores", says)
    for pruner in (Base, scoring(drawn)):
        PRUNER_CHECKS[CHANCE](Subject(spec(pruner, **fields), Options(), architecture))


def test_a_refusal_that_does_not_say_which_layer_is_found():
    gates = refusing("no gates, please", lambda patterns: any("up_proj" in n for n in patterns))
    found = failures(gates)["refusals name the layer"]
    assert "up_proj, 50%" in found
    assert "names no layer: no gates, please" in found


def test_an_architecture_that_is_none_is_the_callers_mistake():
    with pytest.raises(UnsupportedModelError, match="no tiny model 'lama'; did you mean 'llama'"):
        check_plugin(spec(), architectures=["lama"])
