"""`select_tokens`: find and check a token selector, make it ready for a model, and shorten prompts by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressx.api.selector import AttentionRows, ModelFacts, TokenSelector, TokenSelectorSpec
from compressx.models.access import Access, InMemory, config_fingerprint, weights_fingerprint
from compressx.models.architecture import Architecture, architecture_of, text_config
from compressx.models.generate import check_ids
from compressx.planning.plan import Plan
from compressx.plugins.kinds import TOKEN_SELECTOR
from compressx.plugins.manager import Plugins, load_plugins
from compressx.prompts.needles import choosing_ids, model_facts
from compressx.prompts.scores import check_decoder, check_global, global_blocks, read_scores
from compressx.recipe.schema import load_recipe
from compressx.recipe.sections import SelectTokens
from compressx.recipe.sources import ModelSource
from compressx.recipe.validation import validate_options, validated
from compressx.runtime.cache import cached
from compressx.runtime.code import code_versions
from compressx.runtime.errors import CalibrationError, Mistakes, PluginError, blamed_on
from compressx.stages.state import RunState, Stage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Selected:
    """The kept tokens of a batch of prompts.

    Attributes:
        input_ids: int64 [batch, tokens], padded on the left where prompts differ in length.
        attention_mask: int64 [batch, tokens], 0 at padding.
        places: positions of each prompt's kept tokens in its row of the given `input_ids`, int64 [kept], ascending.
        reason: how the selector chose its blocks and heads; empty if it did not.
    """

    input_ids: Tensor
    attention_mask: Tensor
    places: tuple[Tensor, ...]
    reason: str = ""


@dataclass(frozen=True, eq=False)
class ReadySelector:
    """A selector that is ready to shorten prompts for one model.

    Attributes:
        settings: the recipe's section.
        access: the model.
        found: its architecture.
        selector: the plugin's.
        rows: the scores that it asks for.
        warned: not empty once the warning is logged that no token is removed; a list, since the class is frozen.
    """

    settings: SelectTokens
    access: Access
    found: Architecture
    selector: TokenSelector
    rows: AttentionRows
    warned: list[bool] = field(default_factory=list, repr=False)

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
        if mask.shape != input_ids.shape or not len(mask):
            raise CalibrationError(
                f"input_ids are {[*input_ids.shape]}, and attention_mask is {[*mask.shape]}; expected one prompt or "
                "more, and the same shape"
            )
        places, lengths = [], []
        for number, row in enumerate(mask):
            tokens = row.nonzero()[:, 0]  # positions of the prompt in its padded row
            if not len(tokens) or int(tokens[-1] - tokens[0]) + 1 != len(tokens):
                raise CalibrationError(
                    f"prompt {number}: expected a token or more, and an attention_mask with zeros only before or after "
                    "its ones"
                )
            kept = self.positions(input_ids[number, tokens])
            places.append(tokens[kept.to(tokens.device)])
            lengths.append(len(tokens))
        if lengths == [*map(len, places)] and not self.warned:
            self.warned.append(True)
            _log.warning(
                "select_tokens removes nothing from prompts of up to %d tokens: keep is %s, and protected are the "
                "first %d and the last %d",
                max(lengths), self.settings.keep, self.settings.protect.first, self.settings.protect.last,
            )  # fmt: skip
        padded = partial(pad_sequence, batch_first=True, padding_side="left")
        ids = padded([row[kept] for row, kept in zip(input_ids, places, strict=True)])
        return Selected(ids, padded([torch.ones_like(kept) for kept in places]), tuple(places), self.rows.reason)

    def positions(self, ids: Tensor, protected: Tensor | None = None) -> Tensor:
        """Return the positions of the tokens to keep of one prompt, int64 [kept], ascending, on the CPU.

        Args:
            ids: int64 [n], without padding.
            protected: tokens to keep in any case, bool [n], besides those of `settings.protect`.
        """
        n, protect = len(ids), self.settings.protect
        fixed = torch.zeros(n, dtype=torch.bool) if protected is None else protected.clone()
        fixed[: protect.first] = True
        fixed[n - min(n, protect.last) :] = True
        free, keep = (~fixed).nonzero()[:, 0], self._kept_tokens(n, int(fixed.sum()))
        wanted = keep - (n - len(free))
        if keep >= n:
            return torch.arange(n)
        if not wanted:
            return fixed.nonzero()[:, 0]
        positions = getattr(text_config(self.access.model), "max_position_embeddings", None)
        if self.rows.blocks and positions is not None and n > positions:
            raise CalibrationError(
                f"the prompt has {n} tokens, and the model {positions} positions, which its first blocks need to read "
                f"it for {self.settings.selector!r}; shorten it, or use a selector that reads no attention, such as "
                "recent"
            )
        scores = read_scores(self.access, self.found, ids.to(self.access.device), self.rows)
        with blamed_on(f"select of token selector {self.settings.selector!r} failed on a prompt of {n} tokens"):
            answer = self.selector.select(scores[..., free.to(scores.device)], wanted)
        fixed[free[checked_positions(answer, len(free), wanted, self.settings.selector)]] = True
        return fixed.nonzero()[:, 0]

    def _kept_tokens(self, n: int, protected: int) -> int:
        """Return how many tokens of a prompt to keep."""
        keep = self.settings.keep
        if isinstance(keep, float):
            return max(round(keep * n), protected, 1)
        if keep < protected:
            raise CalibrationError(
                f"keep is {keep}, but {protected} tokens of the prompt are protected: what surrounds a long text, "
                "such as the question, and the first and last tokens; raise keep, or lower protect"
            )
        return keep


def checked_rows(asked: object, facts: ModelFacts, name: str) -> AttentionRows:
    """Return what `observe` asks for, its numbers as int: NumPy's and torch's are accepted, too.

    Raises:
        PluginError: no `AttentionRows`, blocks that do not ascend, no query, or heads that the model does not have.
    """
    if isinstance(asked, AttentionRows):
        with suppress(TypeError, ValueError):  # of other things than whole numbers
            blocks, queries = tuple(map(index, asked.blocks)), index(asked.queries)
            heads = None if asked.heads is None else tuple(map(index, asked.heads))
            of_the_model = heads is None or (heads and {*heads} <= {*range(facts.heads)})
            if [*blocks] == sorted({*blocks}) and of_the_model and queries >= 1:
                return AttentionRows(blocks, heads, queries, str(asked.reason))
    raise PluginError(
        f"observe of token selector {name!r} must return AttentionRows of ascending blocks, of heads from 0 to "
        f"{facts.heads - 1} (or None for all) and of one query or more; got {asked!r:.150}"
    )


def checked_positions(answer: object, n: int, keep: int, name: str) -> Tensor:
    """Return the positions that `select` chose, on the CPU.

    Raises:
        PluginError: another number, dtype or order of positions, duplicates, or positions outside the prompt.
    """
    wrong = f"int64 [{keep}]; got {answer!r:.80}"
    if isinstance(answer, Tensor):
        wrong = f"int64 [{keep}]; got {answer.dtype} {[*answer.shape]}"
        if answer.dtype == torch.int64 and answer.shape == (keep,):
            chosen = answer.cpu()
            if int(chosen[0]) >= 0 and int(chosen[-1]) < n and bool((chosen[1:] > chosen[:-1]).all()):
                return chosen
            wrong = f"got {chosen.tolist()!s:.80}"
    raise PluginError(
        f"token selector {name!r}: expected {keep} different positions from 0 to {n - 1} in ascending order, {wrong}"
    )


def _in_options(*loc: object) -> str:
    return ".".join(map(str, ("select_tokens", "options", *loc)))


@dataclass(frozen=True)
class SelectorSettings:
    """How prompts are shortened: a recipe's `select_tokens` section, and the plugins that have its selector."""

    settings: SelectTokens
    plugins: Plugins

    @classmethod
    def from_python(
        cls, selector: str, keep: float, options: Mapping[str, Any] | None, protect: Mapping[str, int] | None,
        plugins: Plugins | None,
    ) -> SelectorSettings:  # fmt: skip
        """Return what a caller from Python asks for; plugins are discovered when absent."""
        section = {"selector": selector, "keep": keep, "options": dict(options or {}), "protect": dict(protect or {})}
        settings = validated(SelectTokens, section, lambda *loc: ".".join(map(str, ("select_tokens", *loc))))
        return cls(settings, plugins or load_plugins())

    def spec(self, where: Callable[..., str] = _in_options) -> tuple[TokenSelectorSpec, Any]:
        """Return the selector's spec, and its validated options; `where` is their place for messages."""
        found = self.plugins.find(TOKEN_SELECTOR, self.settings.selector)
        return found, validate_options(found.options, self.settings.options, where)

    def check(self, skeleton: Any, tokenizer: Any | None, where: Callable[..., str] = _in_options) -> None:
        """Refuse what `prepare` would, as far as it shows without weights and, if it is None, without a tokenizer."""
        self._built(InMemory(skeleton), tokenizer, where)

    def prepare(self, access: Access, tokenizer: Any | None) -> ReadySelector:
        """Build the selector, and ask it once which scores it needs of a model.

        Args:
            access: the model.
            tokenizer: the model's; None is refused if the selector needs it.

        Raises:
            CompressxError: an unknown selector or option, a model whose attention cannot be read, or an invalid answer.
        """
        selector, queries, found, wanted = self._built(access, tokenizer)
        if wanted is None:
            if tokenizer is None:
                raise CalibrationError(
                    "the selector chooses blocks or heads on synthetic prompts, which need the model's tokenizer; pass "
                    "tokenizer=..."
                )
            wanted = self._chosen_rows(selector, access, found, tokenizer, queries)
            check_global(access.model, found, wanted.blocks)
        return ReadySelector(self.settings, access, found, selector, wanted)

    def _built(
        self, access: Access, tokenizer: Any | None, where: Callable[..., str] = _in_options
    ) -> tuple[TokenSelector, int, Architecture, AttentionRows | None]:
        """Return the selector, the queries in its needles, the architecture and, if 0, the rows that it asks for."""
        spec, options = self.spec(where)
        with blamed_on(f"build of token selector {spec.name!r} failed"):
            queries = 0 if spec.needles is None else spec.needles(options)
            selector = spec.build(options)
        if type(queries) is not int or queries < 0:
            raise PluginError(
                f"needles of token selector {spec.name!r} must return a number of queries, 0 or more; got "
                f"{queries!r:.80}"
            )
        check_decoder(access.model)
        found = architecture_of(access.model)
        wanted = None if queries else self._asked_rows(selector, access, found, None, 0)
        for ids in choosing_ids(tokenizer) if queries and tokenizer is not None else ():
            check_ids(access.model, torch.tensor(ids), tokenizer, "select_tokens: a prompt to choose heads by")
        # A choice on synthetic prompts needs one block that sees all of them.
        check_global(access.model, found, wanted.blocks if wanted else global_blocks(access.model)[:1] or (0,))
        return selector, queries, found, wanted

    def key(self) -> dict[str, Any]:
        """Return what decides the selected tokens of a given model, in JSON types."""
        return {
            "settings": self.settings.model_dump(mode="json"),
            "code": self.plugins.code_of(TOKEN_SELECTOR, self.settings.selector),
        }

    def _chosen_rows(
        self, selector: TokenSelector, access: Access, found: Architecture, tokenizer: Any, queries: int
    ) -> AttentionRows:
        """Return what a selector asks for by its needles: cached, because they take a run of the whole model."""

        def ask() -> dict[str, Any]:
            return asdict(self._asked_rows(selector, access, found, tokenizer, queries))

        key = {
            "selector": self.settings.selector,
            "options": self.spec()[1].model_dump(mode="json"),
            "code": self.plugins.code_of(TOKEN_SELECTOR, self.settings.selector),
            "prompts": choosing_ids(tokenizer),
            "model": weights_fingerprint(access),
            "config": config_fingerprint(access.model),
            "versions": code_versions(),
        }

        # Of the code of a selector that no plugin on disk offers nothing is known.
        kept = ask() if key["code"] is None else cached(key, ask, "selections", AttentionRows)
        heads = None if kept["heads"] is None else tuple(kept["heads"])
        return AttentionRows(tuple(kept["blocks"]), heads, kept["queries"], kept["reason"])

    def _asked_rows(
        self, selector: TokenSelector, access: Access, found: Architecture, tokenizer: Any | None, queries: int
    ) -> AttentionRows:
        """Ask a selector which scores it needs, and check the answer."""
        name, facts = self.settings.selector, model_facts(access, found, tokenizer, queries)
        with blamed_on(f"observe of token selector {name!r} failed on {type(access.model).__name__}"):
            asked = selector.observe(facts)
        return checked_rows(asked, facts, name)


def saved_selection(source: ModelSource) -> SelectTokens | None:
    """Return the `select_tokens` section of the recipe in a run's folder, or beside its `model` folder."""
    if source.path is None:
        return None
    path = source.path.expanduser()
    folders = [path, *([path.parent] if path.name == "model" else [])]
    recipe = next((folder / "recipe.yaml" for folder in folders if (folder / "recipe.yaml").is_file()), None)
    return None if recipe is None else load_recipe(recipe).recipe.select_tokens


def changed_selection(
    saved: SelectTokens | None, changes: Mapping[str, Any], where: Callable[..., str]
) -> SelectTokens:
    """Return a selection with some keys of `select_tokens` changed, those inside `options` one by one.

    Another selector drops the options of the one before. None as `saved` is retrieval-heads with an eighth of the
    tokens; `where` returns the place of a location, for messages.
    """
    whole: dict[str, Any] = saved.model_dump() if saved else {"selector": "retrieval-heads", "keep": 0.125}
    own = whole.get("options", {}) if changes.get("selector", whole["selector"]) == whole["selector"] else {}
    return validated(SelectTokens, {**whole, **changes, "options": {**own, **changes.get("options", {})}}, where)


class TokenSelection(Stage):
    """The stage of `select_tokens`, which only checks: the selector is built where prompts are read."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:  # noqa: ARG002 - of the model
        """Refuse an unknown selector, its options, and a model whose attention it cannot read."""
        loaded = state.loaded
        if (selecting := selecting_of(state)) is None or state.skeleton is None:
            return
        with mistakes.collected():
            with loaded.at("select_tokens", "selector"):
                selecting.plugins.find(TOKEN_SELECTOR, selecting.settings.selector)
            selecting.check(state.skeleton, state.tokenizer, partial(loaded.where, "select_tokens", "options"))


def selecting_of(state: RunState) -> SelectorSettings | None:
    """Return how prompts are shortened, if the recipe says so."""
    settings = state.recipe.select_tokens
    return None if settings is None else SelectorSettings(settings, state.plugins)


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
        tokenizer: the model's, for selectors that choose blocks or heads on synthetic prompts.
        plugins: what `load_plugins` returned; discovered when absent.

    Raises:
        CompressxError: an error that the user can fix.
    """
    selecting = SelectorSettings.from_python(selector, keep, options, protect, plugins)
    ids: object = input_ids
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        kind = f"{ids.dtype} {[*ids.shape]}" if isinstance(ids, Tensor) else type(ids).__name__
        raise CalibrationError(f"input_ids are {kind}; expected token ids, int64 [batch, tokens] or [tokens]")
    prepared = selecting.prepare(InMemory(model), tokenizer)
    if attention_mask is not None and attention_mask.dim() == input_ids.dim() == 1:
        attention_mask = attention_mask[None]
    return prepared.select(input_ids[None] if input_ids.dim() == 1 else input_ids, attention_mask)
