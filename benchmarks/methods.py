"""The methods that quality.py compares: recipe sections for each method and budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[1] / "recipes"
BUDGETS = ("50%", "60%", "70%", "80%", "2:4", "4:8")


def rules(*pruners: tuple[list[str], str], **options: Any) -> Callable[[str], dict[str, Any]]:
    """Return a function from a budget to recipe sections, with targets for each pruner."""

    def make(budget: str) -> dict[str, Any]:
        size = {"pattern": budget} if ":" in budget else {"sparsity": int(budget.rstrip("%")) / 100}
        return {"prune": [{"targets": targets, "pruner": name, **size} for targets, name in pruners], **options}

    return make


def shipped(budget: str) -> dict[str, Any]:
    """Return the shipped recipe of the lowest perplexity for a budget; 4:8 uses that of 2:4, and 80% that of 70%."""
    from compressx.recipe.schema import load_recipe

    name = "2of4" if ":" in budget else "70" if budget == "80%" else budget.rstrip("%")
    recipe = load_recipe(RECIPES / f"best-{name}.yaml").recipe.model_dump(mode="json", exclude_none=True)
    if budget == "80%":
        recipe["allocation"] |= {"target": 0.8, "sparsities": [0.6, 0.8, 0.9]}
    return recipe


def training() -> dict[str, Any]:
    """Return how best-50 trains the whole model, without how long and on what."""
    section: dict[str, Any] = shipped("50%")["finetune"]
    return {k: v for k, v in section.items() if k not in {"minutes", "datasets", "samples", "sequence_length"}}


def best(budget: str) -> dict[str, Any]:
    """Return the sections of the shipped recipe by which a model is pruned."""
    recipe = shipped(budget)
    sections: dict[str, Any] = {k: recipe[k] for k in ("prune", "allocation", "reconstruct_block") if k in recipe}
    sections["calibration"] = {"samples": recipe["calibration"]["samples"]}
    sections["finetune"] = {"learning_rate": recipe["finetune"]["learning_rate"]}
    if ":" in budget:
        sections["prune"] = [{**rule, "pattern": budget} for rule in sections["prune"]]
    return sections


QK, ALL = ["*.q_proj", "*.k_proj"], ["*"]
METHODS: dict[str, Callable[[str], dict[str, Any]]] = {
    "magnitude": rules((ALL, "magnitude")),
    "Wanda": rules((ALL, "wanda")),
    "SparseGPT": rules((ALL, "sparsegpt")),
    "ALPS": rules((ALL, "alps")),
    "SparseGPT + block reconstruction": rules((ALL, "sparsegpt"), reconstruct_block={"passes": 4}),
    "attnprune + SparseGPT": rules((QK, "attnprune"), (ALL, "sparsegpt")),
    "attnprune + ALPS": rules((QK, "attnprune"), (ALL, "alps")),
    "best": best,
}


def best_but(budget: str, *, without: Sequence[str] = (), **sections: Any) -> dict[str, Any]:
    """Return `best` without some sections and with others; without an allocation every linear gets the budget."""
    changed = {key: value for key, value in best(budget).items() if key not in without} | sections
    if "allocation" in without and ":" not in budget:
        changed["prune"] = [{**rule, "sparsity": int(budget.rstrip("%")) / 100} for rule in changed["prune"]]
    return changed


# Ablation of `best`, adding one component at a time; ALPS, "attnprune + ALPS" and `best` are its other steps.
INGREDIENTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "+ sensitivity weights": partial(best_but, without=("allocation", "reconstruct_block")),
    "+ allocation": partial(best_but, without=("reconstruct_block",)),
}
OF_PERCENTAGES = ("+ sensitivity weights", "+ allocation")  # not part of `best` at N:M


def applies(method: str, budget: str) -> bool:
    """Return whether a method is distinct at a budget."""
    return ":" not in budget or method not in OF_PERCENTAGES
