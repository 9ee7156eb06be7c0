"""The kinds of things that plugins offer to recipes: one row of `KINDS` for each.

A new kind is its hook in `compressx.api.hooks`, the class of its specs in `compressx.api`, and a row here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel

from compressx.api.patterns import Group
from compressx.api.pruner import PrunerSpec

Spec = TypeVar("Spec")


@dataclass(frozen=True)
class Kind(Generic[Spec]):
    """A kind of thing that plugins offer.

    Attributes:
        name: what messages call one, such as `pruner`.
        key: what several are called in `plugins.toml`, in `Plugins.offers` and by `compressx plugins`; the hook is
            `compressx_KEY`.
        spec: how a plugin describes one: a class with at least `name`, `summary`, `options` (a pydantic model) and
            `build` (called with validated options).
        check: raises `TypeError` for what else is wrong with a spec of this kind, if anything can be.
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
    """Check the attributes of what a hook returned.

    Raises:
        TypeError: anything but a spec of this kind of which each attribute is what its description says.
    """
    if not isinstance(spec, kind.spec):
        raise TypeError(f"{kind.hook} returned {spec!r:.80}, which is not a {kind.spec.__name__}")
    shown, options = f"{kind.name} {spec.name!r}", spec.options
    if not isinstance(spec.name, str) or not spec.name:
        raise TypeError(f"{kind.hook} returned a {kind.spec.__name__} named {spec.name!r}; a name is text")
    if not (inspect.isclass(options) and issubclass(options, BaseModel)):
        raise TypeError(f"{shown} has options {options!r:.80}, which is no pydantic model")
    if options is BaseModel:
        raise TypeError(f"{shown} has pydantic's BaseModel itself as options; derive an empty class from it")
    if not callable(spec.build):
        raise TypeError(f"{shown} has build {spec.build!r:.80}, which is not callable")
    if kind.check is not None:
        kind.check(spec)


def _check_pruner(spec: PrunerSpec) -> None:
    groups: Any = spec.groups
    if not isinstance(groups, tuple) or not groups or not {*groups} <= {*get_args(Group)}:
        raise TypeError(
            f"pruner {spec.name!r} has groups {groups!r:.80}; expected a tuple of {', '.join(get_args(Group))}, such "
            "as ('row',)"
        )
    if spec.check is not None and not callable(spec.check):
        raise TypeError(f"pruner {spec.name!r} has check {spec.check!r:.80}, which is not callable")
    if unknown := {*spec.selecting_options} - {*spec.options.model_fields}:
        raise TypeError(f"pruner {spec.name!r} has selecting_options {sorted(unknown)}, which are no options of it")


PRUNER = Kind("pruner", "pruners", PrunerSpec, _check_pruner)

KINDS: tuple[Kind[Any], ...] = (PRUNER,)
