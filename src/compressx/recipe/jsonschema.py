"""The recipe as a JSON schema, by which editors complete and check recipes while they are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

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
        described = model.model_json_schema(by_alias=True)
        definitions |= {f"{name}.{inner}": d for inner, d in described.pop("$defs", {}).items()}
        text = json.dumps({**described, "additionalProperties": False})
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


def text_of(schema: Mapping[str, Any]) -> str:
    """Return a schema as the file that is committed."""
    return json.dumps(schema, indent=1) + "\n"
