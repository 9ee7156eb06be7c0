"""The source of a recipe: YAML or Python values as plain data, with the place of every value.

Scalars follow the core schema of YAML 1.2 (section 10.3.2), so `2:4`, `yes` and `2024-01-01` are text whatever a
`%YAML` directive says. Anchors and aliases work; merge keys (`<<`), which YAML 1.2 does not have, are keys like others.
Tags are refused, so no text can name a Python object. Size and depth are limited while aliases are expanded. What
cannot be read or set is a `RecipeError` with its place.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from compressx.runtime.errors import CompressxError, RecipeError, did_you_mean, one_line

Scalar: TypeAlias = str | int | float | bool | None
Step: TypeAlias = str | int
Location: TypeAlias = tuple[Step, ...]

MAX_VALUES = 20_000
MAX_DEPTH = 40
MAX_BYTES = 256 * 1024
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"

_CORE_SCHEMA: tuple[tuple[re.Pattern[str], Callable[[str], Scalar]], ...] = (
    (re.compile(r"null|Null|NULL|~|"), lambda _: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]{1,300}"), int),
    (re.compile(r"0o[0-7]{1,300}|0x[0-9a-fA-F]{1,250}"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


@dataclass(frozen=True)
class PlacedValue:
    """Plain dicts, lists and scalars with their places.

    Attributes:
        value: the whole.
        places: `file:line:column` of each value by its location: of its key if it has one, else its own.
    """

    value: Any
    places: Mapping[Location, str]

    def where(self, *loc: Step) -> str:
        """Return the place of a key or list item, such as `where("prune", 1, "options", "steps")`.

        A key that is left out has the place of its parent; one set by `--set` has the place `--set a.b=c`.
        """
        return next(self.places[loc[:i]] for i in range(len(loc), -1, -1) if loc[:i] in self.places)

    @contextlib.contextmanager
    def at(self, *loc: Step) -> Iterator[None]:
        """Prefix the message of an error with the place of a key or list item."""
        try:
            yield
        except CompressxError as error:
            raise type(error)(f"{self.where(*loc)}: {error}") from error

    def replaced(self, steps: Sequence[str], new: PlacedValue) -> PlacedValue:
        """Return the document with one value replaced or added; mistakes in the steps are reported at its place."""
        place, loc = new.where(), Location()
        step: Step = ""
        root: Any = {step: copy.deepcopy(self.value)}
        parent = root
        for below in steps:
            value, here = parent[step], path_text(loc)
            if isinstance(value, str):
                value = long_form(loc, value) or value
            if isinstance(value, list):
                if below not in map(str, range(len(value))):
                    valid = f"an index from 0 to {len(value) - 1}" if value else "no index: it is empty"
                    raise RecipeError(f"{place}: {here} takes {valid}; got {below!r}")
            elif value is not None and not isinstance(value, dict):
                raise RecipeError(
                    f"{place}: {here} is {shown(value)}, which has no key {below!r}; set {here} as a whole"
                )
            parent[step] = parent = {below: None} if value is None else value
            step = int(below) if isinstance(parent, list) else below
            loc = (*loc, step)
            if isinstance(parent, dict):
                parent.setdefault(step, None)
        parent[step] = new.value
        places = {at: where for at, where in self.places.items() if at[: len(loc)] != loc}
        made = {loc[:i]: place for i in range(len(loc)) if loc[:i] not in places}
        return PlacedValue(root[""], {**places, **made, **{(*loc, *at): message for at, message in new.places.items()}})


def long_form(location: Sequence[Step], text: str) -> dict[str, Scalar] | None:
    """Return the mapping that a text in a recipe is short for: of a model, a base or a dataset; None for other text."""
    if location[-1:] == ("model",) or tuple(location) == ("base",):
        looks_local = text.endswith(".gguf") or text.startswith((".", "/", "~")) or os.path.exists(text)  # noqa: PTH110 - a Path refuses what is too long
        return {"path" if looks_local else "id": text}
    if location[-1:] in (("dataset",), ("prompts",)) or location[-2:-1] == ("datasets",):
        return {"name": text}
    return None


def _add_place(places: dict[Location, str], loc: Location, place: str) -> None:
    """Keep the place of a value, and refuse a document that is too large or too deep, such as nested aliases."""
    if len(loc) >= MAX_DEPTH:
        raise RecipeError(f"{place}: {_TOO_DEEP}")
    if len(places) >= MAX_VALUES:
        raise RecipeError(f"{place}: more than {MAX_VALUES} values (aliases count as what they stand for)")
    places[loc] = place


def _scalar(value: Scalar, place: str) -> Scalar:
    """Return a scalar as a plain built-in type; refuse numbers and text that no file should hold."""
    if isinstance(value, str):
        if re.search("[\0\ud800-\udfff]", value):
            raise RecipeError(f"{place}: {shown(value)} contains a character that is not allowed in text")
        return str.__str__(value)
    if value is None or isinstance(value, bool):
        return value
    if not abs(value) < 2**1024:  # also one that is no number
        raise RecipeError(f"{place}: expected a finite number, of at most 1024 bits")
    return float(value) if isinstance(value, float) else int(value)


def from_python(value: object, name: str) -> PlacedValue:
    """Copy mappings, lists, tuples, scalars and paths, with places such as `name:prune[1].sparsity`."""
    places: dict[Location, str] = {}

    def copied(value: object, loc: Location) -> Any:
        place = f"{name}:{path_text(loc)}" if loc else name
        _add_place(places, loc, place)
        if isinstance(value, Mapping):
            if stray := [key for key in value if not isinstance(key, str)]:
                raise RecipeError(f"{place}: a key must be text; got {shown(stray[0])}")
            return {str(_scalar(key, place)): copied(item, (*loc, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [copied(item, (*loc, i)) for i, item in enumerate(value)]
        value = str(value) if isinstance(value, os.PathLike) else value
        if value is None or isinstance(value, str | int | float):
            return _scalar(value, place)
        kind = type(value).__name__
        raise RecipeError(f"{place}: expected text, a number, true, false, null, a list or a mapping; got {kind}")

    return PlacedValue(copied(value, ()), places)


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
        return value if re.fullmatch(r"[A-Za-z][\w/-]*", value) and read_plain(value) == value else json.dumps(value)
    return shown(value)


def read_yaml(path: Path) -> PlacedValue:
    """Read a YAML file."""
    name = one_line(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or str(error)
        raise RecipeError(f"{name}: {message.lower()}; expected a recipe: {_recipes_near(path)}") from error
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{name}: larger than {MAX_BYTES // 1024} KiB; it is probably not a recipe")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise RecipeError(f"{_end_of(data[: error.start].decode(), name)}: {message}") from None
    return parse_yaml(text, name)


def _end_of(text: str, name: str) -> str:
    line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
    return f"{name}:{line}:{column}"


def _recipes_near(path: Path) -> str:
    """Say what may have been meant by a path that is no file."""
    if re.match("https?:/", str(path)):
        return "a URL is not read; download it first"
    if (path / "config.json").is_file():
        return f"for this model, `compressx init {one_line(str(path))}` writes one"
    folder = path if path.is_dir() else path.parent
    names = [p.name for p in folder.glob("*") if p.suffix in {".yaml", ".yml"}]
    return did_you_mean(path.name, names) or f"{one_line(str(folder))} has no .yaml files"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Composes nodes and gives no tag to values without one: plain scalars are read by `read_plain`."""

    depth = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:  # noqa: ARG002 - PyYAML's signature
        return ""

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse_yaml(text: str, name: str, *, place: str | None = None) -> PlacedValue:
    """Parse one YAML document; empty text is null.

    Places are `name:line:column`, or `place` for every value.
    """

    def at(mark: Any) -> str:
        return place or f"{name}:{mark.line + 1}:{mark.column + 1}"

    try:
        root = yaml.compose(text, _Loader)
    except yaml.reader.ReaderError as error:
        here = place or _end_of(text[: error.position], name)
        raise RecipeError(f"{here}: the character {text[error.position]!r} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_not_yaml(error, at)) from None
    except (OverflowError, ValueError):  # of chr, without a position
        raise RecipeError(f"{place or name}: not YAML: an escape beyond \\U0010FFFF") from None
    if root is None:
        return PlacedValue(None, {(): place or f"{name}:1:1"})
    places, mistakes = dict[Location, str](), list[str]()

    def plain(node: Any, loc: Location, place: str) -> Any:
        _add_place(places, loc, place)
        here = at(node.start_mark)
        if tag := node.tag.replace("tag:yaml.org,2002:", "!!"):
            mistakes.append(f"{here}: tag {tag!r} is not allowed: a recipe has plain values only")
        if isinstance(node, yaml.SequenceNode):
            return [plain(item, (*loc, i), at(item.start_mark)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return {key: plain(x, (*loc, key), at(mark)) for key, (mark, x) in _entries(node, at, mistakes).items()}
        return _scalar(_content(node), here)

    value = plain(root, (), at(root.start_mark))
    if mistakes:
        raise RecipeError("\n".join(dict.fromkeys(mistakes)))
    return PlacedValue(value, places)


def _content(node: Any) -> Scalar:
    """Return what a scalar says; only without quotes it can be something else than text."""
    return read_plain(node.value) if node.style is None else str(node.value)


def _entries(mapping: Any, at: Callable[[Any], str], mistakes: list[str]) -> dict[str, tuple[Any, Any]]:
    """Return where each key of a mapping stands, and the node of its value; `mistakes` receives duplicate keys."""
    found: dict[str, tuple[Any, Any]] = {}
    for key, value in mapping.value:
        here, name = at(key.start_mark), _content(key) if isinstance(key, yaml.ScalarNode) else None
        if not isinstance(name, str):
            hint = "; in a number write a point, as in 0.5" if type(name) is int and not value.value else ""
            raise RecipeError(f"{here}: a key must be text; put it in quotes{hint}")
        if name in found:
            first = at(found[name][0])
            mistakes.append(f"{here}: duplicate key {name!r}, first given at {first}; keep one of the two")
        else:
            found[str(_scalar(name, here))] = (key.start_mark, value)
    return found


def _not_yaml(error: Any, at: Callable[[Any], str]) -> str:
    """Return PyYAML's message with the place where the parser stopped, and where what it read begins."""
    here = at(error.problem_mark or error.context_mark)
    where = f" at {begun}" if error.context_mark and (begun := at(error.context_mark)) != here else ""
    message = f"{error.context}{where}, {error.problem}" if error.context else str(error.problem)
    quotes = '; text that begins with * needs quotes, such as "*.q_proj"' if "alias" in message else ""
    return f"{here}: not YAML: {message}{quotes}"


def read_plain(text: str) -> Scalar:
    """Read an unquoted scalar as null, boolean, number or text (YAML 1.2 core schema)."""
    for pattern, read in _CORE_SCHEMA:
        if pattern.fullmatch(text):
            return read(text)
    return text


def override(document: PlacedValue, assignment: str, option: str = "--set") -> PlacedValue:
    """Return the document with one value set, by `a.b[0].c=VALUE` or `a.b.0.c=VALUE` with VALUE in YAML.

    Places are the command-line option and the assignment, such as `--set a.b[0].c=VALUE`.
    """
    short = assignment if len(assignment) <= 120 else f"{assignment[:117]}..."
    place = f"{option} {one_line(short)}"
    path, equals, text = assignment.partition("=")
    steps = steps_of(path)
    if not equals or not all(steps):
        raise RecipeError(f"{place}: expected KEY.KEY=VALUE, such as calibration.samples=8 or prune.0.sparsity=0.5")
    if len(steps) >= MAX_DEPTH:
        raise RecipeError(f"{place}: {_TOO_DEEP}")
    return document.replaced(steps, parse_yaml(text, "", place=place))


def steps_of(path: str) -> list[str]:
    """Split `prune[0].sparsity` or `prune.0.sparsity` into its steps."""
    return re.sub(r"(?<=[^.])\[(-?\d+)\](?=[.\[]|$)", r".\1", path.strip()).split(".")


def assignments(given: Sequence[str]) -> dict[str, Any]:
    """Return the mapping that `KEY=VALUE` assignments build, with VALUE in YAML."""
    root = PlacedValue({}, {(): "--set"})
    for assignment in given:
        root = override(root, assignment)
    made: dict[str, Any] = root.value
    return made


_TAGS = {str: "str", int: "int", float: "float", bool: "bool", type(None): "null"}


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes text that `read_plain` would read as another type."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is not yaml.ScalarNode or not implicit[0]:
            return super().resolve(kind, value, implicit)
        return f"tag:yaml.org,2002:{_TAGS[type(read_plain(value))]}"

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True

    def represent_str(self, data: str) -> Any:  # escapes line ends and the like
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)


def dump_yaml(tree: object) -> str:
    """Return plain dicts, lists and scalars as YAML that `parse_yaml` reads back to an equal tree."""
    text: str = yaml.dump(tree, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=math.inf)
    return text
