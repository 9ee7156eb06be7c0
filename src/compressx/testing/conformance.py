"""What plugins promise, as checks that anything a plugin offers can be put through.

Each check runs on a tiny random model of each architecture, on the path that a run takes: the host observes, asks, and
refuses what breaks the contract. What a plugin may refuse it has to refuse at first, a pruner in `PrunerSpec.check`,
while a recipe is planned; a model that it accepted there and fails on later is a failure here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from compressx.plugins.kinds import EVALUATOR, EXPORTER, PRUNER, TOKEN_SELECTOR, Kind
from compressx.recipe.validation import validate_options
from compressx.runtime.errors import (
    CompressxError,
    PluginError,
    UnsupportedModelError,
    did_you_mean,
    own_frames,
    said_by,
)  # fmt: skip
from compressx.testing.models import TINY_CONFIGS
from compressx.testing.pruners import PRUNER_CHECKS, plans
from compressx.testing.saved import EVALUATOR_CHECKS, EXPORTER_CHECKS, SavedSubject, can_measure, can_write
from compressx.testing.selectors import SELECTOR_CHECKS, SelectorSubject, asks
from compressx.testing.subject import NoSuchPromiseError, RefusedError, Subject, expect

Verdict: TypeAlias = Literal["passed", "failed", "refused", "skipped"]

ARCHITECTURES = ("llama", "gpt2", "gemma3", "llama-tied", "mixtral")
"""What plugins are checked on when nothing else is said."""


@dataclass(frozen=True)
class Outcome:
    """What one check found on one architecture.

    Attributes:
        check: its name, in words.
        architecture: a key of `TINY_CONFIGS`; empty for checks that need no model.
        status: `refused` when the plugin, or the host for it, said at first that it does not do this model; `skipped`
            when it promises nothing of the kind.
        detail: what was expected and found, or why not; below it the plugin's own lines that raised.
        cause: what failures have in common that are one mistake: an exception, or the check.
    """

    check: str
    architecture: str
    status: Verdict
    detail: str = ""
    cause: str = ""

    def __str__(self) -> str:
        """Name the check and the architecture, and say what was found."""
        return f"{self.check}{f' ({self.architecture})' if self.architecture else ''}: {self.detail}"


def by_cause(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Put what failed for one cause together; what was refused stays apart."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for x in outcomes:
        key = ("", x.cause or x.check) if x.status == "failed" else (x.check, x.architecture)
        groups.setdefault(key, []).append(x)
    return [*groups.values()]


class ConformanceError(AssertionError):
    """Something that breaks its contract; the message lists every check that failed."""


@dataclass(frozen=True)
class _Kit:
    """How what plugins offer of one kind is checked.

    Attributes:
        kind: of plugin.
        subject: makes what checks run on, from a spec, validated options and the name of an architecture.
        first: the check that may refuse an architecture, and its name.
        checks: the others, by name.
    """

    kind: Kind[Any]
    subject: Callable[[Any, BaseModel, str], Any]
    first: tuple[str, Callable[[Any], None]]
    checks: Mapping[str, Callable[[Any], None]]


_KITS = (
    _Kit(PRUNER, Subject, ("plans without weights", plans), PRUNER_CHECKS),
    _Kit(TOKEN_SELECTOR, SelectorSubject, ("asks for scores that are there", asks), SELECTOR_CHECKS),
    _Kit(EVALUATOR, SavedSubject, ("measures a model", can_measure), EVALUATOR_CHECKS),
    _Kit(EXPORTER, SavedSubject, ("writes a model", can_write), EXPORTER_CHECKS),
)


def _kit(spec: object) -> _Kit:
    return next(kit for kit in _KITS if isinstance(spec, kit.kind.spec))


def known_architectures(names: Sequence[str]) -> Sequence[str]:
    """Return architectures to check on: those named, or the usual ones.

    Raises:
        UnsupportedModelError: a name that is none.
    """
    if wrong := [name for name in names if name not in TINY_CONFIGS]:
        raise UnsupportedModelError(f"no tiny model {wrong[0]!r}; {did_you_mean(wrong[0], TINY_CONFIGS)}")
    return names or ARCHITECTURES


def check_plugin(
    spec: Any, *, options: Mapping[str, Any] | None = None, architectures: Sequence[str] = ARCHITECTURES
) -> None:
    """Put what a plugin offers through every check; for its author's tests.

    Args:
        spec: a `PrunerSpec`, `TokenSelectorSpec`, `EvaluatorSpec` or `ExporterSpec`.
        options: as a recipe would give them; needed when some have no default.
        architectures: keys of `TINY_CONFIGS`. One at least has to be accepted.

    Raises:
        ConformanceError: a check that failed, or no architecture that is accepted.
    """
    outcomes = conformance(spec, options=options, architectures=architectures)
    if failed := [o for o in outcomes if o.status == "failed"]:
        lines = [f"  {x[0]}" + (f" [and {len(x) - 1} more for this cause]" if x[1:] else "") for x in by_cause(failed)]
        told = f"{_kit(spec).kind.name} {spec.name!r} fails {len(failed)} checks:"
        raise ConformanceError("\n".join([told, *lines]))


def conformance(
    spec: Any, *, options: Mapping[str, Any] | None = None,
    architectures: Sequence[str] = ARCHITECTURES,
) -> Iterator[Outcome]:  # fmt: skip
    """Put what a plugin offers through every check, one after the other; arguments as for `check_plugin`.

    Yields:
        What each check found. Where an architecture is refused, one outcome says so for all.
    """
    known_architectures(architectures)
    kit = _kit(spec)
    first = _outcome("options round-trip", "", partial(options_round_trip, spec, options or {}))
    yield first
    if first.status == "failed":
        return
    validated = validated_options(spec, options or {})
    refused = 0
    for architecture in architectures:
        subject = kit.subject(spec, validated, architecture)
        name, check = kit.first
        accepted = _outcome(name, architecture, partial(check, subject))
        yield accepted
        refused += accepted.status == "refused"
        if accepted.status != "passed":
            continue
        for name, check in kit.checks.items():
            yield _outcome(name, architecture, partial(check, subject))
    if refused == len(architectures):
        yield Outcome("accepts a model", "", "failed", f"every one of {', '.join(architectures)} was refused")


def validated_options(spec: Any, given: Mapping[str, Any]) -> BaseModel:
    """Validate options as a recipe's are."""
    model: type[BaseModel] = spec.options
    return validate_options(model, given, lambda *loc: ".".join(["options", *map(str, loc)]))


def options_round_trip(spec: Any, given: Mapping[str, Any]) -> None:
    """Check that options, written as JSON, are read back as they were."""
    options = validated_options(spec, given)
    again = validated_options(spec, options.model_dump(mode="json", by_alias=True))
    expect(again == options, f"options read back from JSON differ: {again!r}, expected {options!r}")


def _outcome(name: str, architecture: str, check: Callable[[], None]) -> Outcome:
    try:
        check()
    except RefusedError as refusal:
        return Outcome(name, architecture, "refused", str(refusal))
    except NoSuchPromiseError as reason:
        return Outcome(name, architecture, "skipped", str(reason))
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything, and that is what is looked for
        told = isinstance(error, AssertionError | CompressxError)
        blamed = next((x for x in (error, error.__cause__) if isinstance(x, PluginError)), None)
        frames = traceback.extract_tb(error.__traceback__)
        after = max(i for i, f in enumerate(frames, start=1) if Path(f.filename).parent == Path(__file__).parent)
        own = blamed.frames if blamed else () if told else own_frames(frames[after:])
        lines = [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in own]
        detail = "\n    ".join([str(error) if told else said_by(error), *lines])
        return Outcome(name, architecture, "failed", detail, "\n".join(lines))
    return Outcome(name, architecture, "passed")
