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
from compressx.testing.pruners import PRUNER_CHECKS
from compressx.testing.saved import EVALUATOR_CHECKS, EXPORTER_CHECKS, SavedSubject
from compressx.testing.selectors import SELECTOR_CHECKS, SelectorSubject
from compressx.testing.subject import NoSuchPromiseError, RefusedError, Subject, expect

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
    status: Literal["passed", "failed", "refused", "skipped"]
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


_Checks: TypeAlias = Mapping[str, Callable[[Any], None]]

_KITS: tuple[tuple[Kind[Any], Callable[[Any, BaseModel, str], Any], _Checks], ...] = (
    (PRUNER, Subject, PRUNER_CHECKS),
    (TOKEN_SELECTOR, SelectorSubject, SELECTOR_CHECKS),
    (EVALUATOR, SavedSubject, EVALUATOR_CHECKS),
    (EXPORTER, SavedSubject, EXPORTER_CHECKS),
)
"""What makes a subject from a spec, validated options and an architecture, and its checks: the first may refuse it."""


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
        kind = next(kind for kind, _, _ in _KITS if isinstance(spec, kind.spec))
        told = f"{kind.name} {spec.name!r} fails {len(failed)} checks:"
        raise ConformanceError("\n".join([told, *lines]))


def conformance(
    spec: Any, *, options: Mapping[str, Any] | None = None,
    architectures: Sequence[str] = ARCHITECTURES,
) -> Iterator[Outcome]:  # fmt: skip
    """Put what a plugin offers through every check, one after the other; arguments as for `check_plugin`.

    Yields:
        What each check found. Where an architecture is refused, one outcome says so for all.

    Raises:
        UnsupportedModelError: an architecture that is none.
    """
    if wrong := [name for name in architectures if name not in TINY_CONFIGS]:
        raise UnsupportedModelError(f"no tiny model {wrong[0]!r}; {did_you_mean(wrong[0], TINY_CONFIGS)}")
    make, checks = next((make, checks) for kind, make, checks in _KITS if isinstance(spec, kind.spec))
    first = _outcome("options round-trip", "", partial(options_round_trip, spec, options or {}))
    yield first
    if first.status == "failed":
        return
    validated, refused = validated_options(spec, options or {}), 0
    for architecture in architectures:
        subject = make(spec, validated, architecture)
        for number, (name, check) in enumerate(checks.items()):
            outcome = _outcome(name, architecture, partial(check, subject))
            yield outcome
            if not number and outcome.status != "passed":
                refused += outcome.status == "refused"
                break
    if refused == len(architectures):
        yield Outcome("accepts a model", "", "failed", f"every one of {', '.join(architectures)} was refused")


def validated_options(spec: Any, given: Mapping[str, Any]) -> BaseModel:
    """Validate options as those of a recipe."""
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
