"""Select the tokens of a prompt that a model reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressx.api.selector import AttentionRows, TokenSelector, TokenSelectorSpec
from compressx.models.access import Access, InMemory, config_fingerprint, weights_fingerprint
from compressx.models.architecture import Architecture, survey, text_config
from compressx.plugins.kinds import TOKEN_SELECTOR
from compressx.plugins.manager import Plugins, load_plugins
from compressx.prompts.contract import checked_places, checked_rows
from compressx.prompts.needles import choosing_ids, model_facts, tokenizer_beside
from compressx.prompts.scores import check_decoder, check_global, check_ids, global_blocks, read_scores
from compressx.recipe.selecting import SelectTokens
from compressx.recipe.validation import validate_options, validated
from compressx.runtime.cache import cache_folder, cached
from compressx.runtime.code import code_versions
from compressx.runtime.errors import CalibrationError, PluginError, blamed_on

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Selected:
    """The kept tokens of a batch of prompts.

    Attributes:
        input_ids: int64 [batch, tokens], padded on the left where prompts differ in length.
        attention_mask: int64 [batch, tokens], 0 at padding.
        places: of each prompt, where its kept tokens were in the given row, int64 [kept], ascending.
        reason: how the selector chose its blocks and heads; empty if it did not.
    """

    input_ids: Tensor
    attention_mask: Tensor
    places: tuple[Tensor, ...]
    reason: str = ""


def select_tokens(
    model: Any,
    input_ids: Tensor,
    *,
    selector: str = "retrieval-heads",
    keep: float,
    attention_mask: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
    protect: Mapping[str, int] | None = None,
    tokenizer: Any | None = None,
    plugins: Plugins | None = None,
) -> Selected:
    """Select tokens of prompts, for the caller's own `model.generate(selected.input_ids, attention_mask=...)`.

    Args:
        model: a transformers causal language model with all weights in memory.
        input_ids: int64 [batch, tokens] or [tokens], on any device.
        selector: name of a token selector.
        keep: tokens to keep of each prompt: a number, or a fraction of the prompt.
        attention_mask: of the same shape, 0 at padding, which may be on either side; no padding when absent.
        options: the selector's own.
        protect: `first` and `last`, tokens that are always kept, as in a recipe.
        tokenizer: the model's, for selectors that choose blocks or heads on synthetic prompts; when absent, the one
            saved beside the model.
        plugins: what `load_plugins` returned; discovered when absent.

    Raises:
        CompressxError: an error that the user can fix.
    """
    given = {"selector": selector, "keep": keep, "options": dict(options or {}), "protect": dict(protect or {})}
    settings = validated(SelectTokens, given, lambda *loc: f"select_tokens{''.join(f'[{x!r}]' for x in loc)}")
    ids: object = input_ids
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        kind = f"{ids.dtype} {[*ids.shape]}" if isinstance(ids, Tensor) else type(ids).__name__
        raise CalibrationError(f"input_ids are {kind}; expected token ids, int64 [batch, tokens] or [tokens]")
    prepared = prepare_selection(settings, InMemory(model), tokenizer, plugins or load_plugins())
    if attention_mask is not None and attention_mask.dim() == input_ids.dim() == 1:
        attention_mask = attention_mask[None]
    return prepared.select(input_ids[None] if input_ids.dim() == 1 else input_ids, attention_mask)


@dataclass(frozen=True, eq=False)
class Selection:
    """A selector that is ready to shorten prompts for one model.

    Attributes:
        settings: the recipe's section.
        access: the model.
        found: its blocks.
        selector: the plugin's.
        wanted: the scores that it asks for.
        told: not empty once it was said that nothing is left out.
    """

    settings: SelectTokens
    access: Access
    found: Architecture
    selector: TokenSelector
    wanted: AttentionRows
    told: list[bool] = field(default_factory=list, repr=False)

    def select(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Selected:
        """Select the tokens of prompts, one after the other.

        Args:
            input_ids: int64 [batch, tokens].
            attention_mask: [batch, tokens], 0 at padding; None for none.

        Raises:
            CalibrationError: an empty prompt, a mask with holes, more tokens than the model has positions, or more
                protected than kept.
            PluginError: an answer of the selector that breaks its contract.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device) != 0
        if mask.shape != input_ids.shape:
            raise CalibrationError(f"attention_mask is {[*mask.shape]}, expected {[*input_ids.shape]} as input_ids")
        if not len(input_ids):
            raise CalibrationError("input_ids has no prompt; expected one or more")
        places, lengths = [], []
        for number, row in enumerate(mask):
            there = row.nonzero()[:, 0]
            if not len(there):
                raise CalibrationError(f"prompt {number} has no token; expected one or more")
            if int(there[-1] - there[0]) + 1 != len(there):
                raise CalibrationError(
                    f"attention_mask of prompt {number}: expected ones without a gap, with zeros only before or after"
                )
            kept = self.places(input_ids[number, there])
            places.append(there[kept.to(there.device)])
            lengths.append(len(there))
        if lengths == [*map(len, places)] and not self.told:
            self.told.append(True)
            _log.warning(
                "select_tokens leaves nothing out of prompts of up to %d tokens: keep is %s, and protected are the "
                "first %d and the last %d",
                max(lengths), self.settings.keep, self.settings.protect.first, self.settings.protect.last,
            )  # fmt: skip
        longest = max(map(len, places))
        ids = input_ids.new_zeros(len(places), longest)
        ones = torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
        for number, kept in enumerate(places):
            ids[number, longest - len(kept) :] = input_ids[number, kept]
            ones[number, longest - len(kept) :] = 1
        return Selected(ids, ones, tuple(places), self.wanted.reason)

    def places(self, ids: Tensor, protected: Tensor | None = None) -> Tensor:
        """Return the places of the tokens to keep of one prompt, int64 [kept], ascending, on the CPU.

        Args:
            ids: int64 [n], without padding.
            protected: tokens to keep in any case, bool [n], besides those of `settings.protect`.
        """
        n, protect = len(ids), self.settings.protect
        fixed = torch.zeros(n, dtype=torch.bool) if protected is None else protected.clone()
        fixed[: protect.first] = True
        fixed[n - min(n, protect.last) :] = True
        free, keep = (~fixed).nonzero()[:, 0], self._number(n, int(fixed.sum()))
        wanted = keep - (n - len(free))
        if keep >= n:
            return torch.arange(n)
        if not wanted:
            return fixed.nonzero()[:, 0]
        scores = self._read(ids)
        with blamed_on(f"select of token selector {self.settings.selector!r} failed on a prompt of {n} tokens"):
            answer = self.selector.select(scores[..., free.to(scores.device)], wanted)
        fixed[free[checked_places(answer, len(free), wanted, self.settings.selector)]] = True
        return fixed.nonzero()[:, 0]

    def _number(self, n: int, protected: int) -> int:
        """Return how many tokens of a prompt to keep."""
        keep = self.settings.keep
        if isinstance(keep, float):
            return max(round(keep * n), protected, 1)
        if keep < protected:
            raise CalibrationError(
                f"keep is {keep}, but {protected} tokens of the prompt are protected: what stands around a long text, "
                "such as the question, and the first and last tokens; raise keep, or lower protect"
            )
        return keep

    def _read(self, ids: Tensor) -> Tensor:
        check_ids(self.access.model, ids)
        positions = getattr(text_config(self.access.model), "max_position_embeddings", None)
        if self.wanted.blocks and positions is not None and len(ids) > positions:
            raise CalibrationError(
                f"the prompt has {len(ids)} tokens, and the model {positions} positions, which its first blocks need "
                f"to read it for {self.settings.selector!r}; shorten it, or use a selector that reads no attention, "
                "such as recent"
            )
        return read_scores(self.access, self.found, ids.to(self.access.device), self.wanted)


def prepare_selection(settings: SelectTokens, access: Access, tokenizer: Any | None, plugins: Plugins) -> Selection:
    """Build a selector, and ask it once which scores it needs of a model.

    Raises:
        CompressxError: an unknown selector or option, a model whose attention cannot be read, or an invalid answer.
    """
    spec, options = checked_selector(settings, plugins)
    check_decoder(access.model)
    found, name = survey(access.model), settings.selector
    selector, queries = _built(spec, options)
    if queries:
        check_global(access.model, found, global_blocks(access.model)[:1] or (0,))
        tokenizer = tokenizer_beside(access.model) if tokenizer is None else tokenizer
    rows = partial(_observed, settings, selector, access, found, tokenizer, queries)
    if queries:  # the needles take a run of the whole model
        key = {
            "selector": name,
            "options": options.model_dump(mode="json"),
            "code": _code(plugins, name),
            "prompts": choosing_ids(tokenizer),
            "model": weights_fingerprint(access),
            "config": config_fingerprint(access.model),
            "versions": code_versions(),
        }
        kept = cached(key, lambda: asdict(rows()), cache_folder() / "selections")
        heads = None if kept["heads"] is None else tuple(kept["heads"])
        wanted = AttentionRows(tuple(kept["blocks"]), heads, kept["queries"], kept["reason"])
    else:
        wanted = rows()
    check_global(access.model, found, wanted.blocks)
    return Selection(settings, access, found, selector, wanted)


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


def check_selection(settings: SelectTokens, skeleton: Any, plugins: Plugins, where: Callable[..., str]) -> None:
    """Check as much of a selection as can be known without weights.

    Args:
        settings: the recipe's section.
        skeleton: the model; only its config and shapes are read.
        plugins: the available selectors.
        where: as for `checked_selector`.

    Raises:
        CompressxError: as for `prepare_selection`.
    """
    spec, options = checked_selector(settings, plugins, where)
    check_decoder(skeleton)
    found = survey(skeleton)
    selector, queries = _built(spec, options)
    blocks = global_blocks(skeleton)[:1] or (0,)
    if not queries:
        blocks = _observed(settings, selector, InMemory(skeleton), found, None, 0).blocks
    check_global(skeleton, found, blocks)


def _observed(
    settings: SelectTokens, selector: TokenSelector, access: Access, found: Architecture, tokenizer: Any | None,
    queries: int,
) -> AttentionRows:  # fmt: skip
    """Ask a selector which scores it needs, and check the answer."""
    name = settings.selector
    facts = model_facts(access, found, tokenizer, queries)
    with blamed_on(f"observe of token selector {name!r} failed on {type(access.model).__name__}"):
        asked = selector.observe(facts)
    return checked_rows(asked, facts, name)


@dataclass(frozen=True)
class Selecting:
    """How prompts are shortened: a recipe's `select_tokens` section, and the plugins that it names one of."""

    settings: SelectTokens
    plugins: Plugins

    def prepare(self, access: Access, tokenizer: Any) -> Selection:
        """Return the selection for a model; see `prepare_selection`."""
        return prepare_selection(self.settings, access, tokenizer, self.plugins)

    def key(self) -> dict[str, Any]:
        """Return what decides the selected tokens of a given model, in types that survive JSON."""
        return {"settings": self.settings.model_dump(mode="json"), "code": _code(self.plugins, self.settings.selector)}


def _by_itself(*loc: object) -> str:
    return ".".join(map(str, ("select_tokens", "options", *loc)))


def _code(plugins: Plugins, selector: str) -> str | None:
    """Return the digest of the code of a selector's plugin."""
    return next((p.code() for p in plugins.records if selector in p.offers.get(TOKEN_SELECTOR.key, ())), None)


def checked_selector(
    settings: SelectTokens, plugins: Plugins, where: Callable[..., str] = _by_itself
) -> tuple[TokenSelectorSpec, Any]:
    """Return the selector that a section names, and its validated options.

    Args:
        settings: the section.
        plugins: the available selectors.
        where: returns the place of a location within the options, for messages.

    Raises:
        PluginError: no such selector.
        RecipeError: an unknown or invalid option.
    """
    spec = plugins.find(TOKEN_SELECTOR, settings.selector)
    return spec, validate_options(spec.options, settings.options, where)
