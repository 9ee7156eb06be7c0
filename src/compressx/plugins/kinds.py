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
        functions: attributes of a spec that are functions or None.
        check: refuses what is wrong with a spec beyond that, by a TypeError.
    """

    name: str
    key: str
    spec: type[Spec]
    functions: tuple[str, ...] = ()
    check: Callable[[Any], None] = lambda _: None

    @property
    def hook(self) -> str:
        """Name of the hook that offers them."""
        return f"compressx_{self.key}"


def _require(holds: object, told: str) -> None:
    if not holds:
        raise TypeError(told)


def check_spec(kind: Kind[Any], spec: Any) -> None:
    """Check a spec that a hook returned."""
    _require(isinstance(spec, kind.spec), f"{kind.hook} returned {spec!r:.80}, which is not a {kind.spec.__name__}")
    shown, options = f"{kind.name} {spec.name!r}", spec.options
    _require(isinstance(spec.name, str) and spec.name, f"{shown} has no name; expected text")
    _require(
        inspect.isclass(options) and issubclass(options, BaseModel) and options is not BaseModel,
        f"{shown} has options {options!r:.80}; expected a subclass of pydantic's BaseModel, even an empty one",
    )
    for name in ("build", *kind.functions):
        value = getattr(spec, name)
        optional = value is None and name != "build"
        _require(callable(value) or optional, f"{shown} has {name} {value!r:.80}, which is not callable")
    kind.check(spec)


def _check_pruner(spec: PrunerSpec) -> None:
    shown = f"pruner {spec.name!r}"
    for given, known in (("groups", get_args(Group)), ("units", UNIT_KINDS)):
        values: Any = getattr(spec, given)
        told = f"{shown} has {given} {values!r:.80}; expected a tuple of {', '.join(known)}, such as ({known[0]!r},)"
        _require(isinstance(values, tuple) and {*values} <= {*known}, told)
    some = spec.groups or spec.nm or spec.units
    _require(some, f"{shown} prunes nothing: its groups and units are empty and nm is False")
    unknown = {*spec.selecting_options} - {*spec.options.model_fields}
    _require(not unknown, f"{shown} has selecting_options {sorted(unknown)}, which are not options of it")


def _check_exporter(spec: ExporterSpec) -> None:
    told = f"exporter {spec.name!r} names no folder; expected letters, digits, _, . and -"
    _require(re.fullmatch(r"[A-Za-z0-9][\w.-]*", spec.name), told)


PRUNER = Kind("pruner", "pruners", PrunerSpec, ("check",), _check_pruner)
TOKEN_SELECTOR = Kind("token selector", "token_selectors", TokenSelectorSpec, ("needles",))
EVALUATOR = Kind("evaluator", "evaluators", EvaluatorSpec, ("figures",))
EXPORTER = Kind("exporter", "exporters", ExporterSpec, (), _check_exporter)

KINDS: tuple[Kind[Any], ...] = (PRUNER, TOKEN_SELECTOR, EVALUATOR, EXPORTER)
