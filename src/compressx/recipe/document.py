"""The parsed document: a tree of values with their positions, between the YAML file and the schema."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from compressx.runtime.errors import CompressxError, RecipeError, one_line

Scalar: TypeAlias = str | int | float | bool | None
Step: TypeAlias = str | int
LongForm: TypeAlias = Callable[[Sequence[Step], str], Mapping[str, Scalar] | None]

MAX_VALUES = 20_000
MAX_DEPTH = 40


@dataclass(frozen=True)
class Node:
    """A value of a document with its position.

    Attributes:
        value: a scalar, a tuple of nodes, or nodes by key.
        place: `file:line:column` of its key if it has one, else of the value.
    """

    value: Scalar | tuple[Node, ...] | Mapping[str, Node]
    place: str

    @property
    def children(self) -> Iterable[Node]:
        """The direct children."""
        if isinstance(self.value, Mapping):
            return self.value.values()
        return self.value if isinstance(self.value, tuple) else ()

    @cached_property
    def size(self) -> int:
        """Number of values, this one included, with aliases expanded."""
        return 1 + sum(child.size for child in self.children)

    @cached_property
    def depth(self) -> int:
        """Number of levels, this one included."""
        return 1 + max((child.depth for child in self.children), default=0)

    def plain(self) -> Any:
        """Return the value as new dicts, lists and scalars."""
        if isinstance(self.value, Mapping):
            return {key: child.plain() for key, child in self.value.items()}
        return [child.plain() for child in self.value] if isinstance(self.value, tuple) else self.value

    def where(self, *loc: Step) -> str:
        """Return the place of the value at `loc`, or of the nearest enclosing one."""
        node = self
        for step in loc:
            if isinstance(node.value, Mapping) and step in node.value:
                node = node.value[str(step)]
            elif isinstance(node.value, tuple) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
            else:
                break
        return node.place


@dataclass(frozen=True)
class Placed:
    """What was read from a document.

    Attributes:
        source: the parsed document, with places.
    """

    source: Node

    def where(self, *loc: Step) -> str:
        """Return the place of a key or list item, such as `where("prune", 1, "options", "steps")`.

        A key that the recipe leaves out has the place of its parent; one set by `--set` has the place `--set a.b=c`.
        """
        return self.source.where(*loc)

    @contextlib.contextmanager
    def at(self, *loc: Step) -> Iterator[None]:
        """Prefix the message of an error with the place of a key or list item."""
        try:
            yield
        except CompressxError as error:
            raise type(error)(f"{self.where(*loc)}: {error}") from error


def check_bounds(size: int, depth: int, place: str) -> None:
    """Refuse a document that is too large or too deep, such as nested aliases that expand exponentially.

    Raises:
        RecipeError: names the limit.
    """
    if depth > MAX_DEPTH:
        raise RecipeError(f"{place}: nested more than {MAX_DEPTH} levels deep")
    if size > MAX_VALUES:
        raise RecipeError(f"{place}: more than {MAX_VALUES} values (aliases count as what they stand for)")


def checked(value: Scalar, place: str) -> Scalar:
    """Return a scalar as a plain built-in type.

    Raises:
        RecipeError: a number that is not finite or has more than 1024 bits, or text with NUL or surrogates.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if re.search("[\0\ud800-\udfff]", value):
            raise RecipeError(f"{place}: {shown(value)} contains a character that is not allowed in text")
        return str.__str__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecipeError(f"{place}: {value} is not a finite number")
        return float(value)
    if int(value).bit_length() > 1024:
        raise RecipeError(f"{place}: a whole number of {int(value).bit_length()} bits is too long")
    return int(value)


def from_python(value: object, name: str, loc: tuple[Step, ...] = ()) -> Node:
    """Convert a Python value to nodes with places such as `name:prune[1].sparsity`.

    Args:
        value: mappings, lists, tuples, scalars and paths.
        name: stands in for the file name in places.
        loc: location of the value in the document.

    Raises:
        RecipeError: any other type, a key that is not text, or a document over the limits.
    """
    place = f"{name}:{path_text(loc)}" if loc else name
    check_bounds(1, len(loc) + 1, place)
    if isinstance(value, Mapping):
        if stray := [key for key in value if not isinstance(key, str)]:
            raise RecipeError(f"{place}: a key must be text; got {shown(stray[0])}")
        node = Node({str(checked(k, place)): from_python(v, name, (*loc, k)) for k, v in value.items()}, place)
    elif isinstance(value, list | tuple):
        node = Node(tuple(from_python(item, name, (*loc, i)) for i, item in enumerate(value)), place)
    elif isinstance(value, os.PathLike):
        node = Node(checked(str(value), place), place)
    elif value is None or isinstance(value, str | int | float):
        node = Node(checked(value, place), place)
    else:
        kind = type(value).__name__
        raise RecipeError(f"{place}: expected text, a number, true, false, null, a list or a mapping; got {kind}")
    check_bounds(node.size, 1, place)
    return node


def put(
    node: Node, steps: Sequence[str], new: Node, done: tuple[Step, ...] = (), *, long_form: LongForm = lambda *_: None
) -> Node:
    """Return the tree with one value replaced or added.

    Args:
        node: the tree.
        steps: keys, and indices as decimal text.
        new: the new value; errors in `steps` are reported at its place.
        done: the location of `node`.
        long_form: returns the mapping that a text at a location is short for, if it is.

    Raises:
        RecipeError: steps through another scalar or outside a list.
    """
    if not steps:
        return new
    if isinstance(node.value, str) and (entries := long_form(done, node.value)) is not None:
        node = replace(node, value={key: Node(value, node.place) for key, value in entries.items()})
    step, rest, here = steps[0], steps[1:], path_text(done)
    if isinstance(node.value, tuple):
        indices = [str(i) for i in range(len(node.value))]
        if step not in indices:
            valid = f"an index from 0 to {len(indices) - 1}" if indices else "no index: it is empty"
            raise RecipeError(f"{new.place}: {here} takes {valid}; got {step!r}")
        items = list(node.value)
        items[int(step)] = put(items[int(step)], rest, new, (*done, int(step)), long_form=long_form)
        return replace(node, value=tuple(items))
    if node.value is None or isinstance(node.value, Mapping):
        inside = dict(node.value or {})
        inside[step] = put(inside.get(step, Node(None, new.place)), rest, new, (*done, step), long_form=long_form)
        return replace(node, value=inside)
    raise RecipeError(f"{new.place}: {here} is {shown(node.value)}, which has no key {step!r}; set {here} as a whole")


def path_text(loc: Iterable[Step]) -> str:
    """Format a location as `prune[1].options.steps`."""
    return one_line("".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in loc).removeprefix("."))


def shown(value: object) -> str:
    """Format a value for a message, as YAML, at most 80 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def flow(value: object) -> str:
    """Format plain data as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z][\w/-]*", value) else f'"{value}"'
    return shown(value)
