"""Find a token selector, check it, and make it ready for a model, which may take a run of the model once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compressx.api.selector import AttentionRows, TokenSelector, TokenSelectorSpec
from compressx.models.access import Access, InMemory, config_fingerprint, weights_fingerprint
from compressx.models.architecture import Architecture, survey
from compressx.models.generate import check_ids
from compressx.plugins.kinds import TOKEN_SELECTOR
from compressx.plugins.manager import Plugins, load_plugins
from compressx.prompts.contract import checked_rows
from compressx.prompts.needles import choosing_ids, model_facts, tokenizer_beside
from compressx.prompts.scores import check_decoder, check_global, global_blocks
from compressx.prompts.selection import Selection
from compressx.recipe.sections import SelectTokens
from compressx.recipe.validation import validate_options, validated
from compressx.runtime.cache import cached
from compressx.runtime.code import code_versions
from compressx.runtime.errors import PluginError, blamed_on


def _in_section(*loc: object) -> str:
    return ".".join(map(str, ("select_tokens", *loc)))


def _in_options(*loc: object) -> str:
    return _in_section("options", *loc)


@dataclass(frozen=True)
class Selecting:
    """How prompts are shortened: a recipe's `select_tokens` section, and the plugins that it names one of."""

    settings: SelectTokens
    plugins: Plugins

    @classmethod
    def given(
        cls, selector: str, keep: float, options: Mapping[str, Any] | None, protect: Mapping[str, int] | None,
        plugins: Plugins | None,
    ) -> Selecting:  # fmt: skip
        """Return what a caller from Python asks for; plugins are discovered when absent.

        Raises:
            RecipeError: an invalid value.
        """
        section = {"selector": selector, "keep": keep, "options": dict(options or {}), "protect": dict(protect or {})}
        return cls(validated(SelectTokens, section, _in_section), plugins or load_plugins())

    def spec(self, where: Callable[..., str] = _in_options) -> tuple[TokenSelectorSpec, Any]:
        """Return the selector's spec, and its validated options.

        Args:
            where: returns the place of a location within the options, for messages.

        Raises:
            PluginError: no such selector.
            RecipeError: an unknown or invalid option.
        """
        found = self.plugins.find(TOKEN_SELECTOR, self.settings.selector)
        return found, validate_options(found.options, self.settings.options, where)

    def check(self, skeleton: Any, tokenizer: Any | None, where: Callable[..., str] = _in_options) -> None:
        """Check as much as can be known without weights.

        Args:
            skeleton: the model; only its config and shapes are read.
            tokenizer: the model's, if there is one.
            where: as for `spec`.

        Raises:
            CompressxError: as for `prepare`.
        """
        selector, queries = _built(*self.spec(where))
        check_decoder(skeleton)
        found = survey(skeleton)
        blocks = global_blocks(skeleton)[:1] or (0,)  # of which a choice on synthetic prompts needs one
        if not queries:
            blocks = self._observed(selector, InMemory(skeleton), found, None, 0).blocks
        elif tokenizer is not None:
            for ids in choosing_ids(tokenizer):
                check_ids(skeleton, torch.tensor(ids), tokenizer, "select_tokens: a prompt to choose heads by")
        check_global(skeleton, found, blocks)

    def prepare(self, access: Access, tokenizer: Any | None) -> Selection:
        """Build the selector, and ask it once which scores it needs of a model.

        Args:
            access: the model.
            tokenizer: the model's; when absent and needed, the one saved beside the model.

        Raises:
            CompressxError: an unknown selector or option, a model whose attention cannot be read, or an invalid answer.
        """
        spec, options = self.spec()
        selector, queries = _built(spec, options)
        check_decoder(access.model)
        found = survey(access.model)
        if queries:
            check_global(access.model, found, global_blocks(access.model)[:1] or (0,))
            tokenizer = tokenizer_beside(access.model) if tokenizer is None else tokenizer
            wanted = self._chosen(selector, options, access, found, tokenizer, queries)
        else:
            wanted = self._observed(selector, access, found, None, 0)
        check_global(access.model, found, wanted.blocks)
        return Selection(self.settings, access, found, selector, wanted)

    def key(self) -> dict[str, Any]:
        """Return what decides the selected tokens of a given model, in types that survive JSON."""
        return {
            "settings": self.settings.model_dump(mode="json"),
            "code": self.plugins.code_of(TOKEN_SELECTOR, self.settings.selector),
        }

    def _chosen(
        self, selector: TokenSelector, options: Any, access: Access, found: Architecture, tokenizer: Any, queries: int
    ) -> AttentionRows:
        """Return what a selector asks for by its needles, which take a run of the whole model, or what it asked."""
        key = {
            "selector": self.settings.selector,
            "options": options.model_dump(mode="json"),
            "code": self.plugins.code_of(TOKEN_SELECTOR, self.settings.selector),
            "prompts": choosing_ids(tokenizer),
            "model": weights_fingerprint(access),
            "config": config_fingerprint(access.model),
            "versions": code_versions(),
        }

        def ask() -> dict[str, Any]:
            return asdict(self._observed(selector, access, found, tokenizer, queries))

        kept = cached(key, ask, "selections", AttentionRows)
        heads = None if kept["heads"] is None else tuple(kept["heads"])
        return AttentionRows(tuple(kept["blocks"]), heads, kept["queries"], kept["reason"])

    def _observed(
        self, selector: TokenSelector, access: Access, found: Architecture, tokenizer: Any | None, queries: int
    ) -> AttentionRows:
        """Ask a selector which scores it needs, and check the answer."""
        name, facts = self.settings.selector, model_facts(access, found, tokenizer, queries)
        with blamed_on(f"observe of token selector {name!r} failed on {type(access.model).__name__}"):
            asked = selector.observe(facts)
        return checked_rows(asked, facts, name)


def _built(spec: TokenSelectorSpec, options: Any) -> tuple[TokenSelector, int]:
    """Build a selector; also return the number of queries in its needles, 0 for none."""
    with blamed_on(f"build of token selector {spec.name!r} failed"):
        queries = 0 if spec.needles is None else spec.needles(options)
        selector = spec.build(options)
    if type(queries) is not int or queries < 0:
        raise PluginError(
            f"needles of token selector {spec.name!r} must return a number of queries, 0 or more; got {queries!r:.80}"
        )
    return selector, queries
