"""What quality.py compares: the sections of a recipe for every method at every budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[1] / "recipes"
BUDGETS = ("50%", "60%", "70%", "2:4", "4:8")
FINETUNE = {"steps": 128, "learning_rate": 1.0e-4, "teacher": "dense"}  # 4 passes over 128 windows, as in every block


def rules(*pruners: tuple[list[str], str], **options: Any) -> Callable[[str], dict[str, Any]]:
    """Return what makes a recipe's sections for a budget, each pruner with its targets."""

    def make(budget: str) -> dict[str, Any]:
        size = {"pattern": budget} if ":" in budget else {"sparsity": int(budget.rstrip("%")) / 100}
        return {"prune": [{"targets": targets, "pruner": name, **size} for targets, name in pruners], **options}

    return make


def best(budget: str) -> dict[str, Any]:
    """Return the sections of the shipped recipe for a budget; 4:8 is that for 2:4 with another pattern."""
    from compressx.recipe.schema import load_recipe

    path = RECIPES / ("best-2of4.yaml" if ":" in budget else f"best-{budget.rstrip('%')}.yaml")
    told = load_recipe(path).recipe.model_dump(mode="json", exclude_none=True)
    kept = ("prune", "allocation", "reconstruct_block")
    sections: dict[str, Any] = {k: told[k] for k in kept if k in told}
    if ":" in budget:
        sections["prune"] = [{**rule, "pattern": budget} for rule in sections["prune"]]
    return sections


def best_tuned(budget: str) -> dict[str, Any]:
    """Return the same, fine-tuned afterwards."""
    return {**best(budget), "finetune": FINETUNE}


QK, ALL = ["*.q_proj", "*.k_proj"], ["*"]
METHODS: dict[str, Callable[[str], dict[str, Any]]] = {
    "magnitude": rules((ALL, "magnitude")),
    "Wanda": rules((ALL, "wanda")),
    "SparseGPT": rules((ALL, "sparsegpt")),
    "ALPS": rules((ALL, "alps")),
    "attnprune + SparseGPT": rules((QK, "attnprune"), (ALL, "sparsegpt")),
    "attnprune + ALPS": rules((QK, "attnprune"), (ALL, "alps")),
    "best": best,
    "best, fine-tuned": best_tuned,
}


def best_but(budget: str, *, without: Sequence[str] = (), **sections: Any) -> dict[str, Any]:
    """Return `best` without some of its sections and with others; without an allocation every linear has the budget."""
    changed = {key: value for key, value in best(budget).items() if key not in without} | sections
    if "allocation" in without and ":" not in budget:
        changed["prune"] = [{**rule, "sparsity": int(budget.rstrip("%")) / 100} for rule in changed["prune"]]
    return changed


# What `best` is made of, one thing added at a time; ALPS, "attnprune + ALPS" and `best` itself are its other steps.
INGREDIENTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "+ sensitivity weights": partial(best_but, without=("allocation", "reconstruct_block")),
    "+ allocation": partial(best_but, without=("reconstruct_block",)),
}
OF_PERCENTAGES = ("+ sensitivity weights", "+ allocation")  # which best has nothing of at N:M
UNTUNED = {"best, fine-tuned": "best"}  # the row that the same run measures before


def applies(method: str, budget: str) -> bool:
    """Say whether a method is one of its own at a budget."""
    return ":" not in budget or method not in OF_PERCENTAGES
