"""The source of a recipe: YAML or Python values as a tree, with the place of every value.

Scalars follow the core schema of YAML 1.2 (section 10.3.2), so `2:4`, `yes` and `2024-01-01` are text whatever a
`%YAML` directive says. Anchors, aliases and merge keys work. Tags are refused, so no text can name a Python object.
Size and depth are limited after aliases are expanded.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.tag import Tag

from compressx.runtime.errors import CompressxError, RecipeError, did_you_mean, one_line

Scalar: TypeAlias = str | int | float | bool | None
Step: TypeAlias = str | int
LongForm: TypeAlias = Callable[[Sequence[Step], str], Mapping[str, Scalar] | None]

MAX_VALUES = 20_000
MAX_DEPTH = 40
MAX_BYTES = 256 * 1024
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"

_CORE_SCHEMA: tuple[tuple[re.Pattern[str], Callable[[str], Scalar]], ...] = (
    (re.compile(r"null|Null|NULL|~|"), lambda _: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,300}"), int),
    (re.compile(r"0o[0-7]{1,300}"), lambda text: int(text, 0)),
    (re.compile(r"0x[0-9a-fA-F]{1,300}"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


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
        """Return the place of a key or list item, such as `where("prune", 1, "options", "steps")`.

        A key that is left out has the place of its parent; one set by `--set` has the place `--set a.b=c`.
        """
        node = self
        for step in loc:
            if isinstance(node.value, Mapping) and step in node.value:
                node = node.value[str(step)]
            elif isinstance(node.value, tuple) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
            else:
                break
        return node.place

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
        raise RecipeError(f"{place}: {_TOO_DEEP}")
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


def read_yaml(path: Path) -> Node:
    """Read a YAML file.

    Raises:
        RecipeError: a file that cannot be read, is not UTF-8, is not YAML, or is over the size limits.
    """
    name = one_line(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        advice = "a URL is not read; download it first" if re.match("https?:/", name) else _siblings(path)
        raise RecipeError(f"{name}: no such file; {advice}") from None
    except IsADirectoryError:
        raise RecipeError(f"{name}: is a folder, expected a recipe; {_recipes_of(path)}") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{name}: larger than {MAX_BYTES // 1024} KiB; it is probably not a recipe")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = data.count(b"\n", 0, error.start) + 1, error.start - data.rfind(b"\n", 0, error.start)
        told = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise RecipeError(f"{name}:{line}:{column}: {told}") from None
    return parse_yaml(text, name)


def _siblings(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix in {".yaml", ".yml"}]
    except OSError:
        return f"the folder {one_line(str(path.parent))} does not exist or cannot be read"
    return did_you_mean(path.name, names) or f"{one_line(str(path.parent))} has no .yaml files"


def _recipes_of(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return f"it holds a model, for which `compressx init {one_line(str(folder))}` writes one"
    found = sorted(one_line(str(p)) for p in folder.iterdir() if p.suffix in {".yaml", ".yml"})
    return f"it has {', '.join(found[:3])}" if found else "it has no .yaml files"


class _Untagged(VersionedResolver):
    """Gives no tag to values without one; ours are read by `read_plain`."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Tag:  # noqa: ARG002 - ruamel.yaml's signature
        return Tag(suffix="")


def parse_yaml(text: str, name: str, *, place: str | None = None) -> Node:
    """Parse one YAML document; empty text is null.

    Args:
        text: the document.
        name: the file, for places `name:line:column`.
        place: used for every value instead.

    Raises:
        RecipeError: text that is not one YAML document within the limits, or that repeats a key or uses a tag.
    """

    def at(line: int, column: int) -> str:
        return place or f"{name}:{line + 1}:{column + 1}"

    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Untagged
    yaml.max_depth = MAX_DEPTH
    yaml.composer.warn_double_anchors = False
    try:
        composed = yaml.compose(text)
    except MaxDepthExceededError as error:
        raise RecipeError(f"{at(error.problem_mark.line, error.problem_mark.column)}: {_TOO_DEEP}") from None
    except ReaderError as error:
        before = text[: error.position]
        here = at(before.count("\n"), len(before) - before.rfind("\n") - 1)
        raise RecipeError(f"{here}: the character {text[error.position]!r} is not allowed in YAML") from None
    except MarkedYAMLError as error:
        raise RecipeError(_not_yaml(error, at)) from None
    except (YAMLError, ArithmeticError, AssertionError, ValueError):
        # ruamel.yaml raises these, without a position, for directives of other versions and escapes beyond Unicode.
        raise RecipeError(f"{at(0, 0)}: not YAML: an escape beyond \\U0010FFFF, or %YAML not 1.1 or 1.2") from None
    if composed is None:
        return Node(None, at(0, 0))
    converter = _Converter(at)
    root = converter.node(composed)
    if converter.mistakes:
        raise RecipeError("\n".join(converter.mistakes))
    return root


def _not_yaml(error: MarkedYAMLError, at: Callable[[int, int], str]) -> str:
    """Return ruamel.yaml's message with the place where the parser stopped, and where what it read begins."""
    mark, begun = error.problem_mark or error.context_mark, error.context_mark
    here = at(mark.line, mark.column) if mark else at(0, 0)
    where = f" at {there}" if begun and (there := at(begun.line, begun.column)) != here else ""
    told = f"{error.context}{where}, {error.problem}" if error.context else str(error.problem)
    quotes = '; text that begins with * needs quotes, such as "*.q_proj"' if "alias" in told else ""
    return f"{here}: not YAML: {told}{quotes}"


class _Converter:
    """Turns composed nodes into ours. State: the finished and the unfinished ones by identity, the mistakes so far."""

    def __init__(self, at: Callable[[int, int], str]) -> None:
        self.at = at
        self.finished: dict[int, Node] = {}
        self.unfinished: set[int] = set()
        self.mistakes: list[str] = []

    def node(self, composed: Any) -> Node:
        """Convert a node; what an alias stands for is converted once.

        Raises:
            RecipeError: beyond the limits, an alias within its own anchor, a key that is not text, or a bad merge.
        """
        if (known := self.finished.get(id(composed))) is not None:
            return known
        place = self.at(composed.start_mark.line, composed.start_mark.column)
        if id(composed) in self.unfinished:
            raise RecipeError(f"{place}: an alias stands within what its anchor names")
        self.unfinished.add(id(composed))
        if tag := str(composed.tag).replace("tag:yaml.org,2002:", "!!"):
            self.mistakes.append(f"{place}: tag {tag!r} is not allowed: a recipe has plain values only")
        if isinstance(composed, SequenceNode):
            found = Node(tuple(self.node(item) for item in composed.value), place)
        elif isinstance(composed, MappingNode):
            found = Node(self._entries(composed.value), place)
        else:
            plain = composed.style is None
            found = Node(checked(read_plain(composed.value) if plain else composed.value, place), place)
        check_bounds(found.size, found.depth, place)
        return self.finished.setdefault(id(composed), found)

    def _entries(self, pairs: Sequence[tuple[Any, Any]]) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for composed, below in pairs:
            key, value = self.node(composed), self.node(below)
            if key.value == "<<" and composed.style is None:
                merged = {**_merged(value, key.place), **merged}
            elif not isinstance(key.value, str):
                comma = type(key.value) is int and value.value is None
                hint = "; in a number write a point, as in 0.5" if comma else ""
                raise RecipeError(f"{key.place}: a key must be text; got {shown(key.value)}, put it in quotes{hint}")
            elif key.value in entries:
                first = entries[key.value].place
                self.mistakes.append(
                    f"{key.place}: duplicate key {key.value!r}, first given at {first}; keep one of the two"
                )
            else:
                entries[key.value] = replace(value, place=key.place)
        return {**merged, **entries}


def _merged(node: Node, place: str) -> dict[str, Node]:
    """Return the keys that `<<:` merges; of several mappings with the same key the first wins."""
    merged: dict[str, Node] = {}
    for source in node.value if isinstance(node.value, tuple) else (node,):
        if not isinstance(source.value, Mapping):
            raise RecipeError(f"{place}: << expects a mapping or a list of mappings, got {shown(source.value)}")
        merged = {**source.value, **merged}
    return merged


def read_plain(text: str) -> Scalar:
    """Read an unquoted scalar as null, boolean, number or text (YAML 1.2 core schema)."""
    for pattern, read in _CORE_SCHEMA:
        if pattern.fullmatch(text):
            return read(text)
    return text


def override(root: Node, assignment: str, option: str = "--set", long_form: LongForm = lambda *_: None) -> Node:
    """Return the document with one value set.

    Args:
        root: the document.
        assignment: `a.b[0].c=VALUE` or `a.b.0.c=VALUE` with VALUE in YAML.
        option: the command-line option, for places such as `--set a.b[0].c=VALUE`.
        long_form: as for `put`.

    Raises:
        RecipeError: a malformed assignment, or a path through a scalar or outside a list.
    """
    short = assignment if len(assignment) <= 120 else f"{assignment[:117]}..."
    place = f"{option} {one_line(short)}"
    path, equals, text = assignment.partition("=")
    steps = steps_of(path)
    if not equals or not all(steps):
        raise RecipeError(f"{place}: expected KEY.KEY=VALUE, such as calibration.samples=8 or prune.0.sparsity=0.5")
    check_bounds(1, len(steps), place)
    return put(root, steps, parse_yaml(text, "", place=place), long_form=long_form)


def steps_of(path: str) -> list[str]:
    """Split `prune[0].sparsity` or `prune.0.sparsity` into its steps."""
    return re.sub(r"(?<=[^.])\[(-?\d+)\](?=[.\[]|$)", r".\1", path.strip()).split(".")


def assignments(given: Sequence[str]) -> dict[str, Any]:
    """Return the mapping that `KEY=VALUE` assignments build, with VALUE in YAML.

    Raises:
        RecipeError: as for `override`.
    """
    root = from_python({}, "--set")
    for assignment in given:
        root = override(root, assignment)
    made: dict[str, Any] = root.plain()
    return made


def dump_yaml(tree: object) -> str:
    """Return plain dicts, lists and scalars as YAML that `parse_yaml` reads back to an equal tree."""
    yaml = YAML(pure=True)
    yaml.width = 2**16
    stream = io.StringIO()
    yaml.dump(_quoted(tree), stream)
    return stream.getvalue()


def _quoted(tree: object) -> object:
    """Quote text that `read_plain` would read as another type; ruamel.yaml's rules for numbers differ from ours."""
    if isinstance(tree, str):
        return tree if read_plain(tree) == tree and tree.isprintable() else DoubleQuotedScalarString(tree)
    if isinstance(tree, list):
        return [_quoted(item) for item in tree]
    return {_quoted(k): _quoted(v) for k, v in tree.items()} if isinstance(tree, dict) else tree
