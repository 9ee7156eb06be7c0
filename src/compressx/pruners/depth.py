"""Which decoder blocks go: one after the other, each by trial."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field, StrictBool, StrictInt

from compressx import Divergences, PrunerSpec, hookimpl

_WIDTH = 8
"""Blocks tried beside removed ones, those that cost least when last tried. What a block costs changes slowly."""


class Options(BaseModel):
    """The options of `depth`."""

    windows: StrictInt = Field(8, ge=1, description="calibration sequences that trials run on, the first ones")
    solve: StrictBool = Field(
        True,
        description="solve for the last linear before each gap again, so that it adds what the dropped blocks added",
    )


class Depth:
    """Drops one block after the other, each time the one without which the predictions diverge least."""

    def __init__(self, options: Options) -> None:
        self.windows, self.solves = options.windows, options.solve

    def choose(self, blocks: Sequence[str], count: int, divergences: Divergences) -> list[str]:
        gone: list[str] = []
        costs = dict.fromkeys(blocks, 0.0)  # by how much the divergence grew when each was last tried beside others
        while len(gone) < count:
            left = sorted((fqn for fqn in blocks if fqn not in gone), key=lambda fqn: costs[fqn])
            some = left[:_WIDTH] if gone else left
            before, *found = divergences([gone, *([*gone, fqn] for fqn in some)])
            costs |= {fqn: x - before for fqn, x in zip(some, found, strict=True)}
            gone.append(min(zip(found, some, strict=True))[1])
        return gone


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `depth`."""
    summary = "drops blocks by trial, those without which the predictions change least"
    return [PrunerSpec("depth", summary, Options, Depth, groups=(), nm=False, units=("blocks",))]
