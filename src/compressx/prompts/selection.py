"""Shorten prompts by a selector that is ready for a model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressx.api.selector import AttentionRows, TokenSelector
from compressx.models.access import Access
from compressx.models.architecture import Architecture, text_config
from compressx.prompts.contract import checked_places
from compressx.prompts.scores import read_scores
from compressx.recipe.sections import SelectTokens
from compressx.runtime.errors import CalibrationError, blamed_on

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
        positions = getattr(text_config(self.access.model), "max_position_embeddings", None)
        if self.wanted.blocks and positions is not None and len(ids) > positions:
            raise CalibrationError(
                f"the prompt has {len(ids)} tokens, and the model {positions} positions, which its first blocks need "
                f"to read it for {self.settings.selector!r}; shorten it, or use a selector that reads no attention, "
                "such as recent"
            )
        return read_scores(self.access, self.found, ids.to(self.access.device), self.wanted)
