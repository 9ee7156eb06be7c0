"""What mkdocs does beside rendering: README as the home page, and reference tables from the code's own schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from mkdocs.structure.files import File, Files
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Make README the home page; its links into docs/ become links beside it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Fill in the tables of the schema page, and leave the text of links that lead out of the site."""
    if page.file.src_uri == "reference/schema.md":
        markdown = markdown.replace("<!-- recipe -->", _recipe()).replace("<!-- options -->", _options())
        for key in ("token_selectors", "evaluators"):
            markdown = markdown.replace(f"<!-- {key} -->", _offered(key))
    home = Path(config["docs_dir"])
    folder = (home / page.file.src_uri).parent

    def inside(link: re.Match[str]) -> str:
        target = link[2].partition("#")[0]
        outside = not re.match(r"https?:|mailto:|#", link[2]) and not (folder / target).resolve().is_relative_to(home)
        from_home = page.file.src_uri == "index.md" and not (home / target).exists()
        return link[1] if target and "://" not in target and (outside or from_home) else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", inside, markdown)


def _recipe() -> str:
    from compressx.recipe.schema import Recipe

    return "\n\n".join(_section(model) for model in dict.fromkeys(_models(Recipe)))


def _options() -> str:
    from compressx import load_plugins

    told = []
    for name, spec in load_plugins().offers["pruners"].items():
        groups = ", ".join(f"`{group}`" for group in spec.groups)
        also = [f"Groups: {groups}.", *(["N:M."] if spec.nm else []), *(["Reconstructs."] if spec.reconstructs else [])]
        table = _table(spec.options) if spec.options.model_fields else "No options."
        told.append(f"### {name}\n\n{spec.summary}. {' '.join(also)}\n\n{table}")
    return "\n\n".join(told)


def _offered(key: str) -> str:
    from compressx import load_plugins
    from compressx.recipe.schema import Recipe

    told, shown = [], {*_models(Recipe)}
    for name, spec in load_plugins().offers[key].items():
        table = _table(spec.options) if spec.options.model_fields else "No options."
        told.append(f"### {name}\n\n{spec.summary}.\n\n{table}")
        inside = [model for model in dict.fromkeys(_models(spec.options)) if model not in {*shown, spec.options}]
        told += [_section(model) for model in inside]
        shown |= {*inside}
    return "\n\n".join(told)


def _section(model: type[BaseModel]) -> str:
    return f"### {model.__name__}\n\n{(model.__doc__ or '').strip()}\n\n{_table(model)}"


def _table(model: type[BaseModel]) -> str:
    """Write one row for each key, of the JSON schema that editors use."""
    schema = model.model_json_schema(by_alias=True)
    schema = schema.get("$defs", {}).get(schema.get("$ref", "").rpartition("/")[2], schema)  # of one that holds itself
    lines = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, described in schema["properties"].items():
        default = "required" if name in schema.get("required", []) else f"`{described.get('default', {})}`"
        meaning = described.get("description", "").replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(described)} | {default} | {meaning} |")
    return "\n".join(lines)


def _type(described: dict[str, Any]) -> str:
    if "enum" in described:
        return ", ".join(f"`{value}`" for value in described["enum"])
    if "const" in described:
        return f"`{described['const']}`"
    if "$ref" in described:
        name = described["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if name[0] != "_" else "mapping"
    if some := described.get("anyOf") or described.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(one) for one in some))
    kind = described.get("type", "anything")
    kinds = " or ".join(kind) if isinstance(kind, list) else kind
    if kinds == "array":
        return f"list of {_type(described.get('items', {}))}"
    limits = [f"{sign} {described[key]:g}" for key, sign in _LIMITS.items() if key in described]
    return f"{kinds}{', ' if limits else ''}{', '.join(limits)}"


_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Every model in the keys of this one, each once: a dataset can hold another dataset."""
    found = [model]
    for one in found:  # grows while it is read
        inside = (inner for field in one.model_fields.values() for inner in _inside(field.annotation))
        found += [inner for inner in dict.fromkeys(inside) if inner not in found]
    return found


def _inside(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _inside(argument)
