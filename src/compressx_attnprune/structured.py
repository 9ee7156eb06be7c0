"""Whole key/value groups: what a rule asks for, and a solution put where the linears have it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compressx import FixedMask, Linear, Pattern, Projections, PruneResult, RecipeError, Structured
from compressx_attnprune import groups
from compressx_attnprune.options import AttnPruneOptions

_ONLY = {"mode": "gauss-newton", "objective": "attention-output"}
"""The values with which groups can be pruned."""


def check_options(patterns: Mapping[str, Pattern], options: AttnPruneOptions) -> None:
    """Refuse options that have no effect on what a rule asks for.

    Raises:
        RecipeError: names the option, and what to do.
    """
    if asked_units(patterns) is None:
        return
    for name, only in _ONLY.items():
        if (given := getattr(options, name)) != only:
            raise RecipeError(
                f"{name}: {given} has no effect on kv-groups, which are chosen in closed form by the attention's "
                f"output; leave {name} out"
            )


def asked_units(patterns: Mapping[str, Pattern]) -> Structured | None:
    """Return the pattern of whole units that a rule asks for, or was asked for when masks were given; None for others.

    Raises:
        RecipeError: units other than key/value groups.
    """
    first = next(iter(patterns.values()))
    pattern = first.chosen_as if isinstance(first, FixedMask) else first
    if not isinstance(pattern, Structured):
        return None
    if pattern.unit != "kv-groups":
        raise RecipeError(
            f"attnprune prunes attention, and this rule's units are {pattern.unit}; of units it takes kv-groups"
        )
    return pattern


def prune(
    layer: groups.Layer, projections: Projections, patterns: Mapping[str, Pattern], pattern: Structured,
    options: AttnPruneOptions,
) -> dict[str, PruneResult]:  # fmt: skip
    """Remove groups from a layer, or solve for what stays where masks are given.

    Args:
        layer: inputs and dense weights.
        projections: of the block.
        patterns: of its four projections, or of two where one weight fuses query, key and value.
        pattern: which of the units of `patterns` go.
        options: with a mode and an objective that groups have.

    Raises:
        NotPositiveDefiniteError: as `groups.prune`.
    """
    units = pattern.units
    given = {n: p.keep for n, p in patterns.items() if isinstance(p, FixedMask)}
    chosen = units.kept(given) if given else pattern.dropped
    dampings = groups.DAMPINGS if options.damping is None else (options.damping,)
    solution = groups.prune(layer, units.count, chosen, dampings=dampings, refit=options.refit)
    shapes = {n: (rows.out_features, rows.in_features) for n, rows in _linears(projections).items()}
    masks = units.masks(solution.keep, shapes)
    info = {"output_error": solution.error, "output_error.cut": solution.cut}
    info |= {"fell_back": 1.0} if solution.damping == torch.inf else {"damping": solution.damping}
    history = {"refit": solution.losses} if solution.losses else {}
    weights = _assemble(projections, solution)
    bias = projections.output.bias
    return {
        name: PruneResult(
            masks[name], weights[name], info, history=history,
            bias=bias + solution.shift.to(bias.dtype) if name == projections.output.name and bias is not None else None,
        )
        for name in patterns
    }  # fmt: skip


def _linears(projections: Projections) -> dict[str, Linear]:
    return {**{rows.name: rows.linear for rows in projections.inward}, projections.output.name: projections.output}


def _assemble(projections: Projections, solution: groups.Solution) -> dict[str, Tensor]:
    """Put rows of queries, keys and values where their linears have them; gates stay as they are."""
    weights = {n: torch.zeros_like(x.weight, dtype=torch.float32) for n, x in _linears(projections).items()}
    sides = (projections.query, projections.key, projections.value)
    gates = () if projections.gate is None else ((projections.gate, projections.gate.weight),)
    for rows, weight in (*zip(sides, solution.weights, strict=True), *gates):
        weights[rows.name][slice(None) if rows.index is None else rows.index] = weight
    weights[projections.output.name] = solution.output
    return weights
