"""The JSON schema of recipes, for completion and validation in editors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from compressx.recipe.schema import Recipe

Models: TypeAlias = Mapping[str, type[BaseModel]]


def json_schema(offers: Mapping[str, Models]) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of recipes.

    Args:
        offers: option models by kind, such as `pruners`, and name; options are validated against them.

    Returns:
        Plain data. Other names are allowed, because others may be installed elsewhere.
    """
    schema = Recipe.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    _add_options(definitions, "pruner", ("Rule", "Reconstruction"), offers.get("pruners", {}))
    _add_options(definitions, "selector", ("SelectTokens",), offers.get("token_selectors", {}))
    evaluators = {
        name: {"anyOf": [{"$ref": _defined(definitions, "evaluator", name, model)}, {"type": "null"}]}
        for name, model in offers.get("evaluators", {}).items()
    }
    schema["properties"]["evaluate"]["anyOf"][0]["properties"] = evaluators
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "compressx recipe"}


def _defined(definitions: dict[str, Any], key: str, name: str, model: type[BaseModel]) -> str:
    """Add the options of what a plugin offers to the definitions; return their place."""
    text = json.dumps(_closed(_described(model))).replace('"#/$defs/', f'"#/$defs/{key} {name}.')
    described = json.loads(text)
    definitions |= {f"{key} {name}.{inner}": d for inner, d in described.pop("$defs", {}).items()}
    definitions[f"options of {key} {name}"] = described
    return f"#/$defs/options of {key} {name}"


def _add_options(definitions: dict[str, Any], key: str, sections: Sequence[str], options: Models) -> None:
    """Let the options of sections depend on the name under a key of theirs."""
    places = {name: _defined(definitions, key, name, model) for name, model in options.items()}
    for kind in sections:
        definitions[kind]["properties"][key]["examples"] = list(options)
        definitions[kind]["allOf"] = [
            {
                "if": {"properties": {key: {"const": name}}, "required": [key]},
                "then": {"properties": {"options": {"$ref": place}}},
            }
            for name, place in places.items()
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
