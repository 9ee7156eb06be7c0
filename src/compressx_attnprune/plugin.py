"""The `attnprune` pruner: adapts a block to the solvers, and holds no mathematics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressx import (
    Block,
    CalibrationError,
    FixedMask,
    Pattern,
    Projections,
    PruneResult,
    PrunerSpec,
    RecipeError,
    Rows,
    SequenceSample,
    Statistic,
    Unstructured,
    count_dropped,
    hookimpl,
)
from compressx.numerics.obs import refused
from compressx_attnprune import baselines, layer, solver
from compressx_attnprune.attention import Pair, attention_matrices, queries_and_keys
from compressx_attnprune.baselines import Budget
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss, relative_errors
from compressx_attnprune.options import HELD_OUT, AttnPruneOptions
from compressx_attnprune.solver import Candidate, QueryKeyLayer, Solution

HEAT_MAP_TOKENS = 64


@dataclass(frozen=True, eq=False)
class _PreparedLayer:
    """What pruning a block needs and no budget changes."""

    projections: Projections
    layer: QueryKeyLayer
    losses: Mapping[str, Loss]


class AttnPrune:
    """Prunes the query and key projection of a block together, for its attention."""

    def __init__(self, options: AttnPruneOptions) -> None:
        self.options = options

    def observe(self, block: Block, name: str) -> SequenceSample:
        return SequenceSample(block.linears[name].in_features, self.options.sequences)

    @torch.no_grad()
    def prepare(self, block: Block, name: str, sample: SequenceSample) -> _PreparedLayer:  # noqa: ARG002 - the protocol
        """Read the attention off the block and hold it against the block's own; its curvature follows when needed."""
        projections = layer.projections_of(block)
        x = sample.sequences
        attention = layer.describe(block)
        layer.verify(block, attention, x)
        losses: dict[str, Loss] = {
            "attention-matrix": MatrixLoss(attention),
            "attention-output": OutputLoss(
                attention,
                projections.value.weight.clone(),
                projections.value.bias,
                projections.output.weight.float().clone(),
            ),
        }
        held_out = min(len(x) - 1, max(1, round(HELD_OUT * len(x))))
        texts = (x[:-held_out], x[-held_out:]) if held_out else (x, x)
        dense = (projections.query.weight.clone(), projections.key.weight.clone())
        return _PreparedLayer(projections, QueryKeyLayer(losses[self.options.objective], *texts, dense), losses)

    @torch.no_grad()
    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],
        prepared: Mapping[str, _PreparedLayer],
    ) -> dict[str, PruneResult]:  # fmt: skip
        """Choose both masks and, but in mask mode, the kept weights' new values.

        `info` holds, measured on the held-out sequences, `attention_error`, ||P~ - P||_F^2 / ||P||_F^2, and
        `output_error`, the same ratio of *squared* norms for what the attention adds to the residual stream; with
        `.wanda` and `.sparsegpt` those of the two methods under the same budget. Both are of pruned queries and keys
        alone: the other rows of their linears, values and gates, count as dense.
        """
        layer.check(block, patterns)
        projections = layer.projections_of(block)
        _refuse_unlike_inputs(projections, stats)
        ready = prepared[projections.query.name]
        with refused(projections.query.name):
            solution = solver.prune_layer(ready.layer, _budget(projections, patterns), self.options)
        info = _errors(ready, solution)
        if solution.best is not solution.ours:
            info["fell_back"] = 1.0
        images = _heat_maps(ready.layer, solution.best.weights)
        history: dict[str, Sequence[float]] = {"mask": solution.ours.losses} if solution.ours.losses else {}
        keeps, weights = _assemble(ready, patterns, solution.best)
        return {
            name: PruneResult(keeps[name], weights[name], info, images, history, group="query and key")
            for name in patterns
        }


def _refuse_unlike_inputs(projections: Projections, stats: Mapping[str, Statistic]) -> None:
    """Refuse projections without input sequences [sequences, tokens, in_features], or with different ones."""
    names, fault = (projections.query.name, projections.key.name), ""
    samples = {name: x for name in names if isinstance(x := stats.get(name), SequenceSample) and x.batches}
    if missing := [name for name in names if name not in samples]:
        given = stats.get(missing[0])
        got = "none" if given is None else f"an empty {type(given).__name__}"
        fault = f"{missing[0]}: attnprune needs calibration sequences and got {got}; add calibration to the recipe"
    elif len({id(x) for x in samples.values()}) > 1:
        query, key = (samples[name].sequences for name in names)
        if not torch.equal(query, key):
            fault = (
                f"{names[0]} and {names[1]} were handed different inputs, {tuple(query.shape)} and "
                f"{tuple(key.shape)}, and attention pruning needs queries and keys of the same sequences"
            )
    if fault:
        raise CalibrationError(fault)


def _others(projections: Projections) -> tuple[Rows, ...]:
    """Return the rows beside queries or keys in their linears, which no attention matrix depends on."""
    homes = {projections.query.name, projections.key.name}
    return tuple(rows for rows in projections.inward[2:] if rows.name in homes)


def _budget(projections: Projections, patterns: Mapping[str, Pattern]) -> Budget:
    """Say what query and key rows have to become."""
    query, key = (_of_rows(patterns[rows.name], rows) for rows in (projections.query, projections.key))
    others = _others(projections)
    if not others or not isinstance(query, Unstructured) or query.group == "row":
        return Budget(query, key)
    if query.group == "layer" and not projections.fused:  # the keys have a budget of their own
        return Budget(Unstructured(_share(query.sparsity, [projections.query], others), "layer"), key)
    share = _share(query.sparsity, [projections.query, projections.key], others)
    return Budget(Unstructured(share, "joint"), Unstructured(share, "joint"))


def _share(sparsity: float, sides: Sequence[Rows], others: Sequence[Rows]) -> float:
    """Return the sparsity of some rows in one budget with others, which take their part of the exact count first."""
    columns = sides[0].linear.in_features
    own, beside = (columns * sum(rows.count for rows in some) for some in (sides, others))
    share = (count_dropped(sparsity, own + beside) - count_dropped(sparsity, beside)) / own
    if share >= 1.0:
        raise RecipeError(
            f"{sides[0].name}: sparsity {sparsity} leaves no query or key weight of a matrix of {own + beside}; ask "
            "for less"
        )
    return share


def _assemble(
    prepared: _PreparedLayer, patterns: Mapping[str, Pattern], best: Candidate
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Put query and key rows where their linears have them; the other rows of these are pruned by SparseGPT."""
    projections = prepared.projections
    found = list(zip((projections.query, projections.key), best.keeps, best.weights, strict=True))
    for rows in _others(projections):
        pattern = _of_others(patterns[rows.name], rows)
        found.append((rows, *baselines.sparsegpt_rows(rows.weight, prepared.layer.inputs, pattern)))
    keeps: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for rows, keep, weight in found:
        for all_rows, own in ((keeps, keep), (weights, weight)):
            if rows.index is None:
                all_rows[rows.name] = own
            else:
                shape = (rows.linear.out_features, rows.linear.in_features)
                all_rows.setdefault(rows.name, own.new_empty(shape))[rows.index] = own
    return keeps, weights


def _of_rows(pattern: Pattern, rows: Rows) -> Pattern:
    """Return the pattern of some rows of a linear."""
    if isinstance(pattern, FixedMask) and rows.index is not None:
        return FixedMask(pattern.keep[rows.index], pattern.chosen_as)
    return pattern


def _of_others(pattern: Pattern, rows: Rows) -> Pattern:
    """Return the pattern of rows beside queries or keys, which compete with each other only."""
    return Unstructured(pattern.sparsity, "layer") if pattern.joint else _of_rows(pattern, rows)


def _errors(prepared: _PreparedLayer, solution: Solution) -> dict[str, float]:
    """Return the held-out errors of the result and of the other methods by both objectives; one is known already."""
    candidates = {"": solution.best, **{f".{name}": start for name, start in solution.starts.items()}}
    info: dict[str, float] = {}
    for quantity, loss in (
        ("attention_error", prepared.losses["attention-matrix"]),
        ("output_error", prepared.losses["attention-output"]),
    ):
        errors = [candidate.error for candidate in candidates.values()]
        if loss is not prepared.layer.loss:
            weights = [candidate.weights for candidate in candidates.values()]
            errors = relative_errors(loss, prepared.layer.held_out, prepared.layer.dense, weights)
        info |= {f"{quantity}{name}": error for name, error in zip(candidates, errors, strict=True)}
    return info


def _heat_maps(of: QueryKeyLayer, weights: Pair) -> dict[str, Tensor]:
    """Return the head whose attention matrix changed most, dense and pruned, over the first held-out tokens."""
    x = of.held_out[:1, :HEAT_MAP_TOKENS].float()
    attention = of.loss.attention.first(x.shape[1])
    dense, pruned = (
        attention_matrices(attention, *queries_and_keys(attention, x, pair))[0] for pair in (of.dense, weights)
    )
    head = int((pruned - dense).square().sum(dim=(1, 2)).argmax())
    return {f"head {head}, dense": dense[head], f"head {head}, pruned": pruned[head]}


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `attnprune`."""
    summary = "query and key pruned together for their attention (after arXiv 2410.11261)"
    return [
        PrunerSpec("attnprune", summary, AttnPruneOptions, AttnPrune, ("joint", "layer", "row"), reconstructs=True,
                   selecting_options=("mode", "regularization"),
                   check=lambda block, asked, _: layer.check(block, asked))
    ]  # fmt: skip
