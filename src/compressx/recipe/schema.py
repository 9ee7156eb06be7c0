"""The recipe's schema and loaders, for files, Python values and models in memory, and its JSON schema for editors.

All errors are reported at once, each with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

from pydantic import BaseModel, Field, StrictBool
from pydantic.json_schema import GenerateJsonSchema

from compressx.api.patterns import NM
from compressx.recipe.document import (
    Location,
    PlacedValue,
    Step,
    dump_yaml,
    from_python,
    override,
    path_text,
    read_yaml,
)
from compressx.recipe.rules import Rule, Target
from compressx.recipe.sections import AllocationField, Calibration, Finetune, ReconstructBlock, SelectTokens
from compressx.recipe.sources import ComputeDtype, DatasetSource, Draw, ModelField, datasets_in
from compressx.recipe.validation import Strict, short_form, validated
from compressx.runtime.errors import RecipeError


class ExportFormat(Strict):
    """A format to write."""

    format: str = Field(description="name of the exporter")
    options: dict[str, Any] = Field(default_factory=dict, description="the exporter's own options")


FormatField = Annotated[ExportFormat, short_form(lambda text: {"format": text}, str | ExportFormat)]


class Recipe(Strict):
    """The complete description of a run."""

    model: ModelField
    base: ModelField | None = Field(
        None,
        description="model that `model` was fine-tuned from: rules prune the difference",
        examples=["HuggingFaceTB/SmolLM2-135M"],
    )
    base_keeps: list[str] | None = Field(
        None,
        min_length=1,
        description="other parameters that become the base's, by glob",
        examples=[["*embed_tokens*", "*norm*"]],
    )
    compute_dtype: ComputeDtype = Field(
        "auto", description="dtype of matmuls of blocks; auto: the weights', or one that is 1.5 times as fast here"
    )
    calibration: Calibration | None = Field(
        None,
        description="text that all pruners but magnitude observe",
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
    shrink: StrictBool = Field(False, description="write the smaller dense model, without units pruned whole")
    reconstruct_block: ReconstructBlock | None = Field(
        None, description="trains the kept weights of each block after it is pruned", examples=[{"passes": 4}]
    )
    finetune: Finetune | None = Field(
        None, description="trains the kept weights of the whole model, with masks held", examples=[{"steps": 200}]
    )
    evaluate: dict[str, Any] | None = Field(
        None,
        description="what is measured on the dense and on the pruned model: the options of each evaluator by its name",
        examples=[{"token_perplexity": {"dataset": "wikitext"}}],
    )
    select_tokens: SelectTokens | None = Field(
        None,
        description="which tokens of a long prompt the pruned model reads",
        examples=[{"selector": "retrieval-heads", "keep": 0.125}],
    )
    export: list[FormatField] = Field(
        default=[ExportFormat(format="safetensors")],
        min_length=1,
        description="formats in which the pruned model is written",
        examples=[["safetensors", "packed"]],
    )
    deterministic: StrictBool = Field(
        False, description="take deterministic algorithms, for the same result on a GPU each time; slower"
    )
    output: Path = Field(description="folder to write: new, empty, or an earlier run's output")

    @property
    def of_difference(self) -> bool:
        """Whether what fine-tuning changed is pruned, so that dropped weights become the base's, in place of zeros."""
        return self.base is not None

    @property
    def own_widths(self) -> bool:
        """Whether an allocation gives each block its own number of units."""
        return self.allocation is not None and any(isinstance(rule.pattern, str) for rule in self.prune)

    def draws(self) -> dict[str, Draw]:
        """Return the draws of sequences by their section."""
        tuned = None if self.finetune is None else self.finetune.draw
        return {name: x for name, x in {"calibration": self.calibration, "finetune": tuned}.items() if x is not None}

    def datasets(self) -> dict[Location, DatasetSource]:
        """Return the datasets by their location in the recipe."""
        return dict(datasets_in(self))


@dataclass(frozen=True)
class LoadedRecipe(PlacedValue):
    """A document that is a valid recipe.

    Attributes:
        recipe: the recipe, with short forms expanded and defaults filled in.
    """

    recipe: Recipe

    def refuse(self, message: str, *loc: Step) -> NoReturn:
        """Raise a `RecipeError` with the place of a key or list item."""
        raise RecipeError(f"{self.where(*loc)}: {message}")

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML, which loads to an equal recipe."""
        return dump_yaml(self.recipe.model_dump(mode="json", by_alias=True, exclude_none=True))


def load_recipe(recipe: PlacedValue | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe from a YAML file, the same structure in Python, or a document that was read from one.

    Overrides are `a.b.0.c=VALUE` with VALUE in YAML, applied in order.
    """
    return _validated(_read(recipe, overrides))


def _read(recipe: PlacedValue | Path | Mapping[str, Any], overrides: Sequence[str]) -> PlacedValue:
    if not isinstance(recipe, PlacedValue):
        recipe = read_yaml(recipe) if isinstance(recipe, Path) else from_python(recipe, "<dict>")
    return reduce(override, overrides, recipe)


def _validated(source: PlacedValue) -> LoadedRecipe:
    if not source.value and not isinstance(source.value, list):
        raise RecipeError(f"{source.where()}: the recipe is empty; it needs model, prune, output")
    loaded = LoadedRecipe(source.value, source.places, validated(Recipe, source.value, source.where))
    mistakes = [f"{source.where(*loc)}: {message}" for loc, message in _mistakes(loaded.recipe, source.where)]
    if mistakes:
        raise RecipeError("\n".join(mistakes))
    return loaded


def _mistakes(recipe: Recipe, where: Callable[..., str]) -> Iterator[tuple[Location, str]]:
    """Yield what sections say against each other, each with the key at which it is a mistake."""
    if recipe.prune:
        for i, rule in enumerate(recipe.prune):
            yield from _budget_mistakes(recipe, i, rule, where)
    elif recipe.select_tokens is None:
        rules = '[{targets: ["*"], pruner: wanda, sparsity: 0.5}]'
        yield ("prune",), f"missing key 'prune', a list of rules, such as {rules}"
    else:
        for name in ("base", "calibration", "ignore", "allocation", "reconstruct_block", "finetune"):
            if getattr(recipe, name) is not None:
                yield (name,), f"{name} is there, but nothing is pruned; add prune, or remove {name}"
    if recipe.base is None and recipe.base_keeps is not None:
        yield ("base_keeps",), "base_keeps only goes with base, the model that weights are taken from"
    for name in ("shrink", "reconstruct_block", "finetune"):
        if recipe.base is not None and getattr(recipe, name):
            base = f"with base at {where('base')} dropped weights are the base's"
            yield (name,), f"{name} needs zeros, but {base}; remove {name}, or base"


def _budget_mistakes(recipe: Recipe, i: int, rule: Rule, where: Callable[..., str]) -> Iterator[tuple[Location, str]]:
    """Yield a message if a rule lacks a sparsity, or has one despite an allocation, or one that its zeros forbid."""
    here: Location = ("prune", i)
    if recipe.allocation is None and rule.sparsity is None and not isinstance(rule.pattern, NM):
        needed = f"{rule.pattern} needs sparsity" if rule.pattern else 'needs pattern, such as "2:4", or sparsity'
        yield here, f"prune[{i}]: {needed}, such as 0.5"
    elif recipe.allocation is not None and rule.pattern in ("experts", "blocks"):
        units = f"allocation chooses no sparsities of {rule.pattern} at {where(*here, 'pattern')}"
        yield ("allocation",), f"{units}; drop allocation, or prune them by a recipe of their own"
    elif recipe.allocation is not None and rule.sparsity is not None:
        both = f"prune[{i}] has sparsity {rule.sparsity}, but allocation at {where('allocation')} chooses every rule's"
        yield (*here, "sparsity"), f"{both} sparsity; drop sparsity here, or drop allocation"
    if recipe.base is None and rule.sparsity == 1:
        yield (*here, "sparsity"), f"prune[{i}].sparsity is 1; expected less than 1 without base"


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
    """Load a recipe without `model` and `output`, for a model that is in memory and is called `model` in reports.

    `calibration` has the keys of that section that the caller's own text decides; None without such text.
    """
    source = _read(recipe, overrides)
    given = source.value if isinstance(source.value, dict) else {}
    refused: dict[Location, str] = {(key,): why for key, why in _NOT_IN_MEMORY.items() if key in given}
    if calibration is not None:
        own = given.get("calibration")
        stray = [key for key in (*calibration, "datasets") if isinstance(own, dict) and key in own]
        decided = "the argument calibration decides it; leave it out of the recipe"
        refused |= {("calibration", key): decided for key in stray}
    if refused:
        raise RecipeError("\n".join(f"{source.where(*at)}: {path_text(at)}: {why}" for at, why in refused.items()))
    for key, value in (calibration or {}).items():
        source = source.replaced(["calibration", key], PlacedValue(value, {(): "the argument calibration"}))
    for key, value in (("model", model), ("output", ".")):
        source = source.replaced([key], PlacedValue(value, {(): source.where()}))
    return _validated(source)


Models: TypeAlias = Mapping[str, type[BaseModel]]


def json_schema(offers: Mapping[str, Models]) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of recipes, with the options that are offered by kind and name.

    Other names are allowed, because others may be installed elsewhere.
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


class _Closed(GenerateJsonSchema):
    """Forbids unknown keys, as `validated` does whatever a model's config; what JSON has no word for is anything."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        return {**super().model_schema(schema), "additionalProperties": False}

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:  # noqa: ARG002
        return {}


def _defined(definitions: dict[str, Any], key: str, name: str, model: type[BaseModel]) -> str:
    """Add the options of what a plugin offers to the definitions; return their place."""
    inside = f"#/$defs/{key} {name}.{{model}}"
    described = model.model_json_schema(ref_template=inside, schema_generator=_Closed)
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
