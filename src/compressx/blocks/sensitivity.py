"""Squared gradients of a loss with respect to each linear's output, accumulated in the backward pass of a block.

With g [tokens, out_features] the gradients at a linear's output, the mean over tokens of g^2 is the diagonal of the
output factor in the Kronecker-factored Fisher matrix of its weight (K-FAC, Martens and Grosse, arXiv 1503.05671).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import Linear
from compressx.blocks.hooks import outputs_watched
from compressx.models.blockwise import Backwards
from compressx.runtime.errors import CalibrationError, UnsupportedModelError
from compressx.runtime.finite import all_finite
from compressx.runtime.ranks import ALONE, Ranks


class SquaredGradients:
    """Sums over tokens of the squared gradients at the outputs of a block's linears.

    Args:
        linears: by name.
        device: of the sums.
    """

    def __init__(self, linears: Mapping[str, Linear], device: torch.device) -> None:
        self.linears = linears
        self.sums = {n: torch.zeros(x.out_features, dtype=torch.float64, device=device) for n, x in linears.items()}
        self.tokens = dict.fromkeys(linears, 0)

    @property
    def reached(self) -> bool:
        """Whether every linear has received a token; experts may not have."""
        return all(self.tokens.values())

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient at a linear's output, [batch, tokens, out_features] or [tokens, out_features]."""
        squares = gradient.float().square().flatten(0, -2)
        self.sums[name] += squares.sum(dim=0, dtype=torch.float64)
        self.tokens[name] += len(squares)

    def backward(
        self, run: Callable[[Tensor], Tensor], enters: Tensor, gradient: Tensor, backwards: Backwards
    ) -> Tensor:
        """Run a block forwards and backwards, and add the gradients at its linears' outputs.

        Args:
            run: computes the block's output from its input.
            enters: the input, [batch, tokens, width].
            gradient: of the loss with respect to the output.
            backwards: the batch's, for all blocks.

        Returns:
            The gradient with respect to the input.
        """
        x = enters.detach().requires_grad_(True)

        def watch(name: str, given: Any) -> None:
            output = given[0] if isinstance(given, tuple) else given
            if not output.requires_grad:
                raise UnsupportedModelError(
                    f"{name}: no gradient reaches its output, so its sensitivity is unknown; prune it with another "
                    "pruner, or leave it out by `ignore`"
                )
            output.register_hook(lambda grad: self.add(name, grad))

        with torch.enable_grad(), outputs_watched(self.linears, watch):
            out = backwards.run(run, x)
        return backwards.gradient(out, x, gradient)

    def means(self, ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """Return the means over all processes' tokens by linear name, float32 [out_features].

        Raises:
            CalibrationError: a linear that received no token, so its sensitivity is unknown.
            UnsupportedModelError: gradients that are not finite.
        """
        found = {}
        for name, sums in self.sums.items():
            ranks.all_reduce_(sums)
            tokens = sum(ranks.all_gather(self.tokens[name]))
            if tokens == 0:
                raise CalibrationError(
                    f"no calibration token reached {name}, so its sensitivity is unknown; use more samples, or "
                    "prune it with another pruner"
                )
            if not all_finite(sums):
                raise UnsupportedModelError(
                    f"{name}: the gradient of the loss with respect to its output has NaN or infinite values on the "
                    "calibration text; model.dtype may be too narrow"
                )
            found[name] = (sums / tokens).float()
        return found
