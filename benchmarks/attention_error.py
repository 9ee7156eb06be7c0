"""Attention error of pruned query and key projections, by method and layer, on held-out text.

Two metrics, both ratios of *squared* norms over all heads of a layer: `attention` is ||P~ - P||_F^2 / ||P||_F^2 of the
attention matrices, `output` the same for the output of the attention. Layers get the dense model's hidden states; all
methods use the same calibration sequences and are evaluated on the same other sequences.

    python benchmarks/attention_error.py MODEL --calibration train.txt --evaluation test.txt --output DIR

MODEL is a hub id, a folder, or a `.gguf` file. If both texts are the same file, the windows still differ. DIR
gets `errors.csv`, written layer by layer (an interrupted run resumes), `table.md`, and `errors.svg`.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx import Block, SequenceSample, Unstructured
from compressx.blocks.observe import SharedStatistic, observe
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import advance, capture, each_block, passes
from compressx.numerics import admm
from compressx.numerics.least_squares import Metric
from compressx.pruners.hessian import HessianOptions
from compressx_attnprune import baselines, layer, solver
from compressx_attnprune.attention import Pair
from compressx_attnprune.baselines import Budget
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss, relative_errors
from compressx_attnprune.options import HELD_OUT
from compressx_attnprune.solver import QueryKeyLayer
from kept import same_settings
from loaded import load

COLUMNS = ("layer", "method", "sparsity", "attention", "output", "seconds")


@dataclass(frozen=True, eq=False)
class Case:
    """One layer at one sparsity: what methods see, and the text that they are measured on."""

    layer: QueryKeyLayer
    sparsity: float
    measured_on: Tensor  # [sequences, tokens, in_features]
    output: OutputLoss

    @property
    def joint(self) -> Budget:
        """One budget over query and key."""
        return Budget(Unstructured(self.sparsity, "joint"), Unstructured(self.sparsity, "joint"))

    @property
    def by_row(self) -> Budget:
        """The same share of each row."""
        return Budget(Unstructured(self.sparsity, "row"), Unstructured(self.sparsity, "row"))


def magnitude(case: Case) -> Pair:
    """Keep the largest |W| over query and key together."""
    dense = case.layer.dense
    keeps = case.joint.choose((dense[0].abs(), dense[1].abs()))
    return dense[0] * keeps[0], dense[1] * keeps[1]


def wanda(case: Case) -> Pair:
    """Wanda (arXiv 2306.11695), by rows as published."""
    return baselines.wanda(case.layer.dense, case.layer.inputs, case.by_row)[1]


def sparsegpt(case: Case) -> Pair:
    """SparseGPT (arXiv 2301.00774), by rows: the stronger choice here."""
    return baselines.sparsegpt(case.layer.dense, case.layer.inputs, case.by_row)[1]


def sparsegpt_layer(case: Case) -> Pair:
    """SparseGPT with one threshold for all rows of a column block, as its code does."""
    query, key = (
        baselines.sparsegpt_rows(w, case.layer.inputs, Unstructured(case.sparsity, "layer"))[1]
        for w in case.layer.dense
    )
    return query, key


def alps(case: Case) -> Pair:
    """ALPS (arXiv 2406.07831), one threshold for a weight, as published, with the pruner's defaults."""
    x = case.layer.inputs.x.flatten(0, 1).double()
    metric = Metric.of((x.T @ x).float(), HessianOptions().damping)
    pattern = Unstructured(case.sparsity, "layer")
    problems = (admm.Problem(w, metric, pattern) for w in case.layer.dense)
    query, key = (admm.prune({"weight": problem})["weight"].weight for problem in problems)
    return query, key


def gauss_newton(case: Case) -> Pair:
    """The default of attnprune, in closed form."""
    return solver.closed_form(case.layer, case.joint)[1]


def mask(case: Case) -> Pair:
    """The published method: masks learned by gradient descent, with lambda chosen on held-out calibration text."""
    return solver.mask(case.layer, case.joint).weights


METHODS: dict[str, Callable[[Case], Pair]] = {
    "magnitude": magnitude,
    "wanda": wanda,
    "sparsegpt": sparsegpt,
    "sparsegpt-layer": sparsegpt_layer,
    "alps": alps,
    "gauss-newton": gauss_newton,
    "mask": mask,
}


BASELINES = ("wanda", "sparsegpt", "alps")
"""To the best of which every error is compared."""


def windows(arguments: argparse.Namespace, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Draw calibration and evaluation windows [sequences, length], disjoint even if both come from one file."""
    generator = torch.Generator().manual_seed(arguments.seed)

    def shuffled(path: Path) -> Tensor:
        ids: Tensor = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        count = len(ids) // arguments.length
        whole = ids[: count * arguments.length].view(count, arguments.length)
        return whole[torch.randperm(count, generator=generator)]

    wanted, held = arguments.samples, arguments.windows
    drawn = shuffled(arguments.calibration)
    same = arguments.calibration.resolve() == arguments.evaluation.resolve()
    others = drawn[wanted:] if same else shuffled(arguments.evaluation)
    if len(drawn) < wanted or len(others) < held:
        raise SystemExit(f"too little text: {wanted} calibration and {held} evaluation windows of {arguments.length}")
    return drawn[:wanted], others[:held]


@torch.no_grad()
def layers(model: torch.nn.Module, calibration: Tensor, evaluation: Tensor) -> Iterator[tuple[int, Block, Tensor]]:
    """Run the dense model block by block; yield each block and the inputs of its queries on all windows."""
    access, found = InMemory(model), architecture_of(model)
    states, calls = capture(access, found, [*torch.split(calibration, 8), *torch.split(evaluation, 8)])
    for block, runs in each_block(access, found, calls):
        query = layer.projections_of(block).query
        inputs = SequenceSample(query.linear.in_features)
        observe(block.linears, {query.name: {"inputs": SharedStatistic(inputs)}}, passes(runs, states))
        yield block.index, block, inputs.sequences
        advance(block.fqn, runs, states)


def measure(
    arguments: argparse.Namespace, done: set[tuple[int, str, float]], write: Callable[[list[object]], None]
) -> None:
    """Measure every method on every layer, except for rows already written, and write a row for each."""
    model, tokenizer = load(arguments.model)
    model.to(arguments.device)
    calibration, evaluation = (w.to(arguments.device) for w in windows(arguments, tokenizer))
    for index, block, x in layers(model, calibration, evaluation):
        cells = [(m, s) for s in arguments.sparsities for m in arguments.methods if (index, m, s) not in done]
        if (arguments.layers and index not in arguments.layers) or not cells:
            continue
        projections = layer.projections_of(block)
        attention = layer.describe(block)
        values, outputs = projections.value, projections.output.weight.float()
        of_output = OutputLoss(attention, values.weight, values.bias, outputs)
        losses: dict[str, Loss] = {"attention-matrix": MatrixLoss(attention), "attention-output": of_output}
        seen, measured_on = x[: len(calibration)], x[len(calibration) :]
        held_out = max(1, round(HELD_OUT * len(seen)))
        texts = (seen[:-held_out], seen[-held_out:])
        dense = (projections.query.weight, projections.key.weight)
        for method, sparsity in cells:
            # A separate layer for each, so that the time includes all statistics of a method.
            task = QueryKeyLayer(losses[arguments.objective], *texts, dense)
            case = Case(task, sparsity, measured_on, of_output)
            started = time.perf_counter()
            pruned = METHODS[method](case)
            seconds = time.perf_counter() - started
            errors = [relative_errors(loss, measured_on, dense, [pruned])[0] for loss in losses.values()]
            write([index, method, sparsity, *(f"{e:.6g}" for e in errors), f"{seconds:.2f}"])


def table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table of means over layers, with the ratio to the best of `BASELINES`."""
    cells: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    sparsities = sorted({r["sparsity"] for r in rows}, key=float)
    for row in rows:
        for figure in ("attention", "output", "seconds"):
            cells[row["method"], row["sparsity"], figure][row["layer"]] = float(row[figure])
    methods = list(dict.fromkeys(r["method"] for r in rows))
    header = [f"{figure} {float(s):.0%}" for figure in ("attention", "output") for s in sparsities]
    lines = [f"| method | layers | {' | '.join(header)} | seconds a layer |", f"|{'---|' * (len(header) + 3)}"]
    for method in methods:
        shown = []
        for figure in ("attention", "output"):
            for s in sparsities:
                own = cells[method, s, figure]
                better = [_mean({k: v for k, v in cells[m, s, figure].items() if k in own}) for m in BASELINES]
                best = min((b for b in better if not math.isnan(b)), default=math.nan)
                shown.append(f"{_mean(own):.4f} ({_mean(own) / best:.2f})" if own else "")
        seconds = [v for s in sparsities for v in cells[method, s, "seconds"].values()]
        count = len({r["layer"] for r in rows if r["method"] == method})
        lines.append(f"| {method} | {count} | {' | '.join(shown)} | {sum(seconds) / len(seconds):.1f} |")
    return "\n".join(lines) + "\n"


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values) if values else math.nan


def plot(rows: list[dict[str, str]], path: Path) -> None:
    """Plot the attention error over the layers, with a panel per sparsity and a line per method."""
    from matplotlib.figure import Figure

    sparsities = sorted({float(r["sparsity"]) for r in rows})
    figure = Figure(figsize=(4.2 * len(sparsities), 3.6), layout="constrained")
    axes = figure.subplots(1, len(sparsities), sharey=True, squeeze=False)[0]
    for axis, sparsity in zip(axes, sparsities, strict=True):
        for number, method in enumerate(dict.fromkeys(r["method"] for r in rows)):
            own = sorted(
                (int(r["layer"]), float(r["attention"]))
                for r in rows
                if r["method"] == method and float(r["sparsity"]) == sparsity
            )
            axis.plot(*zip(*own, strict=True), label=method, marker="os^vDXP*"[number % 8], markersize=3, linewidth=1)
        axis.set(yscale="log", xlabel="layer", title=f"{sparsity:.0%} of query and key pruned")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(r"$\|\tilde P - P\|_F^2\,/\,\|P\|_F^2$")
    axes[-1].legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder, or .gguf file")
    parser.add_argument("--calibration", type=Path, required=True, metavar="TEXT")
    parser.add_argument("--evaluation", type=Path, required=True, metavar="TEXT")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--layers", type=int, nargs="+", help="all when absent")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--objective", choices=["attention-matrix", "attention-output"], default="attention-matrix")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--windows", type=int, default=8, help="evaluation windows")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    variable = ("output", "layers", "sparsities", "methods", "device")  # columns, or without effect on a row
    same_settings(arguments.output, {n: str(v) for n, v in vars(arguments).items() if n not in variable})
    path = arguments.output / "errors.csv"
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    with path.open(newline="", encoding="utf-8") as file:
        done = {(int(r["layer"]), r["method"], float(r["sparsity"])) for r in csv.DictReader(file)}

    def write(row: list[object]) -> None:
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(row)
        print(*row, flush=True)

    measure(arguments, done, write)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    (arguments.output / "table.md").write_text(table(rows), encoding="utf-8")
    plot(rows, arguments.output / "errors.svg")
    print(table(rows))


if __name__ == "__main__":
    main()
