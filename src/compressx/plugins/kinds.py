"""The kinds of things that plugins offer to recipes, one row of `KINDS` each.

A new kind needs a hook in `compressx.api.hooks`, a spec class in `compressx.api`, and a row here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel

from compressx.api.evaluator import EvaluatorSpec
from compressx.api.exporter import ExporterSpec
from compressx.api.patterns import UNIT_KINDS, Group
from compressx.api.pruner import PrunerSpec
from compressx.api.selector import TokenSelectorSpec

Spec = TypeVar("Spec")


@dataclass(frozen=True)
class Kind(Generic[Spec]):
    """A kind of thing that plugins offer.

    Attributes:
        name: singular, for messages, such as `pruner`.
        key: plural, in `plugins.toml`, `Plugins.offers` and `compressx plugins`; the hook is `compressx_KEY`.
        spec: class with at least `name`, `summary`, `options` (a pydantic model) and `build` (called with validated
            options).
        faults: yields what is wrong with a spec, beyond what is checked for all kinds.
    """

    name: str
    key: str
    spec: type[Spec]
    faults: Callable[[Any], Iterable[str]] = lambda _: ()

    @property
    def hook(self) -> str:
        """Name of the hook that offers them."""
        return f"compressx_{self.key}"


def check_spec(kind: Kind[Any], spec: Any) -> None:
    """Check a spec that a hook returned.

    Raises:
        TypeError: another type, or an attribute of the wrong type.
    """
    if (fault := next(_faults(kind, spec), None)) is not None:
        raise TypeError(fault)


def _faults(kind: Kind[Any], spec: Any) -> Iterator[str]:
    if not isinstance(spec, kind.spec):
        yield f"{kind.hook} returned {spec!r:.80}, which is not a {kind.spec.__name__}"
    if not isinstance(spec.name, str) or not spec.name:
        yield f"{kind.hook} returned a {kind.spec.__name__} named {spec.name!r}; expected non-empty text"
    shown, options = f"{kind.name} {spec.name!r}", spec.options
    if not (inspect.isclass(options) and issubclass(options, BaseModel)):
        yield f"{shown} has options {options!r:.80}, which is not a pydantic model"
    if options is BaseModel:
        yield f"{shown} has pydantic's BaseModel itself as options; use a subclass, even an empty one"
    if not callable(spec.build):
        yield f"{shown} has build {spec.build!r:.80}, which is not callable"
    yield from kind.faults(spec)


def _faults_of_pruner(spec: PrunerSpec) -> Iterator[str]:
    shown = f"pruner {spec.name!r}"
    for given, known in (("groups", get_args(Group)), ("units", UNIT_KINDS)):
        values: Any = getattr(spec, given)
        if not isinstance(values, tuple) or not {*values} <= {*known}:
            yield (
                f"{shown} has {given} {values!r:.80}; expected a tuple of {', '.join(known)}, such as ({known[0]!r},)"
            )
    if not (spec.groups or spec.nm or spec.units):
        yield f"{shown} prunes nothing: its groups and units are empty and nm is False"
    if spec.check is not None and not callable(spec.check):
        yield f"{shown} has check {spec.check!r:.80}, which is not callable"
    if unknown := {*spec.selecting_options} - {*spec.options.model_fields}:
        yield f"{shown} has selecting_options {sorted(unknown)}, which are not options of it"


def _faults_of_selector(spec: TokenSelectorSpec) -> Iterator[str]:
    if spec.needles is not None and not callable(spec.needles):
        yield f"token selector {spec.name!r} has needles {spec.needles!r:.80}, which is not callable"


def _faults_of_exporter(spec: ExporterSpec) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", spec.name):
        yield f"exporter {spec.name!r} names no folder; expected letters, digits, _, . and -"


PRUNER = Kind("pruner", "pruners", PrunerSpec, _faults_of_pruner)
TOKEN_SELECTOR = Kind("token selector", "token_selectors", TokenSelectorSpec, _faults_of_selector)
EVALUATOR = Kind("evaluator", "evaluators", EvaluatorSpec)
EXPORTER = Kind("exporter", "exporters", ExporterSpec, _faults_of_exporter)

KINDS: tuple[Kind[Any], ...] = (PRUNER, TOKEN_SELECTOR, EVALUATOR, EXPORTER)
