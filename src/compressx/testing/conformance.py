"""What plugins promise, as checks that anyone's pruner or token selector can be put through.

Each check runs on a tiny random model of each architecture, on the path that a run takes: the host observes, asks, and
refuses what breaks the contract. What a plugin may refuse it has to refuse at first, a pruner in `PrunerSpec.check`,
while a recipe is planned; a model that it accepted there and fails on later is a failure here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from compressx.api.pruner import PrunerSpec
from compressx.api.selector import TokenSelectorSpec
from compressx.plugins.kinds import PRUNER, TOKEN_SELECTOR, Kind
from compressx.runtime.errors import CompressxError, UnsupportedModelError, did_you_mean
from compressx.testing.checks import CHECKS, options_round_trip, plans, validated_options
from compressx.testing.models import TINY_CONFIGS
from compressx.testing.selectors import SELECTOR_CHECKS, SelectorSubject, asks
from compressx.testing.subject import NoSuchPromiseError, RefusedError, Subject
from compressx.testing.surroundings import kept

Status: TypeAlias = Literal["passed", "failed", "refused", "skipped"]

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
        detail: what was expected and found, or why not.
    """

    check: str
    architecture: str
    status: Status
    detail: str = ""


class ConformanceError(AssertionError):
    """A pruner or token selector that breaks its contract; the message lists every check that failed."""


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
    _Kit(PRUNER, Subject, ("plans without weights", plans), CHECKS),
    _Kit(TOKEN_SELECTOR, SelectorSubject, ("asks for scores that are there", asks), SELECTOR_CHECKS),
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
    _expect_no_failure(spec, options, architectures)


def check_selector(
    spec: TokenSelectorSpec, *, options: Mapping[str, Any] | None = None, architectures: Sequence[str] = ARCHITECTURES
) -> None:
    """Put a token selector through every check; for its author's tests.

    Args:
        spec: what the plugin offers.
        options: as a user would give them; needed when some have no default.
        architectures: keys of `TINY_CONFIGS`. One at least has to be accepted.

    Raises:
        ConformanceError: a check that failed, or no architecture that the selector accepts.
    """
    _expect_no_failure(spec, options, architectures)


def _expect_no_failure(
    spec: PrunerSpec | TokenSelectorSpec, options: Mapping[str, Any] | None, architectures: Sequence[str]
) -> None:
    outcomes = conformance(spec, options=options, architectures=architectures)
    if failed := [o for o in outcomes if o.status == "failed"]:
        lines = [f"  {o.check}{f' ({o.architecture})' if o.architecture else ''}: {o.detail}" for o in failed]
        told = f"{_kit(spec).kind.name} {spec.name!r} fails {len(failed)} checks:"
        raise ConformanceError("\n".join([told, *lines]))


def conformance(
    spec: PrunerSpec | TokenSelectorSpec, *, options: Mapping[str, Any] | None = None,
    architectures: Sequence[str] = ARCHITECTURES,
) -> Iterator[Outcome]:  # fmt: skip
    """Put a pruner or token selector through every check, one after the other.

    Args:
        spec: what the plugin offers.
        options: as a recipe would give them.
        architectures: keys of `TINY_CONFIGS`.

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


def _outcome(name: str, architecture: str, check: Callable[[], None]) -> Outcome:
    try:
        with kept():
            check()
    except RefusedError as refusal:
        return Outcome(name, architecture, "refused", str(refusal))
    except NoSuchPromiseError as reason:
        return Outcome(name, architecture, "skipped", str(reason))
    except (AssertionError, CompressxError) as error:
        return Outcome(name, architecture, "failed", str(error))
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything, and that is what is looked for
        return Outcome(name, architecture, "failed", f"{type(error).__name__}: {error}")
    return Outcome(name, architecture, "passed")
