"""ZipLM (arXiv 2302.04089): removes the units whose removal, after re-solving the rest, raises the output error least.

The output is that of the linear that owns columns of the units: the down projection, the output projection. Only its
kept weights are solved for, and its bias where it has one; of the other linears rows are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from torch import Tensor

from compressx import (
    Block,
    Covariance,
    Hessian,
    Pattern,
    PruneResult,
    PrunerSpec,
    Statistic,
    Structured,
    UnitKind,
    UnsupportedModelError,
    find_units,
    hookimpl,
)
from compressx.numerics.obs import refused
from compressx.numerics.ziplm import remove_units
from compressx.pruners.hessian import HessianOptions

_UNITS: tuple[UnitKind, ...] = ("neurons", "kv-groups")


class ZipLM:
    """Prunes units by the linear that reads them."""

    def __init__(self, options: HessianOptions) -> None:
        self.damping = options.damping

    def observe(self, block: Block, name: str) -> Hessian | Covariance | None:
        if not _reads_units(block, name):
            return None
        linear = block.linears[name]
        return (Hessian if linear.bias is None else Covariance)(linear.in_features)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> dict[str, PruneResult]:
        results: dict[str, PruneResult] = {}
        for name, statistic in stats.items():
            pattern, of = cast("Structured", patterns[name]), cast("Hessian | Covariance", statistic)
            weight, bias = block.linears[name].weight, block.linears[name].bias
            unit = pattern.units.owners[name].unit

            def hessian(of: Hessian | Covariance = of, weight: Tensor = weight) -> Tensor:
                return of.assembled().to(weight.device)

            with refused(name):
                solution = remove_units(weight, hessian, unit, pattern.dropped, damping=self.damping)
            if isinstance(statistic, Covariance) and bias is not None:
                lost = (weight.double() - solution.weight) @ statistic.mean.to(weight.device)
                bias = (bias + lost).to(bias.dtype)
            shapes = {n: (block.linears[n].out_features, block.linears[n].in_features) for n in pattern.units.owners}
            masks = pattern.units.masks(solution.keep, shapes)
            results |= {n: PruneResult(keep) for n, keep in masks.items()}
            info = {"linear_error": solution.error.item(), "damping": solution.damping}
            results[name] = PruneResult(masks[name], solution.weight.to(weight.dtype), info, bias=bias)
        return results


def _reads_units(block: Block, name: str) -> bool:
    """Say whether a linear owns columns of units."""
    for kind in _UNITS:
        with suppress(UnsupportedModelError):  # a block without attention has neurons
            for units in find_units(kind, block):
                if name in units.owners:
                    return units.owners[name].dim == 1
    return False


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `ziplm`."""
    summary = "units of least loss, the others solved for anew (arXiv 2302.04089)"
    return [PrunerSpec("ziplm", summary, HessianOptions, ZipLM, groups=(), nm=False, units=_UNITS)]
