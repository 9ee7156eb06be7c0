"""What a pruner promises, as checks that anyone's pruner can be put through.

Each check runs on a tiny random model of each architecture, on the path that a run takes: the host observes, asks, and
refuses what breaks the contract. What a pruner may refuse it has to refuse in `PrunerSpec.check`, while a recipe is
planned; a model that it accepted there and fails on later is a failure here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from compressx.api.pruner import PrunerSpec
from compressx.runtime.errors import CompressxError, UnsupportedModelError, did_you_mean
from compressx.testing.checks import CHECKS, options_round_trip, plans, validated_options
from compressx.testing.models import TINY_CONFIGS
from compressx.testing.subject import NoSuchPromiseError, RefusedError, Subject
from compressx.testing.surroundings import kept

Status: TypeAlias = Literal["passed", "failed", "refused", "skipped"]

ARCHITECTURES = ("llama", "gpt2", "gemma3", "llama-tied", "mixtral")
"""What pruners are checked on when nothing else is said."""


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
    first = _outcome("options round-trip", "", partial(options_round_trip, spec, options or {}))
    yield first
    if first.status == "failed":
        return
    validated = validated_options(spec, options or {})
    refused = 0
    for architecture in architectures:
        subject = Subject(spec, validated, architecture)
        planned = _outcome("plans without weights", architecture, partial(plans, subject))
        yield planned
        refused += planned.status == "refused"
        if planned.status != "passed":
            continue
        for name, check in CHECKS.items():
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
    except Exception as error:  # noqa: BLE001 - a pruner may raise anything, and that is what is looked for
        return Outcome(name, architecture, "failed", f"{type(error).__name__}: {error}")
    return Outcome(name, architecture, "passed")
