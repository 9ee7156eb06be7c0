"""What a pruner promises, as checks that anyone's pruner can be put through.

Each check runs on a tiny random model of each architecture, on the path that a run takes: the host observes, asks, and
refuses what breaks the contract. What a pruner may refuse it has to refuse in `PrunerSpec.check`, while a recipe is
planned; a model that it accepted there and fails on later is a failure here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any, Literal, TypeAlias

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.nn.utils import parametrize

from compressx.architecture import survey, text_config
from compressx.blocks.decide import decide, gather, write
from compressx.blocks.sensitivity import by_loss, of_model
from compressx.errors import CompressxError, UnsupportedModelError, did_you_mean
from compressx.models.access import InMemory
from compressx.models.capture import capture_calls, replay
from compressx.patterns import NM, Unstructured, keep_masks, zeros_in
from compressx.planning.plan import PlannedRule
from compressx.pruner import Block, Pruner, PruneResult, PrunerSpec, Sensitivity, Statistic
from compressx.recipe.validation import validate_options
from compressx.testing.models import TINY_CONFIGS, tiny_model, tiny_tokens

Status: TypeAlias = Literal["passed", "failed", "refused", "skipped"]

ARCHITECTURES = ("llama", "gpt2", "gemma3", "llama-tied", "mixtral")
"""What pruners are checked on when nothing else is said."""

SAME = 0.98
"""Fraction of mask bits that may not change with the order of sums: near ties change sides, nothing else does."""


@dataclass(frozen=True)
class Outcome:
    """What one check found on one architecture.

    Attributes:
        check: its name, in words.
        architecture: a key of `TINY_CONFIGS`; empty for checks that need no model.
        status: `refused` when the pruner said, while planning, that it does not do this model; `skipped` when it
            promises nothing of the kind.
        detail: what was expected and found, or why not.
    """

    check: str
    architecture: str
    status: Status
    detail: str = ""


class ConformanceError(AssertionError):
    """A pruner that breaks its contract; the message lists every check that failed."""


def known_architectures(names: Sequence[str]) -> Sequence[str]:
    """Return architectures to check on: those named, or the usual ones.

    Raises:
        UnsupportedModelError: a name that is none.
    """
    if wrong := [name for name in names if name not in TINY_CONFIGS]:
        raise UnsupportedModelError(f"no tiny model {wrong[0]!r}; {did_you_mean(wrong[0], TINY_CONFIGS)}")
    return names or ARCHITECTURES


def check_pruner(
    spec: PrunerSpec, *, options: Mapping[str, Any] | None = None, architectures: Sequence[str] = ARCHITECTURES
) -> None:
    """Put a pruner through every check; for its author's tests.

    Args:
        spec: what the plugin offers.
        options: as a recipe would give them; needed when some have no default.
        architectures: keys of `TINY_CONFIGS`. One at least has to be accepted.

    Raises:
        ConformanceError: a check that failed, or no architecture that the pruner accepts.
    """
    outcomes = list(conformance(spec, options=options, architectures=architectures))
    failed = [o for o in outcomes if o.status == "failed"]
    if failed:
        lines = [f"  {o.check}{f' ({o.architecture})' if o.architecture else ''}: {o.detail}" for o in failed]
        raise ConformanceError("\n".join([f"pruner {spec.name!r} fails {len(failed)} checks:", *lines]))


def conformance(
    spec: PrunerSpec, *, options: Mapping[str, Any] | None = None, architectures: Sequence[str] = ARCHITECTURES
) -> Iterator[Outcome]:
    """Put a pruner through every check, one after the other.

    Args:
        spec: what the plugin offers.
        options: as a recipe would give them.
        architectures: keys of `TINY_CONFIGS`.

    Yields:
        What each check found. Where the pruner refuses an architecture, one outcome says so for all.
    """
    known_architectures(architectures)
    first = _outcome("options round-trip", "", partial(_options_round_trip, spec, options or {}))
    yield first
    if first.status == "failed":
        return
    validated = _validated(spec, options or {})
    refused = 0
    for architecture in architectures:
        subject = _Subject(spec, validated, architecture)
        plans = _outcome("plans without weights", architecture, lambda s=subject: _plans(s))  # type: ignore[misc]
        yield plans
        refused += plans.status == "refused"
        if plans.status != "passed":
            continue
        for name, check in CHECKS.items():
            yield _outcome(name, architecture, partial(check, subject))
    if refused == len(architectures):
        yield Outcome("accepts a model", "", "failed", f"every one of {', '.join(architectures)} was refused")


def _outcome(name: str, architecture: str, check: Callable[[], None]) -> Outcome:
    try:
        check()
    except _RefusedError as refusal:
        return Outcome(name, architecture, "refused", str(refusal))
    except _NoSuchPromiseError as reason:
        return Outcome(name, architecture, "skipped", str(reason))
    except (AssertionError, CompressxError) as error:
        return Outcome(name, architecture, "failed", str(error))
    except Exception as error:  # noqa: BLE001 - a pruner may raise anything, and that is what is looked for
        return Outcome(name, architecture, "failed", f"{type(error).__name__}: {error}")
    return Outcome(name, architecture, "passed")


class _RefusedError(Exception):
    """The pruner refuses the architecture, as it may."""


class _NoSuchPromiseError(Exception):
    """There is nothing to check."""


class _NoOptions(BaseModel):
    pass


class _BySize:
    """Selects the largest weights: what a reconstructing pruner is given a mask by."""

    def observe(self, block: Block, name: str) -> None:
        """Ask for nothing."""

    def prune(self, block: Block, patterns: Mapping[str, Any], stats: Mapping[str, Statistic]) -> Any:  # noqa: ARG002
        scores = {n: block.linears[n].weight.float().abs() for n in patterns}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}


_SELECTOR = PrunerSpec("by size", "the largest weights", _NoOptions, lambda _: _BySize())


@dataclass(frozen=True, eq=False)
class _Scene:
    """A block of a model with what a run would know of it, and the pruners that a run would build once."""

    model: Any
    block: Block
    passes: Sequence[Callable[[], Any]]
    built: dict[PlannedRule, tuple[Pruner, Pruner | None]] = field(default_factory=dict)

    def pruners(self, rule: PlannedRule) -> tuple[Pruner, Pruner | None]:
        """Return a rule's pruners, the same ones each time."""
        if rule not in self.built:
            self.built[rule] = rule.build()
        return self.built[rule]


class _Subject:
    """A pruner on one architecture."""

    def __init__(self, spec: PrunerSpec, options: BaseModel, architecture: str) -> None:
        self.spec = spec
        self.architecture = architecture
        self.rule = PlannedRule(0, spec, options, None, None)

    @cached_property
    def patterns(self) -> list[Unstructured | NM]:
        """What the pruner claims to support, but for patterns that its `check` refuses on this architecture."""
        claimed: list[Unstructured | NM] = [
            *(Unstructured(sparsity, group) for group in self.spec.groups for sparsity in (0.5, 0.3)),
            *([NM(2, 4), NM(4, 8), NM(1, 4)] if self.spec.nm else []),
        ]
        check = self.spec.check
        if check is None:
            return claimed
        block, taken = self.scene(weights=False).block, []
        for pattern in claimed:
            with suppress(UnsupportedModelError):
                check(block, dict.fromkeys(self.names, pattern))
                taken.append(pattern)
        return taken

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The linears of the first block that the pruner takes: all, or the largest kinds that it accepts together."""
        block = self.scene(weights=False).block
        kinds: dict[str, list[str]] = {}
        for name in block.linears:
            kinds.setdefault(name.removeprefix(f"{block.fqn}.").rstrip("0123456789"), []).append(name)
        if self.spec.check is None:
            return tuple(block.linears)
        why = ""
        for size in range(len(kinds), 0, -1):
            for some in combinations(kinds, size):
                names = [name for kind in some for name in kinds[kind]]
                try:
                    self.spec.check(block, dict.fromkeys(names, Unstructured(0.5, self.spec.groups[0])))
                except CompressxError as error:
                    why = why or str(error)
                else:
                    return tuple(names)
        raise _RefusedError(why)

    def scene(
        self, *, weights: bool = True, dtype: torch.dtype = torch.float32, batches: Sequence[int] = (4, 4),
        tokens: Tensor | None = None, change: Callable[[Any], None] | None = None,
    ) -> _Scene:  # fmt: skip
        """Make a fresh model and run it up to its first block, on batches of so many sequences."""
        model = tiny_model(self.architecture, dtype=dtype)
        if change is not None:
            with torch.no_grad():
                change(model)
        found = survey(model)
        fqn, module = next(iter(found.blocks.items()))
        linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")}
        if not weights:
            model.to("meta")
            return _Scene(model, Block(0, fqn, module, linears, (), text_config(model)), ())
        parts = torch.split(tiny_tokens() if tokens is None else tokens, list(batches))
        with torch.no_grad():
            states, calls = capture_calls(model, found.blocks, parts)
        runs = [partial(lambda x, call: replay(module, x, call), call=call) for call in calls[fqn]]
        losses = self.rule.losses
        reacting = {n: linears[n] for n in self.names} if losses else {}
        tokens_read = self.rule.reads_tokens
        whole = of_model(InMemory(model), found, set(reacting), parts, tokens=tokens_read) if "model" in losses else {}
        sensitivities = by_loss(whole, reacting if "block" in losses else {}, runs, states)
        block = Block(0, fqn, module, linears, tuple(calls[fqn]), text_config(model), sensitivities)
        return _Scene(model, block, [partial(run, x) for run, x in zip(runs, states, strict=True)])

    @torch.no_grad()
    def gathered(self, scene: _Scene, rule: PlannedRule | None = None) -> dict[str, dict[str, Statistic]]:
        """Return the statistics that the pruner asks for."""
        rule = rule or self.rule
        return gather(scene.block, {rule: self.names}, {rule: scene.pruners(rule)}, scene.passes)

    @torch.no_grad()
    def decided(
        self, scene: _Scene, pattern: Unstructured | NM, stats: Mapping[str, Mapping[str, Statistic]] | None = None,
        *, names: Collection[str] | None = None, rule: PlannedRule | None = None,
    ) -> Mapping[str, PruneResult]:  # fmt: skip
        """Ask the pruner, as the host does."""
        rule = rule or self.rule
        stats = self.gathered(scene, rule) if stats is None else stats
        patterns = dict.fromkeys(names or self.names, pattern)
        results = decide(rule, scene.pruners(rule), scene.block, patterns, {n: stats[n] for n in patterns})
        _expect(not torch.is_grad_enabled(), "it leaves gradients switched on")
        return results


def _validated(spec: PrunerSpec, given: Mapping[str, Any]) -> BaseModel:
    return validate_options(spec.options, given, lambda *loc: ".".join(["options", *map(str, loc)]))


def _options_round_trip(spec: PrunerSpec, given: Mapping[str, Any]) -> None:
    options = _validated(spec, given)
    again = _validated(spec, options.model_dump(mode="json", by_alias=True))
    _expect(again == options, f"options read back from JSON differ: {again!r}, expected {options!r}")


def _plans(subject: _Subject) -> None:
    scene = subject.scene(weights=False)
    pruner = subject.spec.build(subject.rule.options)
    for name in subject.names:
        with torch.device("meta"):  # as the planner calls it
            statistic, again = pruner.observe(scene.block, name), pruner.observe(scene.block, name)
        _expect(
            statistic is None or isinstance(statistic, Statistic),
            f"observe({name!r}) must return a Statistic or None, got {type(statistic).__name__}",
        )
        _expect(
            statistic is None or statistic is not again,
            f"observe({name!r}) must return a fresh statistic each time",
        )


def _exact(subject: _Subject) -> None:
    scene = subject.scene()
    stats = subject.gathered(scene)
    for pattern in subject.patterns:
        results = subject.decided(scene, pattern, stats)
        for name, result in results.items():
            wanted = zeros_in(pattern, *result.keep.shape)
            zeros = int((~result.keep).sum())
            _expect(wanted is None or zeros == wanted, f"{name}, {pattern}: {zeros} zeros, expected {wanted}")
            if isinstance(pattern, NM):
                kept = result.keep.view(len(result.keep), -1, pattern.of).sum(dim=2)
                _expect(bool((kept == pattern.keep).all()), f"{name}, {pattern}: groups do not lie along in_features")
            elif pattern.group == "row":
                each = (~result.keep).sum(dim=1)
                _expect(bool((each == each[0]).all()), f"{name}, {pattern}: rows differ in their number of zeros")


def _dense(subject: _Subject) -> None:
    patterns: list[Unstructured | NM] = [Unstructured(0.0, group) for group in subject.spec.groups]
    patterns += [NM(4, 4)] if subject.spec.nm else []
    scene = subject.scene()
    for pattern in patterns:
        for name, result in subject.decided(scene, pattern).items():
            weight = scene.block.linears[name].weight
            _expect(bool(result.keep.all()), f"{name}, {pattern}: a weight is dropped")
            same = result.weight is None or torch.equal(result.weight.to(weight.dtype), weight)
            _expect(same, f"{name}, {pattern}: weights are changed though all are kept")


def _dtypes(subject: _Subject) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        scene = subject.scene(dtype=dtype)
        for name, result in subject.decided(scene, subject.patterns[0]).items():
            weight = scene.block.linears[name].weight
            _expect(weight.dtype == dtype, f"{name}: the model's {dtype} became {weight.dtype}")
            if result.weight is not None:
                kept = result.weight.to(dtype)[result.keep]
                _expect(bool(torch.isfinite(kept).all()), f"{name}: a weight does not fit {dtype}")


def _deterministic(subject: _Subject) -> None:
    for pattern in (subject.patterns[0], subject.patterns[-1]):
        runs = []
        for seed in (0, 1):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                runs.append(subject.decided(subject.scene(), pattern))
        _expect_equal(runs[0], runs[1], f"{pattern}: two runs of one recipe, with other global seeds,")


def _repeatable(subject: _Subject) -> None:
    scene = subject.scene()
    stats = subject.gathered(scene)
    first = subject.decided(scene, subject.patterns[0], stats)
    subject.decided(scene, subject.patterns[-1], stats)
    again = subject.decided(scene, subject.patterns[0], stats)
    _expect_equal(first, again, "asked again with the same statistics, as allocation does, it")


def _batches(subject: _Subject) -> None:
    pattern = subject.patterns[0]
    tokens = tiny_tokens()
    tokens[-1] = 7  # one sequence is nothing like the others, so that its weight shows
    whole = subject.decided(subject.scene(batches=(8,), tokens=tokens), pattern)
    for batches in ((7, 1), (1,) * 8):
        results = subject.decided(subject.scene(batches=batches, tokens=tokens), pattern)
        _expect_alike(whole, results, f"batches of {batches}")


def _processes(subject: _Subject) -> None:
    """Gather two halves apart and add them up, as two processes do."""
    scene = subject.scene(batches=(4, 4))
    whole = subject.gathered(scene)
    halves: list[dict[str, dict[str, Statistic]]] = []
    for half in (0, 1):
        reacting = {
            loss: {n: Sensitivity(s.rows, s.tokens[half : half + 1]) for n, s in by_name.items()}
            for loss, by_name in scene.block.sensitivities.items()
        }
        block = replace(scene.block, calls=scene.block.calls[half : half + 1], sensitivities=reacting)
        halves.append(subject.gathered(_Scene(scene.model, block, scene.passes[half : half + 1])))
    merged: dict[int, Statistic] = {}
    selector, _ = scene.pruners(subject.rule)
    for name, stats in halves[0].items():
        for role, mine in stats.items():
            if id(mine) not in merged:
                merged[id(mine)] = _added(mine, halves[1][name][role], partial(selector.observe, scene.block, name))
    pattern = subject.patterns[0]
    both = {name: {role: merged[id(mine)] for role, mine in stats.items()} for name, stats in halves[0].items()}
    added = subject.decided(scene, pattern, both)
    _expect_alike(subject.decided(scene, pattern, whole), added, "statistics of two processes, added up,")


def _added(mine: Statistic, other: Statistic, fresh: Callable[[], Statistic | None]) -> Statistic:
    """Combine what two processes gathered, as `Ranks.combine` does."""
    tensors, others = mine.tensors(), other.tensors()
    joined = []
    for key, (tensor, how) in tensors.items():
        theirs = others[key][0]
        if how == "sum":
            tensor.add_(theirs)
        elif how == "max":
            torch.maximum(tensor, theirs, out=tensor)
        else:
            joined += [tensor, theirs]
    if not joined:
        return mine
    merged = fresh()
    _expect(merged is not None, "observe returned a statistic once, and then None")
    assert merged is not None  # noqa: S101 - for the type checker
    for part in joined:
        merged.update(part)
    return merged


def _separable(subject: _Subject) -> None:
    if not subject.spec.separable:
        raise _NoSuchPromiseError("it does not say separable")
    scene = subject.scene()
    stats = subject.gathered(scene)
    joint = {p for p in subject.patterns if isinstance(p, Unstructured) and p.group == "joint"}
    apart = [p for p in subject.patterns if p not in joint]
    if not apart:
        raise _NoSuchPromiseError("it says separable, and every group of its own is joint")
    for pattern in {apart[0], apart[-1]}:
        together = subject.decided(scene, pattern, stats)
        for name in subject.names:
            dense = {n: scene.block.linears[n].weight.clone() for n in subject.names if n != name}
            for other in dense:  # in a run these may be pruned already
                write(scene.block.linears[other], together[other])
            alone = subject.decided(scene, pattern, stats, names=[name])
            _expect_equal({name: together[name]}, alone, f"{pattern}: decided after the others it")
            for other, weight in dense.items():
                scene.block.linears[other].weight.copy_(weight)


def _reconstructs(subject: _Subject) -> None:
    if not subject.spec.reconstructs:
        raise _NoSuchPromiseError("it does not say reconstructs")
    rule = PlannedRule(0, _SELECTOR, _NoOptions(), subject.spec, subject.rule.options)
    scene = subject.scene()
    for pattern in (Unstructured(0.5, "row"), Unstructured(0.5, "layer")):
        results = subject.decided(scene, pattern, rule=rule)  # the host refuses another mask than it gave
        _expect(any(r.weight is not None for r in results.values()), "it says reconstructs, and returns no new weights")


def _untouched(subject: _Subject) -> None:
    scene = subject.scene()
    before = _state(scene.model)
    before_all = (torch.get_num_threads(), torch.get_default_dtype())
    weights = {n: t.clone() for n, t in _tensors(scene.model)}
    subject.decided(scene, subject.patterns[0])
    for name, tensor in _tensors(scene.model):
        _expect(
            torch.equal(tensor, weights[name]), f"{name} was changed; a pruner returns values, the host writes them"
        )
    for name, now in _state(scene.model).items():
        _expect(now == before[name], f"{name or 'the model'}: {now}, expected {before[name]} as before")
    after = (torch.get_num_threads(), torch.get_default_dtype())
    _expect(after == before_all, f"threads and default dtype are {after}, expected {before_all} as before")


def _tensors(model: Any) -> list[tuple[str, Tensor]]:
    """Return every parameter and buffer, those that no checkpoint holds too."""
    return [*model.named_parameters(), *model.named_buffers()]


def _state(model: Any) -> dict[str, str]:
    """Describe what a pruner could leave behind in each module."""
    told = {}
    for name, module in model.named_modules():
        hooks = sum(
            len(getattr(module, kind))
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        )
        mine = list(module.parameters(recurse=False))
        told[name] = (
            f"{hooks} hooks, training {module.training}, parametrized {parametrize.is_parametrized(module)}, "
            f"requires_grad {[p.requires_grad for p in mine]}, gradients {[p.grad is not None for p in mine]}"
        )
    return told


def _few_tokens(subject: _Subject) -> None:
    scene = subject.scene(batches=(1,), tokens=tiny_tokens(sequences=1, length=12))
    subject.decided(scene, subject.patterns[0])


def _dead_inputs(subject: _Subject) -> None:
    if subject.architecture != "llama":
        raise _NoSuchPromiseError("only Llama's norms are silenced")

    def kill(model: Any) -> None:
        model.model.layers[0].input_layernorm.weight[:7] = 0.0
        model.model.layers[0].post_attention_layernorm.weight[:7] = 0.0

    subject.decided(subject.scene(change=kill), subject.patterns[0])


CHECKS: Mapping[str, Callable[[_Subject], None]] = {
    "exact sparsity for every pattern": _exact,
    "sparsity zero changes nothing": _dense,
    "bfloat16 and float16": _dtypes,
    "deterministic": _deterministic,
    "leaves statistics as they are": _repeatable,
    "the same for every batch size": _batches,
    "the same for several processes": _processes,
    "separable": _separable,
    "reconstructs": _reconstructs,
    "leaves the model as it is": _untouched,
    "few tokens": _few_tokens,
    "inputs that are always zero": _dead_inputs,
}
"""By name; each raises when a pruner breaks what it promises."""


def _expect(kept: bool, broken: str) -> None:
    """Raise when a promise is not kept; an assert would be silent under `python -O`."""
    if not kept:
        raise AssertionError(broken)


def _expect_equal(a: Mapping[str, PruneResult], b: Mapping[str, PruneResult], what: str) -> None:
    for name, mine in a.items():
        _expect(torch.equal(mine.keep, b[name].keep), f"{name}: {what} gave another mask")
        one, other = (None if r.weight is None else r.weight[r.keep] for r in (mine, b[name]))
        same = one is other if one is None or other is None else torch.equal(one, other)
        _expect(same, f"{name}: {what} gave other weights")


def _expect_alike(a: Mapping[str, PruneResult], b: Mapping[str, PruneResult], what: str) -> None:
    for name, mine in a.items():
        same = float((mine.keep == b[name].keep).float().mean())
        _expect(
            same >= SAME,
            f"{name}: {what} gave a mask of which {same:.1%} is the same, expected {SAME:.0%} at least; a statistic "
            "has to be a sum, a maximum or a list over tokens, not an average of batches",
        )
