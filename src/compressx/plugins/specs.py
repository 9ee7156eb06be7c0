"""What a plugin offers as a pruner has to be one."""

from __future__ import annotations

import inspect
from typing import Any, get_args

from pydantic import BaseModel

from compressx.api.patterns import Group
from compressx.api.pruner import PrunerSpec


def check_spec(spec: object) -> None:
    """Check the attributes of what `compressx_pruners` returned.

    Raises:
        TypeError: anything but a `PrunerSpec` of which each attribute is what its description says.
    """
    if not isinstance(spec, PrunerSpec):
        raise TypeError(f"compressx_pruners returned {spec!r:.80}, which is not a PrunerSpec")
    name: Any = spec.name
    options: Any = spec.options
    if not isinstance(name, str) or not name:
        raise TypeError(f"compressx_pruners returned a PrunerSpec named {name!r}; a name is text")
    if not (inspect.isclass(options) and issubclass(options, BaseModel)):
        raise TypeError(f"pruner {name!r} has options {options!r:.80}, which is no pydantic model")
    if options is BaseModel:
        raise TypeError(f"pruner {name!r} has pydantic's BaseModel itself as options; derive an empty class from it")
    groups: Any = spec.groups
    if not isinstance(groups, tuple) or not groups or not {*groups} <= {*get_args(Group)}:
        raise TypeError(
            f"pruner {name!r} has groups {groups!r:.80}; expected a tuple of {', '.join(get_args(Group))}, such as "
            "('row',)"
        )
    if spec.check is not None and not callable(spec.check):
        raise TypeError(f"pruner {name!r} has check {spec.check!r:.80}, which is not callable")
    if unknown := {*spec.selecting_options} - {*options.model_fields}:
        raise TypeError(f"pruner {name!r} has selecting_options {sorted(unknown)}, which are no options of it")
    if not callable(spec.build):
        raise TypeError(f"pruner {name!r} has build {spec.build!r:.80}, which is not callable")
