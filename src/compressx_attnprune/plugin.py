"""The `attnprune` pruner: adapts a block to the solvers, and holds no mathematics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    SequenceSample,
    Statistic,
    Unstructured,
    Windows,
    Work,
    count_dropped,
    hookimpl,
)
from compressx.numerics.obs import NotPositiveDefiniteError
from compressx_attnprune import baselines, groups, layer, solver, structured, work
from compressx_attnprune.geometry import queries_and_keys
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss, relative_errors
from compressx_attnprune.mixing import Mixing
from compressx_attnprune.objective import attention_matrices
from compressx_attnprune.options import AttnPruneOptions
from compressx_attnprune.solver import Budget, Layer, Solution
from compressx_attnprune.training import Text

HEAT_MAP_TOKENS = 64


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What pruning a block needs and no budget changes."""

    projections: Projections
    layer: Layer
    losses: Mapping[str, Loss]

    def of_groups(self) -> groups.Layer:
        """Return the layer as whole groups are removed from it."""
        loss = self.losses["attention-output"]
        assert isinstance(loss, OutputLoss)  # noqa: S101 - made by prepare
        return groups.Layer(
            Mixing(loss.attention, loss.value_bias), self.layer.text, (*self.layer.dense, loss.value_weight),
            loss.output_weight, self.projections.output.bias is not None,
        )  # fmt: skip


class AttnPrune:
    """Prunes the query and key projection of a block together, for its attention."""

    def __init__(self, options: AttnPruneOptions) -> None:
        self.options = options

    def observe(self, block: Block, name: str) -> SequenceSample | None:
        """Ask for whole input sequences; query, key and value have the same, so the host keeps one sample."""
        if name == layer.find_projections(block).output.name:
            return None
        return SequenceSample(block.linears[name].in_features, self.options.sequences)

    @torch.no_grad()
    def prepare(self, block: Block, name: str, sample: SequenceSample) -> _Prepared:  # noqa: ARG002 - the protocol
        """Read the attention off the block and hold it against the block's own; its curvature follows when needed."""
        projections = layer.find_projections(block)
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
        held_out = min(len(x) - 1, max(1, round(self.options.held_out * len(x))))
        text = Text(x[:-held_out], x[-held_out:]) if held_out else Text(x, x)
        dense = (projections.query.weight.clone(), projections.key.weight.clone())
        return _Prepared(
            projections,
            Layer(losses[self.options.objective], text, dense, self.options.damping or solver.DAMPING),
            losses,
        )

    @torch.no_grad()
    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],
        prepared: Mapping[str, _Prepared],
    ) -> dict[str, PruneResult]:  # fmt: skip
        """Choose both masks and, but in mask mode, the survivors' new values.

        `info` holds, measured on the held-out sequences, `attention_error`, ||P~ - P||_F^2 / ||P||_F^2, and
        `output_error`, the same ratio of *squared* norms for what the attention adds to the residual stream; with
        `.wanda` and `.sparsegpt` those of the two methods under the same budget. Both are of pruned queries and keys
        alone: the value rows of a fused weight count as dense.
        """
        layer.check(block, patterns)
        projections = layer.find_projections(block)
        _refuse_unlike_inputs(projections, stats)
        ready = prepared[projections.query.name]
        if (pattern := structured.asked_units(patterns)) is not None:
            with _blamed_on(projections):
                return structured.prune(ready.of_groups(), projections, patterns, pattern, self.options)
        budget = _budget(projections, patterns)
        with _blamed_on(projections):
            solution = solver.solve(ready.layer, budget, self.options)
        info = _errors(ready, solution)
        if solution.fell_back:
            info["fell_back"] = 1.0
        images = _heat_maps(ready.layer, solution) if self.options.heat_map else {}
        keeps, weights = _assemble(ready, patterns, solution)
        return {
            name: PruneResult(keeps[name], weights[name], info, images=images, history=solution.histories)
            for name in patterns
        }

    def work(self, block: Block, patterns: Mapping[str, Pattern], text: Windows) -> Work:
        """Count one answer."""
        shape, pattern = work.Shape.of(block, text.length), next(iter(patterns.values()))
        fixed = isinstance(pattern, FixedMask)
        given = work.returned(block, patterns, solved_bias=(units := structured.asked_units(patterns)) is not None)
        if units is None:
            return given + work.prune(shape, self.options, pattern, text, fixed=fixed)
        return given + work.remove_groups(shape, self.options, units, text, fixed=fixed)

    def prepare_work(self, block: Block, name: str, text: Windows) -> Work:  # noqa: ARG002 - the protocol
        """Count the comparison of the geometry with the block's own attention."""
        return work.prepare(work.Shape.of(block, text.length), text, self.options.sequences)


@contextmanager
def _blamed_on(projections: Projections) -> Iterator[None]:
    """Tell users of which layer a `NotPositiveDefiniteError` is."""
    try:
        yield
    except NotPositiveDefiniteError as error:
        raise CalibrationError(f"{projections.query.name}: {error}") from error


def _refuse_unlike_inputs(projections: Projections, stats: Mapping[str, Statistic]) -> None:
    """Refuse projections without input sequences [sequences, tokens, in_features], or with different ones."""
    samples: list[SequenceSample] = []
    for rows in (projections.query, projections.key):
        sample = stats.get(rows.name)
        if not isinstance(sample, SequenceSample) or not sample.batches:
            raise CalibrationError(
                f"{rows.name}: attnprune needs calibration sequences and got "
                f"{'none' if sample is None else f'an empty {type(sample).__name__}'}; add calibration to the recipe"
            )
        samples.append(sample)
    query, key = samples
    if query is not key and not torch.equal(x := query.sequences, other := key.sequences):
        raise CalibrationError(
            f"{projections.query.name} and {projections.key.name} were handed different inputs, {tuple(x.shape)} and "
            f"{tuple(other.shape)}, and attention pruning needs queries and keys of the same sequences"
        )


def _budget(projections: Projections, patterns: Mapping[str, Pattern]) -> Budget:
    """Say what query and key rows have to become."""
    query, key = patterns[projections.query.name], patterns[projections.key.name]
    if not projections.fused:
        return Budget(query, key)
    if isinstance(query, FixedMask):
        rows = [FixedMask(query.keep[r.index], query.chosen_as) for r in (projections.query, projections.key)]
        return Budget(rows[0], rows[1])
    if not isinstance(query, Unstructured) or query.group == "row":
        return Budget(query, query)
    # One weight, one budget: the values take their share of it, queries and keys the rest of the exact count.
    linear, values = projections.query.linear, projections.value.count
    whole = count_dropped(query.sparsity, linear.out_features * linear.in_features)
    rest = whole - count_dropped(query.sparsity, linear.in_features * values)
    share = rest / ((linear.out_features - values) * linear.in_features)
    if share >= 1.0:
        raise RecipeError(
            f"{projections.query.name}: sparsity {query.sparsity} leaves no query or key weight of a matrix of "
            f"{linear.out_features * linear.in_features}; ask for less"
        )
    return Budget(Unstructured(share, "joint"), Unstructured(share, "joint"))


def _assemble(
    prepared: _Prepared, patterns: Mapping[str, Pattern], solution: Solution
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Put query and key rows where their linears have them; a fused weight's value rows are pruned by SparseGPT."""
    projections = prepared.projections
    sides = (projections.query, projections.key)
    if not projections.fused:
        names = [rows.name for rows in sides]
        return dict(zip(names, solution.keeps, strict=True)), dict(zip(names, solution.weights, strict=True))
    (name,) = patterns
    weight = projections.query.linear.weight.float().clone()
    keep = torch.ones_like(weight, dtype=torch.bool)
    value = baselines.sparsegpt_rows(
        projections.value.weight, prepared.layer.inputs, _value_pattern(patterns[name], projections)
    )
    for rows, k, w in zip(
        (*sides, projections.value), (*solution.keeps, value[0]), (*solution.weights, value[1]), strict=True
    ):
        keep[rows.index], weight[rows.index] = k, w
    return {name: keep}, {name: weight}


def _value_pattern(pattern: Pattern, projections: Projections) -> Pattern:
    if isinstance(pattern, FixedMask):
        return FixedMask(pattern.keep[projections.value.index], pattern.chosen_as)
    if isinstance(pattern, Unstructured) and pattern.group == "joint":
        return Unstructured(pattern.sparsity, "layer")
    return pattern


def _errors(prepared: _Prepared, solution: Solution) -> dict[str, float]:
    """Return the held-out errors of the result and of the other methods by both objectives; one is known already."""
    candidates = [solution.weights, *solution.starts.values()]
    info: dict[str, float] = {}
    for quantity, loss in (
        ("attention_error", prepared.losses["attention-matrix"]),
        ("output_error", prepared.losses["attention-output"]),
    ):
        if loss is prepared.layer.loss:
            errors = list(solution.errors.values())
        else:
            errors = relative_errors(loss, prepared.layer.text.held_out, prepared.layer.dense, candidates)
        names = (f"{quantity}.{name}" if name else quantity for name in solution.errors)
        info |= dict(zip(names, errors, strict=True))
    return info


def _heat_maps(of: Layer, solution: Solution) -> dict[str, Tensor]:
    """Return the head whose attention matrix changed most, dense and pruned, over the first held-out tokens."""
    x = of.text.held_out[:1, :HEAT_MAP_TOKENS].float()
    attention = of.loss.attention.first(x.shape[1])
    dense, pruned = (
        attention_matrices(attention, *queries_and_keys(attention, x, *pair))[0]
        for pair in (of.dense, solution.weights)
    )
    head = int((pruned - dense).square().sum(dim=(1, 2)).argmax())
    return {f"head {head}, dense": dense[head], f"head {head}, pruned": pruned[head]}


def _check(block: Block, patterns: Mapping[str, Pattern], options: AttnPruneOptions) -> None:
    layer.check(block, patterns)
    structured.check_options(patterns, options)


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `attnprune`."""
    return [
        PrunerSpec(
            name="attnprune",
            summary="query and key pruned together for their attention (after arXiv 2410.11261)",
            options=AttnPruneOptions,
            build=AttnPrune,
            groups=("joint", "layer", "row"),
            units=("kv-groups",),
            reconstructs=True,
            selecting_options=("mode", "steps", "learning_rate", "regularization"),
            check=_check,
        )
    ]
