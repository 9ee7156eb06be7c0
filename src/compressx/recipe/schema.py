"""The recipe's schema and loaders, for files, Python values and models in memory, and its JSON schema for editors.

All errors are reported at once, each with its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, Field, StrictBool
from pydantic.errors import PydanticInvalidForJsonSchema

from compressx.recipe.document import Node, Step, dump_yaml, from_python, override, put, read_yaml
from compressx.recipe.rules import Rule, Target
from compressx.recipe.sections import AllocationField, Calibration, Finetune, ReconstructBlock, SelectTokens
from compressx.recipe.sources import ComputeDtype, DatasetSource, Draw, ModelField, datasets_in, long_form
from compressx.recipe.validation import Strict, validated
from compressx.runtime.errors import RecipeError


def _format_from_text(value: object) -> object:
    if isinstance(value, dict) and "format" in value and (flat := sorted({*value} - {"format", "options"})):
        raise ValueError(
            f"unknown key {flat[0]!r}; options of a format go under options, as in options: {{{flat[0]}: ...}}"
        )
    return {"format": value} if isinstance(value, str) else value


class ExportFormat(Strict):
    """A format to write."""

    format: str = Field(description="name of the exporter")
    options: dict[str, Any] = Field(default_factory=dict, description="the exporter's own options")


FormatField = Annotated[ExportFormat, BeforeValidator(_format_from_text, json_schema_input_type=str | ExportFormat)]


class Recipe(Strict):
    """The complete description of a run."""

    model: ModelField
    base: ModelField | None = Field(
        None,
        description="model that `model` was fine-tuned from: rules prune the difference, and what they drop becomes "
        "the base's weight",
        examples=["HuggingFaceTB/SmolLM2-135M"],
    )
    base_keeps: list[str] | None = Field(
        None,
        min_length=1,
        description="other parameters that become the base's, by glob over their names; without it embeddings, norms "
        "and biases stay as they were fine-tuned",
        examples=[["*embed_tokens*", "*norm*"]],
    )
    compute_dtype: ComputeDtype = Field(
        "auto",
        description="dtype of matrix products while blocks are run on text or trained; weights, statistics, pruners "
        "and evaluation keep theirs. auto: that of the weights, or one that this machine multiplies 1.5 times as fast: "
        "float32 for 16-bit weights; with reconstruct_block or finetune also bfloat16",
    )
    calibration: Calibration | None = Field(
        None,
        description="required by every pruner except magnitude",
        examples=[{"dataset": "wikitext", "samples": 128}],
    )
    prune: list[Rule] = Field(
        default_factory=list,
        description="which pruner prunes which linears; may be left out where tokens are selected only",
        examples=[[{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]],
    )
    ignore: list[Target] | None = Field(
        None,
        min_length=1,
        description="linears that every rule leaves alone, named as in targets",
        examples=[["*.o_proj", {"layers": "0-3"}]],
    )
    allocation: AllocationField | None = Field(
        None,
        description="chooses the rules' sparsities; without it each rule gives its own",
        examples=[{"method": "attention-aware", "target": 0.5}],
    )
    shrink: StrictBool = Field(
        False,
        description="write the smaller dense model that is left when units are pruned whole, instead of one of the "
        "original size with zeros; needs rules with pattern: neurons, kv-groups, experts or blocks",
    )
    reconstruct_block: ReconstructBlock | None = Field(
        None,
        description="trains the surviving weights of each block after it is pruned",
        examples=[{"passes": 4}],
    )
    finetune: Finetune | None = Field(
        None, description="trains the surviving weights of the whole model, with masks held", examples=[{"steps": 200}]
    )
    evaluate: dict[str, Any] | None = Field(
        None,
        description="what is measured on the dense and on the pruned model: the options of each evaluator by its name",
        examples=[{"token_perplexity": {"dataset": "wikitext"}}],
    )
    select_tokens: SelectTokens | None = Field(
        None,
        description="which tokens of a long prompt the pruned model reads: in evaluate.needle and in lm_eval's tasks "
        "that generate text, and by default in compressx generate",
        examples=[{"selector": "retrieval-heads", "keep": 0.125}],
    )
    export: list[FormatField] = Field(
        default=[ExportFormat(format="safetensors")],
        min_length=1,
        description="formats in which the pruned model is written: safetensors into the folder model, others into a "
        "folder of their name in exports",
        examples=[["safetensors", "packed"]],
    )
    deterministic: StrictBool = Field(
        False, description="take deterministic algorithms, for the same result on a GPU each time; slower"
    )
    output: Path = Field(description="folder to write: new, empty, or an earlier run's output")

    @property
    def own_widths(self) -> bool:
        """Whether an allocation gives each block its own number of units."""
        return self.allocation is not None and any(isinstance(rule.pattern, str) for rule in self.prune)

    def draws(self) -> dict[str, Draw]:
        """Return the draws of windows by their section."""
        sections = {"calibration": self.calibration, "finetune": self.finetune}
        return {name: x.draw for name, x in sections.items() if x is not None and x.draw is not None}

    def datasets(self) -> dict[tuple[Step, ...], DatasetSource]:
        """Return the datasets by their location in the recipe."""
        found: dict[tuple[Step, ...], DatasetSource] = {}
        for name, section in (("calibration", self.calibration), ("finetune", self.finetune)):
            if section is not None and section.dataset is not None:
                found[name, "dataset"] = section.dataset
            elif section is not None:
                found |= {(name, "datasets", i): dataset for i, dataset in enumerate(section.datasets or ())}
        return found | dict(datasets_in(self.evaluate, ("evaluate",)))


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe and its source.

    Attributes:
        source: the parsed document, with places.
        recipe: the recipe, with short forms expanded and defaults filled in.
    """

    source: Node
    recipe: Recipe

    def where(self, *loc: Step) -> str:
        """Return the place of a key or list item, as `Node.where` does."""
        return self.source.where(*loc)

    def at(self, *loc: Step) -> AbstractContextManager[None]:
        """Prefix the message of an error with the place of a key or list item."""
        return self.source.at(*loc)

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML, which loads to an equal recipe."""
        return dump_yaml(self.recipe.model_dump(mode="json", by_alias=True, exclude_none=True))


def load_recipe(path: Path, overrides: Sequence[str] = (), grid: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe from a YAML file.

    Args:
        path: the file.
        overrides: `a.b.0.c=VALUE` with VALUE in YAML, applied in order.
        grid: assignments of the same form from `--grid`, applied after `overrides`.

    Raises:
        RecipeError: one line with its place for each error in the file or the overrides.
    """
    return recipe_from_source(read_recipe(path, overrides, grid))


def read_recipe(path: Path, overrides: Sequence[str] = (), grid: Sequence[str] = ()) -> Node:
    """Read a recipe's document from a YAML file, without comparing it with the schema.

    Raises:
        RecipeError: a file that cannot be read or is not YAML, or an override that has no place in it.
    """
    source = read_yaml(path)
    for option, given in (("--set", overrides), ("--grid", grid)):
        for assignment in given:
            source = override(source, assignment, option, long_form)
    return source


def recipe_from_dict(recipe: Mapping[str, Any], name: str = "<dict>") -> LoadedRecipe:
    """Load a recipe from a Python mapping.

    Args:
        recipe: the same structure as in a YAML file.
        name: stands in for the file name in places, as in `<dict>:prune[1].sparsity`.

    Raises:
        RecipeError: as for `load_recipe`.
    """
    return recipe_from_source(from_python(recipe, name))


def recipe_from_source(source: Node) -> LoadedRecipe:
    """Compare a document with the schema.

    Raises:
        RecipeError: one line with its place for each error.
    """
    if source.value is None or source.value == {}:
        raise RecipeError(f"{source.place}: the recipe is empty; it needs model, prune, output")
    loaded = LoadedRecipe(source, validated(Recipe, source.plain(), source.where))
    if mistakes := [*_nothing_pruned_mistakes(loaded), *_budget_mistakes(loaded), *_base_mistakes(loaded)]:
        raise RecipeError("\n".join(mistakes))
    return loaded


def _nothing_pruned_mistakes(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield a message if nothing is pruned and no tokens are selected, or for each section that nothing reads then."""
    recipe = loaded.recipe
    if recipe.prune:
        return
    if recipe.select_tokens is None:
        example = '[{targets: ["*"], pruner: wanda, sparsity: 0.5}]'
        yield f"{loaded.where('prune')}: missing key 'prune', a list of rules, such as {example}"
        return
    for name in ("base", "calibration", "ignore", "allocation", "reconstruct_block", "finetune"):
        if getattr(recipe, name) is not None:
            yield f"{loaded.where(name)}: {name} is there, but nothing is pruned; add prune, or remove {name}"


def _base_mistakes(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield a message for each key that needs zeros, though there is a base, or a base, though there is none."""
    recipe = loaded.recipe
    if recipe.base is None:
        for i, rule in enumerate(recipe.prune):
            if rule.sparsity == 1:
                where = loaded.where("prune", i, "sparsity")
                yield f"{where}: prune[{i}].sparsity is 1; expected less than 1 without base"
        if recipe.base_keeps is not None:
            yield f"{loaded.where('base_keeps')}: base_keeps only goes with base, the model that weights are taken from"
        return
    for name in ("shrink", "reconstruct_block", "finetune"):
        if getattr(recipe, name):
            yield (
                f"{loaded.where(name)}: {name} needs zeros, but with base at {loaded.where('base')} dropped weights "
                f"are the base's; remove {name}, or base"
            )


def _budget_mistakes(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield a message for each rule that lacks a sparsity, or has one despite an allocation."""
    allocated = loaded.recipe.allocation is not None
    for i, rule in enumerate(loaded.recipe.prune):
        if allocated and rule.pattern in ("experts", "blocks"):
            yield (
                f"{loaded.where('allocation')}: allocation chooses no sparsities of {rule.pattern} at "
                f"{loaded.where('prune', i, 'pattern')}; drop allocation, or prune them by a recipe of their own"
            )
        elif allocated and rule.sparsity is not None:
            yield (
                f"{loaded.where('prune', i, 'sparsity')}: prune[{i}] has sparsity {rule.sparsity}, but allocation at "
                f"{loaded.where('allocation')} chooses every rule's sparsity; drop sparsity here, or drop allocation"
            )
        elif not allocated and rule.sparsity is None and isinstance(rule.pattern, str):
            yield f"{loaded.where('prune', i)}: prune[{i}]: {rule.pattern} needs sparsity, such as 0.2"
        elif not allocated and rule.sparsity is None and rule.pattern is None:
            yield f'{loaded.where("prune", i)}: prune[{i}]: needs sparsity, such as 0.5, or pattern, such as "2:4"'


_ARGUMENT = "the argument calibration"
_NOT_IN_MEMORY = {
    "model": "the model is the one that is passed to prune; leave it out, or call compressx.run",
    "output": "a model in memory is pruned without writing files; leave it out, or call compressx.run",
    "base_keeps": "copy these parameters before, or call compressx.run",
    "export": "a model in memory is not written; leave it out, or call compressx.run",
    "shrink": "the smaller model is written to an output folder; leave it out, or call compressx.run",
}


def recipe_in_memory(
    recipe: Path | Mapping[str, Any], model: str, calibration: Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> LoadedRecipe:
    """Load a recipe for a model that is in memory.

    Args:
        recipe: a YAML file, or the same structure in Python, without `model` and `output`.
        model: what the model is called in reports.
        calibration: the keys of `calibration` that the caller's own text decides; None without such text.
        overrides: as for `load_recipe`.

    Raises:
        RecipeError: as for `load_recipe`; a key that has no meaning here.
    """
    source = read_recipe(recipe, overrides) if isinstance(recipe, Path) else from_python(recipe, "<dict>")
    _refuse_keys(source, _NOT_IN_MEMORY)
    if calibration is not None:
        section = source.value.get("calibration") if isinstance(source.value, Mapping) else None
        decided = "the argument calibration decides it; leave it out of the recipe"
        _refuse_keys(section, dict.fromkeys([*calibration, "datasets"], decided), "calibration.")
        source = put(source, ["calibration"], section or Node({}, _ARGUMENT))
        for key, value in calibration.items():
            source = put(source, ["calibration", key], Node(value, _ARGUMENT))
    for key, value in (("model", model), ("output", ".")):
        source = put(source, [key], Node(value, source.place))
    return recipe_from_source(source)


def _refuse_keys(section: Node | None, reasons: Mapping[str, str], path: str = "") -> None:
    found = section.value if section is not None and isinstance(section.value, Mapping) else {}
    if lines := [f"{found[key].place}: {path}{key}: {why}" for key, why in reasons.items() if key in found]:
        raise RecipeError("\n".join(lines))


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
    _add_options(definitions, "format", ("ExportFormat",), offers.get("exporters", {}))
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
