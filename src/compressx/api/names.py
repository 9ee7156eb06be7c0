"""Names of linears in short, as people speak of them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def kind_of(name: str) -> str:
    """Return the last part of a linear's name; a fused expert's ends in its number, which is no kind."""
    return re.sub(r"(\.\d+)+$", "", name).rsplit(".", 1)[-1]


def in_short(names: Sequence[str]) -> str:
    """Name several linears of one block by the first one's full name and the others' kinds."""
    first, *others = names
    kinds = dict.fromkeys(kind_of(name) for name in others)
    return ", ".join([first, *kinds])
