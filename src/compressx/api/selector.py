"""What a token selector sees and returns: the contract between the host and plugins that shorten prompts.

The host runs the first blocks of a model on a prompt and computes the rows of attention scores that a selector asks
for. The selector returns the positions of the tokens to keep; it never sees the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True)
class AttentionRows:
    """The attention scores that a selector asks for.

    Attributes:
        blocks: indices of decoder blocks, ascending; empty if no scores are needed. Blocks after the last are not run.
        heads: indices of query heads, the same in each of these blocks; None for all.
        queries: how many of the prompt's last tokens are queries.
        reason: why these blocks and heads, if the selector chose them itself; shown to the user.
    """

    blocks: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None
    queries: int = 1
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Needle:
    """A synthetic prompt with a question and one sentence that answers it, hidden in other text.

    Attributes:
        scores: float32 [blocks, heads, queries, tokens], of all blocks that a selector may use and all heads. The
            question and a chat's template are left out of the tokens.
        blocks: the indices of those blocks.
        places: the columns of `scores` that are the hidden sentence's tokens, int64 [k], ascending.
    """

    scores: Tensor
    blocks: tuple[int, ...]
    places: Tensor


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What a selector knows about a model.

    Attributes:
        blocks: number of decoder blocks.
        heads: number of query heads in a block.
        global_blocks: indices of the blocks without a sliding window, which see the whole prompt.
        config: the transformers text config of the model.
        needles: synthetic prompts, for selectors that choose blocks or heads by them (`TokenSelectorSpec.needles`).
    """

    blocks: int
    heads: int
    global_blocks: tuple[int, ...]
    config: Any
    needles: tuple[Needle, ...] = ()


class TokenSelector(Protocol):
    """Selects the tokens of a prompt that a model reads."""

    def observe(self, facts: ModelFacts) -> AttentionRows:
        """Return the scores that `select` needs."""

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Choose tokens.

        Args:
            scores: float32 [blocks, heads, queries, n]: queries times keys as the model computes them before the
                softmax, scaled and capped; -inf where a query does not see a key. The last query is the prompt's last
                token. Without blocks the shape is [0, 0, queries, n].
            keep: how many tokens to keep, 1 <= keep < n.

        Returns:
            Their positions, int64 [keep], ascending, without duplicates, on the device of `scores`.
        """


@dataclass(frozen=True)
class TokenSelectorSpec:
    """How a plugin offers a token selector to recipes and to `compressx generate`.

    Attributes:
        name: what a recipe writes after `selector:`.
        summary: one line for people.
        options: pydantic model of the recipe's `options:`; unknown options are refused whatever its own config says.
        build: makes the selector from validated options.
        needles: from validated options, how many last tokens are queries in `ModelFacts.needles`; 0 if `observe` does
            not read needles, which take a run of the whole model. None: never.
    """

    name: str
    summary: str
    options: type[BaseModel]
    build: Callable[[Any], TokenSelector]
    needles: Callable[[Any], int] | None = None


def share_kept(places: Tensor, kept: Tensor) -> float:
    """Return the share of `places` that are among `kept`, both int64 [k]."""
    return float((places[:, None] == kept).any(1).double().mean())
