"""Wanda (arXiv 2306.11695): drop the smallest |W_ij| * ||X_j||_2, by default within each output row. No update."""

from __future__ import annotations

from collections.abc import Mapping

from compressx import Block, FeatureNorms, NoOptions, Pattern, PruneResult, PrunerSpec, Statistic, hookimpl, keep_masks
from compressx.numerics.obs import wanda_scores


class Wanda:
    """Scores a weight by its magnitude times its input feature's norm."""

    def observe(self, block: Block, name: str) -> FeatureNorms:
        """Ask for the norm of each input feature."""
        return FeatureNorms(block.linears[name].in_features)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> dict[str, PruneResult]:
        """Keep the highest scores."""
        scores = {}
        for name in patterns:
            norms = stats[name]
            assert isinstance(norms, FeatureNorms)  # noqa: S101 - it is what observe asked for
            scores[name] = wanda_scores(block.linears[name].weight, norms.norms)
        return {name: PruneResult(keep) for name, keep in keep_masks(scores, patterns).items()}


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `wanda`."""
    return [
        PrunerSpec(
            name="wanda",
            summary="drops the smallest |W|*||X|| of each row (arXiv 2306.11695)",
            options=NoOptions,
            build=lambda _: Wanda(),
            separable=True,
            groups=("row", "layer", "joint"),
            units=("neurons", "kv-groups"),
        )
    ]
