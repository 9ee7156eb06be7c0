"""The recipe's `select_tokens` section."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, PlainValidator, StrictInt, WithJsonSchema

from compressx.recipe.validation import Strict


def _keep(value: object) -> int | float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if isinstance(number, float) and 0 < number < 1:
        return number
    if isinstance(number, float) and number == 1.0:
        raise ValueError("that could be one token or all of them; write 1 for one, and to read all select no tokens")
    if not math.isfinite(number) or number < 1 or number != int(number):
        raise ValueError("expected a number of tokens, at least 1, or a fraction of the prompt between 0 and 1")
    return int(number)


Keep = Annotated[
    int | float,
    PlainValidator(_keep),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1},
                              {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}]}),
]  # fmt: skip


class Protect(Strict):
    """Tokens that are kept whatever the selector says; they count among `keep`."""

    first: StrictInt = Field(4, ge=0, description="tokens at the beginning of a prompt")
    last: StrictInt = Field(32, ge=0, description="tokens at its end: the question")


class SelectTokens(Strict):
    """Which tokens of a prompt the model reads."""

    selector: str = Field(description="name of the token selector", examples=["retrieval-heads"])
    keep: Keep = Field(
        description="tokens of a prompt to keep: a number, or a fraction of it, but never fewer than are protected",
        examples=[0.125],
    )
    options: dict[str, Any] = Field(default_factory=dict, description="the selector's own options")
    protect: Protect = Field(default_factory=Protect, description="tokens that are always kept")
