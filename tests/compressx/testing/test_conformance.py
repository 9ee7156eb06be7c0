from __future__ import annotations

import itertools

import pytest
import torch
from pydantic import BaseModel, Field, field_validator
from tests.compressx.built_in import BUILT_IN

from compressx import FeatureNorms, Hessian, PruneResult, PrunerSpec, UnsupportedModelError, keep_mask, keep_masks
from compressx.testing import ConformanceError, check_pruner, conformance


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), zip(BUILT_IN, itertools.cycle(["gpt2", "gemma3", "mixtral"])))
def test_every_pruner_that_is_shipped_keeps_its_promises(name, other):
    check_pruner(BUILT_IN[name], architectures=["llama-tied", other])


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


def spec(build=Base, *, options: type[BaseModel] = Options, **fields) -> PrunerSpec:
    return PrunerSpec("mine", "for a test", options, build, **fields)


def failures(of: PrunerSpec, **given) -> dict[str, str]:
    given = {"architectures": ["llama"], **given}
    return {o.check: o.detail for o in conformance(of, **given) if o.status == "failed"}


def test_a_pruner_that_keeps_every_promise_passes_every_check():
    outcomes = list(conformance(spec(separable=True), architectures=["llama"]))
    assert {o.check for o in outcomes if o.status == "skipped"} == {
        "reconstructs", "refusals name the layer", "leaves what it prepared as it is"
    }  # fmt: skip
    assert {o.status for o in outcomes} == {"passed", "skipped"}
    assert len({o.check for o in outcomes}) >= 13


def test_a_pruner_that_prepares_passes_too_and_is_checked_for_it():
    outcomes = {o.check: o.status for o in conformance(spec(Prepares, separable=True), architectures=["llama"])}
    assert outcomes["leaves what it prepared as it is"] == "passed"
    assert "failed" not in outcomes.values()


class Approximate(Base):
    def prune(self, block, patterns, stats):
        scores = self.scores(block, patterns, stats)
        return {n: PruneResult(s > s.mean()) for n, s in scores.items()}


class WrongAxis(Base):
    def prune(self, block, patterns, stats):
        scores = self.scores(block, patterns, stats)
        nm = [n for n, p in patterns.items() if hasattr(p, "of")]
        kept = keep_masks(
            {n: s for n, s in scores.items() if n not in nm}, {n: p for n, p in patterns.items() if n not in nm}
        )
        kept |= {n: keep_mask(scores[n].T.contiguous(), patterns[n]).T for n in nm}
        return {n: PruneResult(keep) for n, keep in kept.items()}


class WrongGroup(Base):
    def prune(self, block, patterns, stats):
        scores = self.scores(block, patterns, stats)
        kept = {n: scores[n].flatten().argsort().argsort() for n in patterns}
        zeros = {n: int((~k).sum()) for n, k in keep_masks(scores, patterns).items()}
        return {n: PruneResult((kept[n] >= zeros[n]).view(scores[n].shape)) for n in patterns}


class ChangesAtZero(Base):
    def prune(self, block, patterns, stats):
        results = super().prune(block, patterns, stats)
        return {n: PruneResult(r.keep, block.linears[n].weight * 1.5) for n, r in results.items()}


class NotInHalf(Base):
    def prune(self, block, patterns, stats):
        results = super().prune(block, patterns, stats)
        large = {n: block.linears[n].weight.float() * 1e6 for n in results}
        return {n: PruneResult(r.keep, None if r.keep.all() else large[n]) for n, r in results.items()}


class Dice(Base):
    def scores(self, block, patterns, stats):
        return {n: torch.rand(block.linears[n].weight.shape) for n in patterns}


class UsesUp(Base):
    def scores(self, block, patterns, stats):
        scores = super().scores(block, patterns, stats)
        for n in patterns:
            stats[n].squares.fill_(0.0).index_fill_(0, torch.arange(8), 1.0)
        return scores


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


def observing(statistic):
    class Observing(Base):
        def observe(self, block, name):
            return statistic(block.linears[name].in_features)

    return Observing


class Copied(FeatureNorms):
    """Says that its squares are added up across processes, and hands out a copy of them."""

    def tensors(self):
        return {k: (t.clone(), how) for k, (t, how) in super().tensors().items()}


class Together(Base):
    """Says that it decides each linear alone, and does not."""

    def scores(self, block, patterns, stats):
        return {n: s.roll(len(patterns), dims=1) for n, s in super().scores(block, patterns, stats).items()}


class SeesOthers(Base):
    """Says that it decides each linear alone, and looks at the weights of all."""

    def scores(self, block, patterns, stats):
        whole = sum(float(x.weight.abs().sum()) for x in block.linears.values())
        scores = super().scores(block, patterns, stats)
        return {n: s + torch.arange(s.shape[1]) * (whole % 7) for n, s in scores.items()}


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


class Remembers(Base):
    """Draws from a generator of its own, which goes on from call to call."""

    def __init__(self, options):
        super().__init__(options)
        self.generator = torch.Generator().manual_seed(0)

    def scores(self, block, patterns, stats):
        return {n: torch.rand(block.linears[n].weight.shape, generator=self.generator) for n in patterns}


class KeepsWeights(Base):
    """Says that it reconstructs, and leaves the survivors as they are."""


class GradientsOn(Base):
    def prune(self, block, patterns, stats):
        torch.set_grad_enabled(True)
        return super().prune(block, patterns, stats)


class OtherMask(Base):
    def prune(self, block, patterns, stats):
        return {n: PruneResult(r.keep.roll(1, dims=1)) for n, r in super().prune(block, patterns, stats).items()}


class Hooks(Base):
    def prune(self, block, patterns, stats):
        block.module.register_forward_hook(lambda *_: None)
        return super().prune(block, patterns, stats)


class Trains(Base):
    def prune(self, block, patterns, stats):
        block.module.train()
        return super().prune(block, patterns, stats)


class Writes(Base):
    def prune(self, block, patterns, stats):
        results = super().prune(block, patterns, stats)
        for n, r in results.items():
            block.linears[n].weight.mul_(r.keep)
        return results


class Inverts(Base):
    def observe(self, block, name):
        return Hessian(block.linears[name].in_features)

    def scores(self, block, patterns, stats):
        factors = {n: torch.linalg.cholesky(stats[n].matrix.float()) for n in patterns}  # without damping
        return {n: block.linears[n].weight.float().square() * factors[n].diagonal() for n in patterns}


class Logarithm(Base):
    def scores(self, block, patterns, stats):
        return {n: s.log() for n, s in super().scores(block, patterns, stats).items()}


class ReadsValues(Base):
    def observe(self, block, name):
        return FeatureNorms(int(block.linears[name].weight.abs().sum() * 0) + block.linears[name].in_features)


SHARED = FeatureNorms(64)


@pytest.mark.parametrize(
    ("broken", "check", "says"),
    [
        (spec(Approximate), "exact sparsity for every pattern", "zeros of"),
        (spec(WrongAxis), "exact sparsity for every pattern", "groups do not lie along in_features"),
        (spec(WrongGroup), "exact sparsity for every pattern", "rows differ in their number of zeros"),
        (spec(ChangesAtZero), "sparsity zero changes nothing", "changed though all are kept"),
        (spec(NotInHalf), "bfloat16 and float16", "does not fit torch.float16"),
        (spec(Dice), "deterministic", "other global seeds, gave another mask"),
        (spec(UsesUp), "leaves statistics as they are", "asked again with the same statistics"),
        (spec(observing(MeanOfBatches)), "the same for every batch size", "not an average of batches"),
        (spec(observing(Copied)), "the same for several processes", "two processes"),
        (spec(Together, separable=True), "separable", "decided after the others it gave another mask"),
        (spec(SeesOthers, separable=True), "separable", "decided after the others it gave another mask"),
        (spec(Remembers), "leaves statistics as they are", "asked again with the same statistics"),
        (spec(UsesUpWhatItPrepared), "leaves what it prepared as it is", "with what it had prepared"),
        (spec(KeepsWeights, reconstructs=True), "reconstructs", "returns no new weights"),
        (spec(GradientsOn), "exact sparsity for every pattern", "leaves gradients switched on"),
        (spec(OtherMask, reconstructs=True), "reconstructs", "must return the mask that it was given"),
        (spec(Hooks), "leaves the model as it is", "1 hooks"),
        (spec(Trains), "leaves the model as it is", "training True"),
        (spec(Writes), "leaves the model as it is", "a pruner returns new weights"),
        (spec(Inverts), "few tokens", "not positive-definite"),
        (spec(Logarithm), "inputs that are always zero", "finite"),
        (spec(ReadsValues), "plans without weights", "meta"),
        (spec(observing(lambda _: SHARED)), "plans without weights", "fresh statistic each time"),
        (spec(observing(lambda _: "norms")), "plans without weights", "Statistic or None, got str"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_each_broken_promise_is_found_by_the_check_of_its_name(broken, check, says):
    found = failures(broken)
    assert says in found[check]


def test_what_a_check_says_stands_in_the_error_with_pruner_and_architecture():
    with pytest.raises(
        ConformanceError, match=r"pruner 'mine' fails 1 checks:\n  leaves the model as it is \(llama\): "
    ):
        check_pruner(spec(Hooks), architectures=["llama"])


class Strict(BaseModel):
    steps: int = Field(gt=0)


class Doubled(BaseModel):
    steps: int = 3

    @field_validator("steps")
    @classmethod
    def _twice(cls, value: int) -> int:
        return 2 * value


def test_options_without_a_default_have_to_be_given():
    assert "steps" in failures(spec(lambda _: Base(Options()), options=Strict))["options round-trip"]
    assert not failures(spec(lambda _: Base(Options()), options=Strict), options={"steps": 3})


def test_options_that_are_read_back_as_others_are_found():
    found = failures(spec(lambda _: Base(Options()), options=Doubled), options={"steps": 4})
    assert "read back from JSON differ" in found["options round-trip"]


def refuse(block, patterns):
    raise UnsupportedModelError(f"{block.fqn}: only for butterflies")


def refuse_all_but_down(block, patterns):
    if any("down_proj" not in n for n in patterns):
        raise UnsupportedModelError(f"{block.fqn}: only down_proj")


def test_a_refused_architecture_is_reported_once_and_a_pruner_that_refuses_all_fails():
    outcomes = list(conformance(spec(check=refuse), architectures=["llama", "gpt2"]))
    assert [o.status for o in outcomes] == ["passed", "refused", "refused", "failed"]
    assert "only for butterflies" in outcomes[1].detail
    assert "llama, gpt2 was refused" in outcomes[-1].detail


def test_a_pruner_of_some_linears_is_checked_on_those_that_it_takes():
    assert not failures(spec(check=refuse_all_but_down))


def test_a_check_that_raises_anything_else_than_a_refusal_fails():
    def check(block, patterns):
        raise KeyError("rope_theta")

    assert "KeyError: 'rope_theta'" in failures(spec(check=check))["plans without weights"]


def test_a_refusal_that_does_not_say_which_layer_is_found():
    def check(block, patterns):
        if any("up_proj" in n for n in patterns):
            raise UnsupportedModelError("no gates, please")

    found = failures(spec(check=check))["refusals name the layer"]
    assert "up_proj, 50%" in found
    assert "names no layer: no gates, please" in found


def test_a_misspelt_option_is_refused_as_in_a_recipe():
    said = failures(spec(), options={"powr": 2.0})["options round-trip"]
    assert "powr" in said
    assert "did you mean 'power'?" in said


def refuse_nm(block, patterns):
    if any(hasattr(p, "of") for p in patterns.values()):
        raise UnsupportedModelError(f"{block.fqn}: no N:M here")


def test_patterns_that_check_refuses_are_not_asked_for():
    assert not failures(spec(check=refuse_nm))


def refuse_pairs(block, patterns):
    if {n.rsplit(".", 1)[-1] for n in patterns} != {"q_proj", "k_proj", "v_proj"}:
        raise UnsupportedModelError(f"{block.fqn}: query, key and value together, and nothing else")


def test_kinds_that_only_go_together_are_found():
    assert not failures(spec(check=refuse_pairs))


def test_an_architecture_that_is_none_is_the_callers_mistake():
    with pytest.raises(UnsupportedModelError, match="no tiny model 'lama'; did you mean 'llama'"):
        check_pruner(spec(), architectures=["lama"])


def test_options_with_another_name_in_recipes_are_read_back_by_it():
    class Named(BaseModel):
        steps: int = Field(3, alias="max-steps")

    assert not failures(spec(lambda _: Base(Options()), options=Named), options={"max-steps": 4})
