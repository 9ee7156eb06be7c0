"""The recipe's `prune` section: rules, which linears they name, and their patterns."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    StrictFloat,
    StrictInt,
    Tag,
    model_validator,
)

from compressx.api.patterns import NM, UNIT_KINDS, Group, UnitKind
from compressx.recipe.validation import PLAIN_OR_MAPPING, Strict, refuse_if, short_form


def _listed(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


_Number = StrictInt | Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,9}$")]


class Layers(Strict):
    """All linears of some decoder blocks."""

    layers: Annotated[list[_Number], BeforeValidator(_listed, json_schema_input_type=_Number | list[_Number])] = Field(
        min_length=1, description="numbers of decoder blocks from 0, such as 4-27 or [0, 1, -1]; -1 is the last"
    )

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.layers))
        return f"layers: [{listed}]" if len(self.layers) > 1 else f"layers: {listed}"

    def of(self, depth: int) -> set[int]:
        """Return the blocks' numbers from 0 in a model of `depth` blocks; refuse one that it does not have."""
        found: set[int] = set()
        for part in self.layers:
            first, last = (part, part) if isinstance(part, int) else sorted(map(int, part.split("-")))
            if not -depth <= first <= last < depth:
                beyond = last if last >= depth else first
                raise ValueError(f"the model has no layer {beyond}; its layers are 0-{depth - 1}, and -1 is the last")
            found |= {n % depth for n in range(first, last + 1)}
        return found


Target: TypeAlias = Annotated[Annotated[str, Tag("plain")] | Annotated[Layers, Tag("mapping")], PLAIN_OR_MAPPING]


def _pattern(value: object) -> object:
    """Read `2:4`, or a kind of unit."""
    text = str(value).strip() if isinstance(value, str | NM) else ""
    if text in UNIT_KINDS:
        return text
    if (match := re.fullmatch(r"([0-9]{1,9})\s*:\s*([0-9]{1,9})", text)) is None:
        units = ", ".join(UNIT_KINDS)
        raise ValueError(f'expected an N:M pattern, "2:4": of every 4 input features 2 are kept; or units: {units}')
    keep, of = map(int, match.groups())
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


class Reconstruction(Strict):
    """The pruner that updates the kept weights."""

    pruner: str
    options: dict[str, Any] = Field(default_factory=dict)


ReconstructionField = Annotated[Reconstruction, short_form(lambda text: {"pruner": text}, str | Reconstruction)]


class Rule(Strict):
    """One pruning rule. The first rule whose targets match a linear takes it."""

    targets: list[Target] = Field(
        min_length=1, description="linears, by glob over whole names or by layers", examples=[["*.q_proj", "*.k_proj"]]
    )
    pruner: str = Field(description="name of the pruner that selects weights")
    sparsity: StrictFloat | None = Field(
        None, ge=0, le=1, description="fraction of zeros in [0, 1); 0.5 is 50%; of differences also 1"
    )
    group: Group | None = Field(None, description="which weights share the budget; the pruner's own when absent")
    pattern: PatternField | None = Field(
        None, description='N:M, such as "2:4", or units to remove whole: neurons, kv-groups, experts, blocks'
    )
    multiple: StrictInt | None = Field(
        None, ge=1, description="the number of kept neurons is a multiple of it; 32 when absent, if it divides all"
    )
    reconstruct: ReconstructionField | None = Field(None, description="pruner that updates the kept weights")
    options: dict[str, Any] = Field(default_factory=dict, description="the pruner's own options")

    @model_validator(mode="after")
    def _sparsity_or_pattern(self) -> Rule:
        both = self.sparsity is not None and isinstance(self.pattern, NM)
        refuse_if(both, "sparsity and pattern exclude each other; keep one", "sparsity", "pattern")
        competing = f"group does not go with {self.pattern}, which says among what weights compete"
        refuse_if(self.pattern is not None and self.group is not None, competing, "group")
        other = self.multiple is not None and self.pattern != "neurons"
        refuse_if(other, "multiple only goes with pattern: neurons", "multiple")
        return self
