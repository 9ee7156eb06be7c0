"""Which error of a pruned block predicts the resulting perplexity?

One block at a time is pruned by several methods to several sparsities, while all others stay dense. The candidate
errors are measured on held-out text, and the perplexity of the whole model on other text:

    python benchmarks/loss_study.py MODEL --text train.txt --output DIR

MODEL is a hub id, a folder or a `.gguf` file. The errors, all squared: `linear`, the mean over the block's linears of
||X W~^T - X W^T||^2 / ||X W^T||^2; `matrix`, of the attention matrices, relative; `attention`, of the
attention's output, relative per token; `divergence`, of the model's predictions, to second order, as for allocation;
`block`, of the block's output, relative per token, with channels weighted by the loss's sensitivity, as for block
reconstruction; `block, by size`, with larger channels weighted less, as in the report; `block, plain`, with unweighted
channels; `weighted`, the sum over linears of each output's error times the model's sensitivity to it; `weighted, root`,
with the square root of the sensitivity. DIR gets `losses.csv`, written row by row (an interrupted run resumes), and
`losses.md`: Spearman's rank correlation of each error with the growth of log perplexity over all prunings, and its
means within one block and within one method and sparsity.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from compressx import Block, Linear, Unstructured
from compressx.blocks.fisher import FisherDiagonal, divergences, fisher_diagonal, gradients
from compressx.blocks.observe import linears_watched
from compressx.blocks.select import decide, gather, write
from compressx.data.windows import calibration_sequences, token_ids
from compressx.evaluation.token_perplexity import token_perplexity
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import BlockRun, advance, capture, each_block, passes
from compressx.numerics.output_error import channel_weights
from compressx.numerics.output_error import relative_errors as of_outputs
from compressx.planning.plan import PlannedRule
from compressx.plugins.kinds import PRUNER
from compressx.plugins.manager import load_plugins
from compressx_attnprune import layer
from compressx_attnprune.losses import MatrixLoss, relative_errors
from kept import same_settings
from loaded import load

LOSSES = (
    "linear", "matrix", "attention", "divergence", "block", "block, by size", "block, plain", "weighted",
    "weighted, root",
)  # fmt: skip
METHODS = ("magnitude", "wanda", "sparsegpt", "alps", "sensitivity")


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense block on held-out text."""

    block: Block
    runs: Sequence[BlockRun]
    states: Sequence[Tensor]
    inputs: Mapping[str, Sequence[Tensor]]  # of each linear, by batch
    weights: Mapping[str, Tensor]
    attention: Sequence[Tensor]  # output of the attention's last linear
    outputs: Sequence[Tensor]
    fisher: FisherDiagonal
    gradients: Sequence[Tensor]  # of the model's loss, at the outputs

    def errors(self) -> dict[str, float]:
        """Return the candidate errors of the block in its current state."""
        found = dict.fromkeys(LOSSES, 0.0)
        for name, linear in self.block.linears.items():
            changed, size = self._of_linear(name, linear)
            found["linear"] += float(changed.sum() / size) / len(self.weights)
            rows = self.fisher.linears[name].double()
            found["weighted"] += float((rows * changed).sum())
            found["weighted, root"] += float((rows.sqrt() * changed).sum())
        found["matrix"] = self._of_matrices()
        attention, outputs, _ = watched(self.block, self.runs, self.states)
        found["attention"] = _mean(attention, self.attention)
        each = zip(outputs, self.outputs, self.gradients, strict=True)
        moved = torch.cat([divergences(now.float() - was.float(), g).flatten() for now, was, g in each])
        found["divergence"] = float(moved.double().mean())
        found["block"] = _mean(outputs, self.outputs, self.fisher.channels[self.block.fqn])
        found["block, by size"] = _mean(outputs, self.outputs, channel_weights(self.outputs))
        found["block, plain"] = _mean(outputs, self.outputs)
        return found

    def _of_linear(self, name: str, linear: Linear) -> tuple[Tensor, float]:
        """Return the mean squared change of each output, float64 [out_features], and the mean squared norm before."""
        change = (linear.weight - self.weights[name]).double()
        changed, size, tokens = torch.zeros(len(change), dtype=torch.float64), 0.0, 0
        for x in self.inputs[name]:
            flat = x.reshape(-1, x.shape[-1])
            changed += (flat @ change.T.to(flat.dtype)).double().square().sum(dim=0)
            size += float((flat @ self.weights[name].T).square().sum(dtype=torch.float64))
            tokens += len(flat)
        return changed / tokens, size / tokens

    def _of_matrices(self) -> float:
        projections = layer.projections_of(self.block)
        names = (projections.query.name, projections.key.name)
        x = torch.cat(list(self.inputs[names[0]]))
        dense, now = (tuple(of[n].float() for n in names) for of in (self.weights, _weights(self.block)))
        (error,) = relative_errors(MatrixLoss(layer.describe(self.block)), x, dense, [now])  # type: ignore[arg-type, list-item]
        return error


def watched(
    block: Block, runs: Sequence[BlockRun], states: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]:
    """Run a block; return, for each batch, the outputs of its attention and of itself and the inputs of its linears."""
    attention: list[Tensor] = []
    inputs: dict[str, list[Tensor]] = {name: [] for name in block.linears}
    ends = ("o_proj", "out_proj", "attn.c_proj", "attention.dense")
    last = next(x for n, x in block.linears.items() if n.endswith(ends))
    hook = last.module.register_forward_hook(lambda _module, _args, out: attention.append(out))
    with linears_watched(block.linears, lambda name, x: inputs[name].append(x)):
        outputs = [run() for run in passes(runs, states)]
    hook.remove()
    return attention, outputs, inputs


def _weights(block: Block) -> dict[str, Tensor]:
    return {name: linear.weight for name, linear in block.linears.items()}


def _mean(outputs: Sequence[Tensor], dense: Sequence[Tensor], channels: Tensor | None = None) -> float:
    """Return the mean relative error over all tokens of all batches."""
    pairs = zip(outputs, dense, strict=True)
    return float(torch.cat([of_outputs(now, wanted, channels).flatten() for now, wanted in pairs]).mean())


@contextmanager
def restored(block: Block) -> Iterator[None]:
    """Restore a block's weights at the end."""
    kept = {name: w.clone() for name, w in _weights(block).items()}
    yield
    for name, linear in block.linears.items():
        linear.weight.copy_(kept[name])


@torch.no_grad()
def study(arguments: argparse.Namespace, done: set[tuple[str, str, str]]) -> Iterator[dict[str, object]]:
    """Yield a row for every pruning that is not done yet."""
    model, tokenizer = load(arguments.model)
    found, access = architecture_of(model), InMemory(model)
    ids = token_ids([arguments.text.read_text(encoding="utf-8")], tokenizer)
    drawn = calibration_sequences(ids, arguments.samples + arguments.windows, arguments.length, arguments.seed)
    seen, others = drawn[: arguments.samples], drawn[arguments.samples :]
    held_out, evaluation = others[: arguments.held_out], others[arguments.held_out :]
    base = token_perplexity(access, evaluation)
    fisher = fisher_diagonal(access, found, found.linears, torch.split(seen, 4))
    studied = [fqn for index, fqn in enumerate(found.blocks) if index in arguments.blocks]
    output_gradients = gradients(access, found, studied, torch.split(held_out, 4))
    plugins = load_plugins()
    streams = [*torch.split(seen, 4), *torch.split(held_out, 4)]
    learned = math.ceil(len(seen) / 4)
    states, calls = capture(access, found, streams)
    for block, runs in each_block(access, found, calls):
        wanted = [
            (str(block.index), m, str(s)) for m in METHODS for s in arguments.sparsities
            if block.index in arguments.blocks and (str(block.index), m, str(s)) not in done
        ]  # fmt: skip
        if wanted:
            linears = block.linears
            known = replace(block, calls=block.calls[:learned], sensitivities=fisher.linears)
            unseen = (replace(block, calls=block.calls[learned:]), runs[learned:], states[learned:])
            attention, outputs, inputs = watched(*unseen)
            weights = {n: w.clone() for n, w in _weights(block).items()}
            dense = Dense(*unseen, inputs, weights, attention, outputs, fisher, output_gradients[block.fqn])
            for method in dict.fromkeys(m for _, m, _ in wanted):
                spec = plugins.find(PRUNER, method)
                rule = PlannedRule(0, ((spec, spec.options()),))
                built = rule.build()
                stats = gather(known, {rule: list(linears)}, {rule: built}, passes(runs[:learned], states[:learned]))
                for sparsity in (float(s) for _, m, s in wanted if m == method):
                    pattern = Unstructured(sparsity, spec.groups[0])
                    with restored(block):
                        patterns = dict.fromkeys(linears, pattern)
                        for name, result in decide(rule, built, known, patterns, stats).items():
                            write(linears[name], result)
                        growth = math.log(token_perplexity(access, evaluation) / base)
                        yield {
                            "index": block.index,
                            "method": method,
                            "sparsity": sparsity,
                            "growth": growth,
                            **dense.errors(),
                        }
        advance(block.fqn, runs, states)


def markdown(rows: Sequence[Mapping[str, float]]) -> str:
    """Return the correlations of each candidate with the growth of log perplexity."""
    from scipy.stats import spearmanr

    def correlation(loss: str, some: Sequence[Mapping[str, float]]) -> float:
        return float(spearmanr([r[loss] for r in some], [r["growth"] for r in some]).statistic)

    lines = ["| error | all | within a block | within a method and sparsity |", "|---|---:|---:|---:|"]
    for loss in LOSSES:
        figures = [correlation(loss, rows)]
        for key in (lambda r: r["index"], lambda r: (r["method"], r["sparsity"])):
            groups = [[r for r in rows if key(r) == value] for value in dict.fromkeys(map(key, rows))]
            each = [correlation(loss, group) for group in groups if len(group) > 2]
            figures.append(math.fsum(each) / len(each) if each else math.nan)
        lines.append(f"| {loss} | {' | '.join(f'{f:.3f}' for f in figures)} |")
    return "\n".join([*lines, "", f"{len(rows)} prunings of one block each."])


def main() -> None:
    """Measure every pruning and print the correlations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 5, 10, 15, 20, 25])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=8, help="windows to measure errors on")
    parser.add_argument("--windows", type=int, default=32, help="windows not used for pruning, including --held-out")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    variable = ("output", "blocks", "sparsities")  # columns of a row
    settings = {n: str(v) for n, v in vars(arguments).items() if n not in variable}
    same_settings(arguments.output, {**settings, "errors": "; ".join(LOSSES)})
    path = arguments.output / "losses.csv"
    columns = ["index", "method", "sparsity", "growth", *LOSSES]
    if not path.exists():
        path.write_text(",".join(f'"{c}"' for c in columns) + "\n", encoding="utf-8")
    with path.open(newline="", encoding="utf-8") as file:
        done = {(str(r["index"]), str(r["method"]), str(r["sparsity"])) for r in csv.DictReader(file)}
    for row in study(arguments, done):
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns).writerow(row)
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{k: v if k == "method" else float(v) for k, v in r.items()} for r in csv.DictReader(file)]
    (arguments.output / "losses.md").write_text(markdown(rows) + "\n", encoding="utf-8")  # type: ignore[arg-type]
    print(f"\n{markdown(rows)}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
