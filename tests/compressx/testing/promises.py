"""What one check of the kit says of a pruner that breaks the promise, without the checks before it."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from compressx import FeatureNorms, PruneResult, PrunerSpec, keep_masks
from compressx.testing.pruners import PRUNER_CHECKS, plans
from compressx.testing.subject import Subject


def broken_promise(spec: PrunerSpec, check: str, architecture: str) -> str:
    """Return the message that a check ends with."""
    checks = {"plans without weights": plans, **PRUNER_CHECKS}
    with pytest.raises(Exception, match=r".") as found:
        checks[check](Subject(spec, spec.options(), architecture))
    return str(found.value)


class Options(BaseModel):
    power: float = 1.0


class Base:
    """Wanda, as an author would write it; each test breaks one thing."""

    def __init__(self, options: Options) -> None:
        self.power = options.power

    def observe(self, block, name):
        return FeatureNorms(block.linears[name].in_features)

    def scores(self, block, patterns, stats):
        return {n: block.linears[n].weight.float().abs() * stats[n].norms ** self.power for n in patterns}

    def prune(self, block, patterns, stats):
        masks = keep_masks(self.scores(block, patterns, stats), patterns)
        return {n: PruneResult(keep) for n, keep in masks.items()}
