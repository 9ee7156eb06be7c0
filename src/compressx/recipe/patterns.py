"""What a recipe writes after `pattern:`: N:M, or units of the architecture."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from compressx.api.patterns import NM
from compressx.api.units import UNIT_KINDS, UnitKind


def _pattern(value: object) -> object:
    """Read `2:4`, or a kind of unit."""
    if isinstance(value, str) and value.strip() in UNIT_KINDS:
        return value.strip()
    if isinstance(value, NM):
        keep, of = value.keep, value.of
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]{1,9})\s*:\s*([0-9]{1,9})\s*", value)):
        keep, of = int(match[1]), int(match[2])
    else:
        raise ValueError(
            'expected an N:M pattern, "2:4": of every 4 input features 2 are kept; or units: ' + ", ".join(UNIT_KINDS)
        )
    if not 1 <= keep < of:
        idle = "; to prune nothing, leave the linear out of targets" if keep == of else ""
        raise ValueError(
            f'N:M keeps N of every M weights, with 1 <= N < M, such as "2:4"; {keep}:{of} keeps {keep} of {of}{idle}'
        )
    return NM(keep, of)


_NMText = Annotated[str, Field(pattern=r"^\s*[0-9]{1,9}\s*:\s*[0-9]{1,9}\s*$")]
PatternField = Annotated[
    NM | UnitKind,
    BeforeValidator(_pattern, json_schema_input_type=_NMText | UnitKind),
    PlainSerializer(str),
]
