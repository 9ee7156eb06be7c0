"""The JSON schema of recipes, for completion and validation in editors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from compressx.recipe.schema import Recipe


def json_schema(
    pruners: Mapping[str, type[BaseModel]], selectors: Mapping[str, type[BaseModel]] | None = None
) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of recipes.

    Args:
        pruners: option models by pruner; the options of rules with that pruner are validated against them.
        selectors: option models by token selector.

    Returns:
        Plain data. Other names are allowed, because others may be installed elsewhere.
    """
    schema = Recipe.model_json_schema(by_alias=True)
    _add_options(schema["$defs"], "pruner", ("Rule", "Reconstruction"), pruners)
    _add_options(schema["$defs"], "selector", ("SelectTokens",), selectors or {})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "compressx recipe"}


def _add_options(
    definitions: dict[str, Any], key: str, sections: Sequence[str], options: Mapping[str, type[BaseModel]]
) -> None:
    """Let the options of sections depend on the name under a key of theirs."""
    for name, model in options.items():
        described = _closed(_described(model))
        definitions |= {f"{key} {name}.{inner}": d for inner, d in described.pop("$defs", {}).items()}
        text = json.dumps(described)
        definitions[f"options of {key} {name}"] = json.loads(text.replace('"#/$defs/', f'"#/$defs/{key} {name}.'))
    for kind in sections:
        definitions[kind]["properties"][key]["examples"] = list(options)
        definitions[kind]["allOf"] = [
            {
                "if": {"properties": {key: {"const": name}}, "required": [key]},
                "then": {"properties": {"options": {"$ref": f"#/$defs/options of {key} {name}"}}},
            }
            for name in options
        ]


def _described(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's schema, or one that allows anything if a field has no JSON schema."""
    try:
        return model.model_json_schema(by_alias=True)
    except PydanticInvalidForJsonSchema:
        return {"type": "object", "additionalProperties": True}


def _closed(schema: Any) -> Any:
    """Forbid unknown keys in every object with properties, as `validated` does whatever a model's own config."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


def text_of(schema: Mapping[str, Any]) -> str:
    """Format a schema as in the committed file."""
    return json.dumps(schema, indent=1) + "\n"
