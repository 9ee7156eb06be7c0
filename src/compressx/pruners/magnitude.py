"""Magnitude pruning: drop the smallest weights. Needs no calibration; the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Mapping

from compressx import Block, NoOptions, Pattern, PruneResult, PrunerSpec, Statistic, hookimpl, keep_masks


class Magnitude:
    """Scores a weight by its absolute value."""

    def observe(self, block: Block, name: str) -> None:
        """Ask for nothing: the weights say it all."""

    def prune(
        self,
        block: Block,
        patterns: Mapping[str, Pattern],
        stats: Mapping[str, Statistic],  # noqa: ARG002 - the protocol's
    ) -> dict[str, PruneResult]:
        """Keep the largest |W|."""
        scores = {name: block.linears[name].weight.float().abs() for name in patterns}
        return {name: PruneResult(keep) for name, keep in keep_masks(scores, patterns).items()}


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `magnitude`."""
    return [
        PrunerSpec(
            name="magnitude",
            summary="drops the smallest weights; no calibration",
            options=NoOptions,
            build=lambda _: Magnitude(),
            separable=True,
            groups=("layer", "row", "joint"),
            units=("neurons", "kv-groups"),
        )
    ]
