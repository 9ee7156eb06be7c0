"""The recipe as a JSON schema, by which editors complete and check recipes while they are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from compressx.recipe.schema import Recipe


def json_schema(options: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of what a recipe may say.

    Args:
        options: by pruner, the model of its options; a rule that names the pruner is then held to these.

    Returns:
        Plain data. Pruners that are not in `options` are allowed, since others may be installed elsewhere.
    """
    schema = Recipe.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    for name, model in options.items():
        described = _closed(_described(model))
        definitions |= {f"{name}.{inner}": d for inner, d in described.pop("$defs", {}).items()}
        text = json.dumps(described)
        definitions[f"options of {name}"] = json.loads(text.replace('"#/$defs/', f'"#/$defs/{name}.'))
    for kind in ("Rule", "Reconstruction"):
        definitions[kind]["properties"]["pruner"]["examples"] = list(options)
        definitions[kind]["allOf"] = [
            {
                "if": {"properties": {"pruner": {"const": name}}, "required": ["pruner"]},
                "then": {"properties": {"options": {"$ref": f"#/$defs/options of {name}"}}},
            }
            for name in options
        ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "compressx recipe"}


def _described(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's schema; of one that has a field which JSON cannot say, one that allows anything."""
    try:
        return model.model_json_schema(by_alias=True)
    except PydanticInvalidForJsonSchema:
        return {"type": "object", "additionalProperties": True}


def _closed(schema: Any) -> Any:
    """Forbid unknown keys wherever keys are known, as the host does whatever a model's own config says."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


def text_of(schema: Mapping[str, Any]) -> str:
    """Return a schema as the file that is committed."""
    return json.dumps(schema, indent=1) + "\n"
