"""The kinds of things that plugins offer to recipes, one row of `KINDS` each.

A new kind needs a hook in `compressx.api.hooks`, a spec class in `compressx.api`, and a row here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
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
        check: raises `TypeError` for an invalid spec, beyond the checks of all kinds.
    """

    name: str
    key: str
    spec: type[Spec]
    check: Callable[[Any], None] | None = None

    @property
    def hook(self) -> str:
        """Name of the hook that offers them."""
        return f"compressx_{self.key}"


def check_spec(kind: Kind[Any], spec: Any) -> None:
    """Check a spec that a hook returned.

    Raises:
        TypeError: another type, or an attribute of the wrong type.
    """
    if not isinstance(spec, kind.spec):
        raise TypeError(f"{kind.hook} returned {spec!r:.80}, which is not a {kind.spec.__name__}")
    shown, options = f"{kind.name} {spec.name!r}", spec.options
    if not isinstance(spec.name, str) or not spec.name:
        raise TypeError(f"{kind.hook} returned a {kind.spec.__name__} named {spec.name!r}; expected non-empty text")
    if not (inspect.isclass(options) and issubclass(options, BaseModel)):
        raise TypeError(f"{shown} has options {options!r:.80}, which is not a pydantic model")
    if options is BaseModel:
        raise TypeError(f"{shown} has pydantic's BaseModel itself as options; use a subclass, even an empty one")
    if not callable(spec.build):
        raise TypeError(f"{shown} has build {spec.build!r:.80}, which is not callable")
    if kind.check is not None:
        kind.check(spec)


def _check_pruner(spec: PrunerSpec) -> None:
    for given, known in (("groups", get_args(Group)), ("units", UNIT_KINDS)):
        values: Any = getattr(spec, given)
        if not isinstance(values, tuple) or not {*values} <= {*known}:
            raise TypeError(
                f"pruner {spec.name!r} has {given} {values!r:.80}; expected a tuple of {', '.join(known)}, such as "
                f"({known[0]!r},)"
            )
    if not (spec.groups or spec.nm or spec.units):
        raise TypeError(f"pruner {spec.name!r} prunes nothing: its groups and units are empty and nm is False")
    if spec.check is not None and not callable(spec.check):
        raise TypeError(f"pruner {spec.name!r} has check {spec.check!r:.80}, which is not callable")
    if unknown := {*spec.selecting_options} - {*spec.options.model_fields}:
        raise TypeError(f"pruner {spec.name!r} has selecting_options {sorted(unknown)}, which are not options of it")


def _check_selector(spec: TokenSelectorSpec) -> None:
    if spec.needles is not None and not callable(spec.needles):
        raise TypeError(f"token selector {spec.name!r} has needles {spec.needles!r:.80}, which is not callable")


def _check_exporter(spec: ExporterSpec) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", spec.name):
        raise TypeError(f"exporter {spec.name!r} names no folder; expected letters, digits, _, . and -")


PRUNER = Kind("pruner", "pruners", PrunerSpec, _check_pruner)
TOKEN_SELECTOR = Kind("token selector", "token_selectors", TokenSelectorSpec, _check_selector)
EVALUATOR = Kind("evaluator", "evaluators", EvaluatorSpec)
EXPORTER = Kind("exporter", "exporters", ExporterSpec, _check_exporter)

KINDS: tuple[Kind[Any], ...] = (PRUNER, TOKEN_SELECTOR, EVALUATOR, EXPORTER)
