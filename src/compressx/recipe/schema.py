"""The recipe's schema and loader. All errors are reported at once, each with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, model_validator

from compressx.api.patterns import NM, Group
from compressx.recipe.document import Node, Placed, Step, dump_yaml, from_python, override, read_yaml
from compressx.recipe.methods import AllocationField
from compressx.recipe.patterns import PatternField
from compressx.recipe.selecting import SelectTokens
from compressx.recipe.sources import (
    Calibration,
    ComputeDtype,
    DatasetSource,
    Draw,
    ModelField,
    datasets_in,
    long_form,
    refuse_dtype,
)
from compressx.recipe.targets import Target
from compressx.recipe.tuning import Finetune
from compressx.recipe.validation import Strict, conflict, validated
from compressx.recipe.validation import validate_options as validate_options  # noqa: PLC0414 - plan.py takes it from here
from compressx.runtime.errors import RecipeError


def _pruner_from_text(value: object) -> object:
    return {"pruner": value} if isinstance(value, str) else value


ReconstructionField = Annotated[
    "Reconstruction", BeforeValidator(_pruner_from_text, json_schema_input_type="str | Reconstruction")
]


class Reconstruction(Strict):
    """The pruner that updates the surviving weights."""

    pruner: str
    options: dict[str, Any] = Field(default_factory=dict)


class Rule(Strict):
    """One pruning rule. The first rule whose targets match a linear takes it."""

    targets: list[Target] = Field(
        min_length=1,
        description="linears by glob over fully qualified names, or by layers",
        examples=[["*.q_proj", "*.k_proj"]],
    )
    pruner: str = Field(description="name of the pruner that selects weights")
    sparsity: StrictFloat | None = Field(None, ge=0, lt=1, description="fraction of zeros in [0, 1); 0.5 is 50%")
    group: Group | None = Field(None, description="which weights share the budget; the pruner's own when absent")
    pattern: PatternField | None = Field(
        None,
        description='N:M, such as "2:4"; with allocation N is chosen. Or units of the architecture that go whole, of '
        "which sparsity is the fraction: neurons, kv-groups, experts, blocks",
    )
    reconstruct: ReconstructionField | None = Field(None, description="pruner that updates the surviving weights")
    options: dict[str, Any] = Field(default_factory=dict, description="the pruner's own options")

    @model_validator(mode="after")
    def _sparsity_or_pattern(self) -> Rule:
        if self.sparsity is not None and isinstance(self.pattern, NM):
            raise conflict("sparsity and pattern exclude each other; keep one", ["sparsity", "pattern"])
        if isinstance(self.pattern, NM) and self.group is not None:
            raise conflict("group only goes with sparsity: N:M weights compete within their M neighbours", ["group"])
        if self.pattern is not None and self.group is not None:
            raise conflict(f"group does not go with {self.pattern}, which compete within their module", ["group"])
        return self


class ReconstructBlock(Strict):
    """Training of each pruned block's surviving weights to match the dense block's output."""

    passes: StrictInt = Field(4, ge=1, description="passes over the calibration text for each block")
    learning_rate: StrictFloat = Field(
        0.015,
        gt=0,
        le=1,
        description="about the largest step of a weight, as a fraction of its tensor's root mean square; it rises, "
        "then falls as a cosine",
    )
    batch_size: StrictInt = Field(4, ge=1, description="windows per step; a multiple of calibration.batch_size")
    norms: StrictBool = Field(False, description="train the gains of the block's norms")
    biases: StrictBool = Field(True, description="train the block's biases")
    held_out: StrictFloat = Field(
        0.0625,
        gt=0,
        lt=1,
        description="fraction of the calibration batches, rounded up, that are not trained on and decide which weights "
        "are kept",
    )
    seed: StrictInt = Field(0, ge=0, lt=2**63, description="seed of the order of the text")

    _dtype = model_validator(mode="before")(refuse_dtype)


class Recipe(Strict):
    """The complete description of a run."""

    model: ModelField
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
    deterministic: StrictBool = Field(
        False, description="take deterministic algorithms, for the same result on a GPU each time; slower"
    )
    output: Path = Field(description="folder to write: new, empty, or an earlier run's output")

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
class LoadedRecipe(Placed):
    """A valid recipe and its source.

    Attributes:
        recipe: the recipe, with short forms expanded and defaults filled in.
    """

    recipe: Recipe

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
    if mistakes := [*_nothing_pruned_mistakes(loaded), *_budget_mistakes(loaded)]:
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
    for name in ("calibration", "ignore", "allocation", "reconstruct_block", "finetune"):
        if getattr(recipe, name) is not None:
            yield f"{loaded.where(name)}: {name} is there, but nothing is pruned; add prune, or remove {name}"


def _budget_mistakes(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield a message for each rule that lacks a sparsity, or has one despite an allocation."""
    allocated = loaded.recipe.allocation is not None
    for i, rule in enumerate(loaded.recipe.prune):
        if isinstance(rule.pattern, str):
            if allocated:
                yield (
                    f"{loaded.where('allocation')}: allocation chooses no sparsities of {rule.pattern} at "
                    f"{loaded.where('prune', i, 'pattern')}; drop allocation, or prune them by a recipe of their own"
                )
            elif rule.sparsity is None:
                yield f"{loaded.where('prune', i)}: prune[{i}]: {rule.pattern} needs sparsity, such as 0.2"
            continue
        if not allocated and rule.sparsity is None and rule.pattern is None:
            yield f'{loaded.where("prune", i)}: prune[{i}]: needs sparsity, such as 0.5, or pattern, such as "2:4"'
        if allocated and rule.sparsity is not None:
            yield (
                f"{loaded.where('prune', i, 'sparsity')}: prune[{i}] has sparsity {rule.sparsity}, but allocation at "
                f"{loaded.where('allocation')} chooses every rule's sparsity; drop sparsity here, or drop allocation"
            )
