"""How a recipe's prompts are shortened: the check of `select_tokens`, which evaluation and generation use."""

from __future__ import annotations

from functools import partial

from compressx.planning.plan import Plan
from compressx.plugins.kinds import TOKEN_SELECTOR
from compressx.prompts.prepare import Selecting
from compressx.runtime.errors import Mistakes
from compressx.stages.state import RunState, Stage


class TokenSelection(Stage):
    """Check the token selector; it is built where prompts are read."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:  # noqa: ARG002 - of the model
        """Refuse an unknown selector, its options, and a model whose attention it cannot read."""
        settings, loaded = state.recipe.select_tokens, state.loaded
        if settings is None or state.skeleton is None:
            return
        with mistakes.collected():
            with loaded.at("select_tokens", "selector"):
                state.plugins.find(TOKEN_SELECTOR, settings.selector)
            where = partial(loaded.where, "select_tokens", "options")
            Selecting(settings, state.plugins).check(state.skeleton, state.tokenizer, where)


def selecting_of(state: RunState) -> Selecting | None:
    """Return how prompts are shortened, if the recipe does."""
    settings = state.recipe.select_tokens
    return None if settings is None else Selecting(settings, state.plugins)
