"""Validation by pydantic, with readable messages and the places of the source file."""

from __future__ import annotations

import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from compressx.recipe.document import Location, flow, path_text, shown
from compressx.runtime.errors import CompressxError, PluginError, RecipeError, did_you_mean, suggestion

_Model = TypeVar("_Model", bound=BaseModel)

_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text (numbers, true and null in quotes)",
    "path_type": "a path",
    **dict.fromkeys(("list_type", "tuple_type"), "a list{such_as}"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of keys to values{such_as}"),
    "none_required": "null",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    **dict.fromkeys(("string_too_short", "too_short"), "a length of at least {min_length}"),
    **dict.fromkeys(("string_too_long", "too_long"), "a length of at most {max_length}"),
    "string_pattern_mismatch": "text like {pattern}",
    **dict.fromkeys(("byte_size", "byte_size_unit"), "a size such as 500MB or 4GiB"),
}
_SENTENCES = {"value_error", "assertion_error", "conflict"}


PLAIN_OR_MAPPING = Discriminator(lambda value: "mapping" if isinstance(value, dict | BaseModel) else "plain")
"""Of a union of `Tag("plain")` and `Tag("mapping")`: only one of the two reports its mistakes."""


def short_form(long: Callable[[str], object], accepted: object) -> BeforeValidator:
    """Let a text stand for a mapping; `accepted` is what the JSON schema allows."""
    return BeforeValidator(lambda x: long(x) if isinstance(x, str) else x, json_schema_input_type=accepted)


class Strict(BaseModel):
    """Base of frozen models that forbid unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def refuse_if(wrong: object, message: str, *keys: str) -> None:
    """Refuse, in a validator of a model, what several keys say together; the places of `keys` join the message."""
    if wrong:
        raise PydanticCustomError("conflict", "{message}", {"message": message, "keys": [*keys]})


def exactly_one(values: Mapping[str, Any], *names: str) -> None:
    """Refuse several or none of the keys `names`."""
    given = [n for n in names if values.get(n) is not None]
    refuse_if(len(given) != 1, f"give exactly one of {', '.join(names)}; got {' and '.join(given) or 'none'}", *given)


def only_with(values: Mapping[str, Any], owner: str, *names: str) -> None:
    """Refuse keys that say something of `owner`, which is not there."""
    stray = [n for n in names if values.get(n) is not None]
    refuse_if(values.get(owner) is None and stray, f"{' and '.join(stray)} only goes with {owner}", *stray)


def validated(
    model: type[_Model],
    data: object,
    where: Callable[..., str],
    *,
    error: type[CompressxError] = RecipeError,
    noun: str = "key",
    strict: bool = False,
) -> _Model:
    """Validate plain data and refuse unknown keys, nested ones too, whatever the model's own `extra` says.

    `where` returns the place of a location in the data, or of what encloses it; `noun` is the word for a key. Types are
    as strict as the schema says, or `strict`: no `"8"` or `true` for a number. Of all mistakes one `error` is raised.
    """
    try:
        if strict:  # from JSON, strict mode still converts a list to a tuple, and text to a path or an enum member
            return model.model_validate_json(json.dumps(data), strict=True, extra="forbid")
        return model.model_validate(data, extra="forbid")
    except ValidationError as found:
        lines = dict.fromkeys(_lines(found.errors(include_url=False), model, data, where, noun))
        raise error("\n".join(lines)) from None


def validate_options(model: type[_Model], options: object, where: Callable[..., str]) -> _Model:
    """Validate what a recipe says of a plugin, as strictly as a recipe's own keys."""
    try:
        return validated(model, options, where, noun="option", strict=True)
    except CompressxError:
        raise
    except Exception as error:  # pydantic lets all but ValueError and AssertionError through
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PluginError(
            f"{where()}: {model.__name__}, which validates the options, failed: {type(error).__name__}: {error} "
            f"({last.filename}, line {last.lineno})"
        ) from error


def _lines(
    errors: Sequence[ErrorDetails], model: type[BaseModel], data: object, where: Callable[..., str], noun: str
) -> Iterator[str]:
    wanted: dict[Location, tuple[Any, list[ErrorDetails]]] = {}
    # Unknown keys come before missing ones: a misspelt key is both, and the unknown one has the better hint.
    for error in sorted(map(_of_its_key, errors), key=lambda e: e["type"] == "missing"):
        loc, value = _within(data, error["loc"])
        if error["type"] == "extra_forbidden":
            valid = [name for m in _schema_at(model, loc[:-1], data)[0] for name in _fields(m)]
            hint = did_you_mean(str(loc[-1]), valid) or f"no {noun} is allowed there"
            yield f"{where(*loc)}: unknown {noun} {loc[-1]!r}{_inside(loc[:-1])}; {hint}"
        elif error["type"] == "missing":
            name = error["loc"][-1]
            described = _field_at(model, (*loc, name), data)[0]
            yield f"{where(*loc)}: missing {noun} {name!r}{_inside(loc)}{described}"
        elif error["type"] in _SENTENCES:
            yield _sentence(error, loc, value, where)
        else:
            wanted.setdefault(loc, (value, []))[1].append(error)
    for loc, (value, found) in wanted.items():
        name = path_text(loc) or ("the document" if noun == "key" else f"{noun}s")
        described, example = _field_at(model, loc, data)
        # Each member of a union reports what it expected of the same value.
        either = " or ".join(dict.fromkeys(_expected(error, example) for error in found))
        literals = [n for e in found for n in re.findall("'([^']*)'", str(e.get("ctx", {}).get("expected", "")))]
        hint = suggestion(value, literals) if isinstance(value, str) else ""
        yield f"{where(*loc)}: {name} is {shown(value)}; {hint}expected {either}{described}"


def _of_its_key(error: ErrorDetails) -> ErrorDetails:
    """Return the error of a union's discriminator as one of the key that selects the member, and others as they are."""
    if error["type"] not in {"union_tag_invalid", "union_tag_not_found"}:
        return error
    found, key = error["type"] == "union_tag_invalid", error["ctx"]["discriminator"].strip("'")
    expected = error["ctx"].get("expected_tags", "")
    kind = "literal_error" if found else "missing"
    return {**error, "type": kind, "loc": (*error["loc"], key), "msg": expected, "ctx": {"expected": expected}}


def _sentence(error: ErrorDetails, loc: Location, value: object, where: Callable[..., str]) -> str:
    context = error.get("ctx", {})
    message = str(context.get("error") or context.get("message"))
    if loc:
        message = f"{path_text(loc)}{':' if isinstance(value, Mapping) else f' is {shown(value)};'} {message}"
    keys = context.get("keys", [])
    places = ", ".join(f"{key} at {where(*loc, key)}" for key in keys)
    return f"{where(*loc, *keys[-1:])}: {message}" + (f" ({places})" if len(keys) > 1 else "")


def _expected(error: ErrorDetails, example: str) -> str:
    template = _EXPECTED.get(error["type"])
    if template is None:
        return error["msg"].removeprefix("Input should be ")
    bounds = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in error.get("ctx", {}).items()}
    return template.format(**bounds, such_as=example and f", such as {example}")


def _within(data: Any, loc: Location) -> tuple[Location, Any]:
    """Return the steps that exist in `data`, and the value there; pydantic adds steps for the members of unions."""
    found = []
    for step in loc:
        if step in (data if isinstance(data, Mapping) else range(len(data)) if isinstance(data, list) else ()):
            found.append(step)
            data = data[step]
    return tuple(found), data


def _inside(loc: Location) -> str:
    return f" in {path_text(loc)}" if loc else ""


def _field_at(model: type[BaseModel], loc: Location, data: object) -> tuple[str, str]:
    """Return what the schema says of a location, and its example: for an item the first of its list's."""
    field = _schema_at(model, loc, data)[1]
    if field is None:
        return "", ""
    example: Any = field.examples[0] if field.examples else None
    if isinstance(loc[-1], int):
        example = example[0] if isinstance(example, list) else None
    return (field.description and f": {field.description}") or "", "" if example is None else flow(example)


def _schema_at(model: type[BaseModel], loc: Location, data: Any) -> tuple[list[type[BaseModel]], FieldInfo | None]:
    """Return the models that may apply to `data` at a location, and the last field on the path."""
    models, field = [model], None
    for step in loc:
        found = [f for m in models if (f := _fields(m).get(str(step)))]
        inside = isinstance(data, list) or (isinstance(data, Mapping) and step in data)
        data = data[step] if inside else None
        if found:  # otherwise the step is an index, or a key of a free-form mapping
            field = found[0]
            models = [m for f in found for m in _models_in(f.annotation)]
        models = [m for m in models if not _is_other(m, data)] or models
    return models, field


def _is_other(model: type[BaseModel], data: object) -> bool:
    """Return whether the discriminator in `data` selects another member of the union than `model`."""
    tags = {name: get_args(f.annotation) for name, f in _fields(model).items() if get_origin(f.annotation) is Literal}
    return isinstance(data, Mapping) and any(len(t) == 1 and data.get(name) not in t for name, t in tags.items())


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if get_origin(annotation) is None and inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in get_args(annotation) for m in _models_in(part)]


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}
