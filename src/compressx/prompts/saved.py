"""Answers of saved models, and the selection of tokens that a run's folder asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compressx.models.access import Device, InMemory, device_for
from compressx.models.checkpoint import find_checkpoint
from compressx.models.generate import check_ids
from compressx.models.loading import load_model, load_skeleton, load_tokenizer
from compressx.prompts.answer import Answer, answer, framed
from compressx.prompts.prepare import Selecting
from compressx.recipe.schema import load_recipe
from compressx.recipe.sections import SelectTokens
from compressx.recipe.sources import ModelSource
from compressx.recipe.validation import validated

_DEFAULT: Mapping[str, Any] = {"selector": "retrieval-heads", "keep": 0.125}


def saved_selection(source: ModelSource) -> SelectTokens | None:
    """Return the `select_tokens` section of the recipe in a run's folder, or beside its `model` folder.

    Raises:
        RecipeError: a recipe that cannot be read.
    """
    if source.path is None:
        return None
    path = source.path.expanduser()
    folders = [path, *([path.parent] if path.name == "model" else [])]
    recipe = next((folder / "recipe.yaml" for folder in folders if (folder / "recipe.yaml").is_file()), None)
    return None if recipe is None else load_recipe(recipe).recipe.select_tokens


def changed_selection(
    saved: SelectTokens | None, changes: Mapping[str, Any], where: Callable[..., str]
) -> SelectTokens:
    """Return a selection with some keys changed; another selector drops the options of the one before.

    Args:
        saved: the selection; None for retrieval-heads with an eighth of the tokens.
        changes: keys of `select_tokens`; those inside `options` are changed one by one.
        where: returns the place of a location, for messages.

    Raises:
        RecipeError: an invalid value.
    """
    whole = dict(_DEFAULT) if saved is None else saved.model_dump()
    if changes.get("selector", whole["selector"]) != whole["selector"]:
        whole["options"] = {}
    options = {**whole.get("options", {}), **changes.get("options", {})}
    return validated(SelectTokens, {**whole, **changes, "options": options}, where)


def answer_saved(
    source: ModelSource, prompt: str, question: str, tokens: int, *, selecting: Selecting | None,
    device: Device = "auto", progress: Callable[[str], None] = lambda _: None,
) -> Answer:  # fmt: skip
    """Let a saved model answer a prompt; it is loaded completely into memory.

    Args:
        source: the model.
        prompt: a long text.
        question: asked after it; may be empty.
        tokens: to write at most, 1 or more.
        selecting: how the prompt is shortened; None reads it whole.
        device: where the model runs.
        progress: called with what begins, in a few words.

    Raises:
        CompressxError: an error that the user can fix.
    """
    where = device_for(device)
    checkpoint = find_checkpoint(source)
    skeleton, tokenizer = load_skeleton(checkpoint), load_tokenizer(checkpoint)
    if selecting is not None:
        selecting.check(skeleton, tokenizer)
    ids, protected = framed(tokenizer, prompt, question)
    check_ids(skeleton, ids, tokenizer)
    progress("loading the model")
    model = load_model(checkpoint).to(where)
    selection = None
    if selecting is not None:
        progress("choosing blocks and heads")
        selection = selecting.prepare(InMemory(model), tokenizer)
    progress("answering")
    return answer(model, tokenizer, ids, protected, tokens, selection)
