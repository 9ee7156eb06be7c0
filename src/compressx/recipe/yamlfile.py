"""YAML with the position of every value.

Scalars follow the core schema of YAML 1.2 (section 10.3.2), so `2:4`, `yes` and `2024-01-01` are text whatever a
`%YAML` directive says. Anchors, aliases and merge keys work. Tags are refused, so no text can name a Python object.
Size and depth are limited after alias expansion.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from compressx.recipe.document import Node, Scalar, check_bounds, checked, from_python, put, shown
from compressx.recipe.grammar import QUOTES, in_plain_words
from compressx.recipe.sources import long_form
from compressx.runtime.errors import RecipeError, did_you_mean, one_line

MAX_BYTES = 256 * 1024

_CORE_SCHEMA: tuple[tuple[re.Pattern[str], Callable[[str], Scalar]], ...] = (
    (re.compile(r"null|Null|NULL|~|"), lambda _: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,300}"), int),
    (re.compile(r"0o[0-7]{1,300}"), lambda text: int(text, 0)),
    (re.compile(r"0x[0-9a-fA-F]{1,300}"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


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
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        byte = error.object[error.start]
        raise RecipeError(f"{name}:{line}:{column}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from None
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

    return _Composer(_events(text, at), at).document()


def _events(text: str, at: Callable[[int, int], str]) -> Iterator[Any]:
    """Yield parser events lazily, so that the composer's limits stop the parser too."""
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except ReaderError as error:
        before = text[: error.position]
        here = at(before.count("\n"), len(before) - before.rfind("\n") - 1)
        raise RecipeError(f"{here}: the character {text[error.position]!r} is not allowed in YAML") from None
    except MarkedYAMLError as error:
        raise RecipeError(in_plain_words(error, at)) from None
    except (YAMLError, ArithmeticError, AssertionError, ValueError):
        # ruamel.yaml raises these, without a position, for directives of other versions and escapes beyond Unicode.
        raise RecipeError(f"{at(0, 0)}: not YAML: an escape beyond \\U0010FFFF, or %YAML not 1.1 or 1.2") from None


class _Composer:
    """Builds nodes from parser events. State: the remaining events, the finished anchors, the errors so far."""

    def __init__(self, events: Iterator[Any], at: Callable[[int, int], str]) -> None:
        self.events = events
        self.at = at
        self.anchors: dict[str, Node] = {}
        self.mistakes: list[str] = []

    def document(self) -> Node:
        root: Node | None = None
        for event in self.events:
            if isinstance(event, DocumentStartEvent):
                if root is not None:
                    raise RecipeError(f"{self._place(event)}: a second document begins; expected only one")
                root = self._node(next(self.events), 1)
        if self.mistakes:
            raise RecipeError("\n".join(self.mistakes))
        return root or Node(None, self.at(0, 0))

    def _place(self, event: Any) -> str:
        return self.at(event.start_mark.line, event.start_mark.column)

    def _node(self, event: Any, level: int) -> Node:
        place = self._place(event)
        if isinstance(event, AliasEvent):
            if event.anchor not in self.anchors:
                raise RecipeError(f"{place}: alias *{event.anchor} has no anchor that ends before it; {QUOTES}")
            node = self.anchors[event.anchor]
            check_bounds(node.size, level + node.depth - 1, place)
            return node
        check_bounds(1, level, place)
        if event.tag is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self.mistakes.append(f"{place}: tag {tag!r} is not allowed: a recipe has plain values only")
        if isinstance(event, ScalarEvent):
            node = Node(_scalar(event, place), place)
        elif isinstance(event, SequenceStartEvent):
            node = Node(self._items(level + 1), place)
        else:
            node = Node(self._entries(level + 1), place)
        check_bounds(node.size, level, place)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _items(self, level: int) -> tuple[Node, ...]:
        items = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            items.append(self._node(event, level))
        return tuple(items)

    def _entries(self, level: int) -> Mapping[str, Node]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            place = self._place(event)
            key = self._node(event, level).value
            value = self._node(next(self.events), level)
            if key == "<<" and getattr(event, "style", None) is None:
                merged = {**self._merged(value, place), **merged}
            elif not isinstance(key, str):
                comma = "; in a number write a point, as in 0.5" if type(key) is int and value.value is None else ""
                raise RecipeError(f"{place}: a key must be text; got {shown(key)}, put it in quotes{comma}")
            elif key in entries:
                first = entries[key].place
                self.mistakes.append(f"{place}: duplicate key {key!r}, first given at {first}; keep one of the two")
            else:
                entries[key] = replace(value, place=place)
        return {**merged, **entries}

    def _merged(self, node: Node, place: str) -> dict[str, Node]:
        """Return the keys that `<<:` merges; of several mappings with the same key the first wins."""
        merged: dict[str, Node] = {}
        for source in node.value if isinstance(node.value, tuple) else (node,):
            if not isinstance(source.value, Mapping):
                raise RecipeError(f"{place}: << expects a mapping or a list of mappings, got {shown(source.value)}")
            merged = {**source.value, **merged}
        return merged


def _scalar(event: ScalarEvent, place: str) -> Scalar:
    return checked(read_plain(event.value) if event.implicit[0] else event.value, place)


def read_plain(text: str) -> Scalar:
    """Read an unquoted scalar as null, boolean, number or text (YAML 1.2 core schema)."""
    for pattern, read in _CORE_SCHEMA:
        if pattern.fullmatch(text):
            return read(text)
    return text


def override(root: Node, assignment: str, option: str = "--set") -> Node:
    """Return the document with one value set.

    Args:
        root: the document.
        assignment: `a.b[0].c=VALUE` or `a.b.0.c=VALUE` with VALUE in YAML.
        option: the command-line option, for places such as `--set a.b[0].c=VALUE`.

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
