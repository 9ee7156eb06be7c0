"""Output error of pruned linears, by pruner and linear, on calibration and held-out text.

The error is ||X W~^T - X W^T||^2 / ||X W^T||^2 in float64, for each linear separately on the dense model's inputs. All
pruners get the same windows and group, and their default options. Seconds include everything that a pruner computes
from its statistics.

    python benchmarks/layer_error.py --model MODEL --text FILE --output DIR --pruners sparsegpt alps

MODEL is a hub id, a folder, or a `.gguf` file. DIR gets `layer-error.csv`, written linear by linear, and
`layer-error.md`, which compares the last pruner with the first.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx import NM, Block, Hessian, PrunerSpec, Unstructured
from compressx.blocks.contract import answer_of
from compressx.blocks.observe import SharedStatistic, observe
from compressx.blocks.select import Stats
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import advance, capture, each_block, passes
from compressx.planning.plan import PlannedRule
from compressx.plugins.kinds import PRUNER
from compressx.plugins.manager import load_plugins
from loaded import load

COLUMNS = ("linear", "pattern", "pruner", "calibration", "held_out", "seconds")
SEEN, UNSEEN = "calibration", "held-out"
Row = dict[str, str]


@dataclass(frozen=True, eq=False)
class ObservedBlock:
    """A dense block and the statistics of its linears, by linear, then by pruner, `SEEN` or `UNSEEN`."""

    block: Block
    stats: Stats


def windows(tokenizer: Any, text: Path, samples: int, held_out: int, length: int, seed: int) -> tuple[Tensor, ...]:
    """Draw calibration and held-out windows [windows, length], all different."""
    ids: Tensor = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    count = len(ids) // length
    if count < samples + held_out:
        raise SystemExit(f"{text} has {count} windows of {length} tokens, {samples + held_out} are needed")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    drawn = ids[: count * length].view(count, length)[order]
    return drawn[:samples], drawn[samples : samples + held_out]


def blocks(
    model: torch.nn.Module, texts: Sequence[Tensor], pruners: Sequence[PrunerSpec], indices: Sequence[int] | None
) -> Iterator[ObservedBlock]:
    """Run the dense model block by block and yield the selected ones; `texts` are calibration and held-out windows."""
    access, found = InMemory(model), architecture_of(model)
    batches = [torch.split(text, 8) for text in texts]
    states, calls = capture(access, found, [x for split in batches for x in split])
    seen = len(batches[0])
    built = {spec.name: PlannedRule(0, ((spec, spec.options()),)).build()[0] for spec in pruners}
    for whole, runs in each_block(access, found, calls):
        if indices is not None and whole.index > max(indices):
            return
        if indices is None or whole.index in indices:
            block, running = replace(whole, calls=whole.calls[:seen]), passes(runs, states)
            linears = block.linears
            wanted: Stats = {
                n: {SEEN: SharedStatistic(Hessian(x.in_features))}
                | {name: SharedStatistic(s) for name, p in built.items() if (s := p.observe(block, n)) is not None}
                for n, x in linears.items()
            }
            unseen: Stats = {n: {UNSEEN: SharedStatistic(Hessian(x.in_features))} for n, x in linears.items()}
            observe(linears, wanted, running[:seen])
            observe(linears, unseen, running[seen:])
            yield ObservedBlock(block, {n: wanted[n] | unseen[n] for n in linears})
        advance(whole.fqn, runs, states)


def squares(change: Tensor, matrix: Tensor) -> float:
    """||X change^T||^2, from X^T X in float64."""
    return float(((change @ matrix) * change).sum())


def measure(
    observed: ObservedBlock, patterns: Sequence[Unstructured | NM], pruners: Sequence[PrunerSpec]
) -> Iterator[Row]:
    """Prune each linear of a block to each pattern with each pruner."""
    for name, linear in observed.block.linears.items():
        stats = observed.stats[name]
        dense = linear.weight.double()
        matrices = [h.matrix.double() for text in (SEEN, UNSEEN) if isinstance(h := stats[text].statistic, Hessian)]
        whole = [squares(dense, matrix) for matrix in matrices]
        for pattern, spec in itertools.product(patterns, pruners):
            (pruner,) = PlannedRule(0, ((spec, spec.options()),)).build()
            own = {name: stats[spec.name]} if spec.name in stats else {}
            started = time.perf_counter()
            result = answer_of(spec.name, pruner, observed.block, {name: pattern}, own)[name]
            seconds = time.perf_counter() - started
            new = dense if result.weight is None else result.weight.double()
            change = torch.where(result.keep, new, 0.0) - dense
            errors = (f"{squares(change, m) / w:.6g}" for m, w in zip(matrices, whole, strict=True))
            yield dict(zip(COLUMNS, (name, str(pattern), spec.name, *errors, f"{seconds:.3f}"), strict=True))


def table(rows: Sequence[Row], pruners: Sequence[str]) -> str:
    """Compare the last pruner with the first, for each pattern and kind of linear, in Markdown."""
    first, last = pruners[0], pruners[-1]
    cells: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)  # by pattern and linear, then by pruner
    for row in rows:
        cells[row["pattern"], row["linear"]][row["pruner"]] = row
    groups: dict[tuple[str, str], list[dict[str, Row]]] = defaultdict(list)
    for (pattern, linear), cell in cells.items():
        groups[pattern, "all"].append(cell)
        groups[pattern, linear.rpartition(".")[2]].append(cell)
    lines = [
        f"Error of {last} divided by that of {first}: geometric mean and largest; on how many linears it is lower.",
        "",
        f"| pattern | linears | calibration | largest | lower on | held-out | largest | lower on | seconds {first} "
        f"| seconds {last} |",
        f"|{'---|' * 10}",
    ]
    patterns = dict.fromkeys(pattern for pattern, _ in groups)
    for pattern, kind in sorted(groups, key=lambda key: (list(patterns).index(key[0]), key[1] != "all")):
        group = groups[pattern, kind]
        shown = [pattern, kind]
        for figure in ("calibration", "held_out"):
            ratios = [float(cell[last][figure]) / float(cell[first][figure]) for cell in group]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lower = sum(ratio < 1 for ratio in ratios)
            shown += [f"{mean:.3f}", f"{max(ratios):.3f}", f"{lower} of {len(ratios)}"]
        shown += [f"{sum(float(cell[p]['seconds']) for cell in group) / len(group):.2f}" for p in (first, last)]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the rows and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id, folder, or .gguf file")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--output", type=Path, default=Path("layer-error"), metavar="DIR")
    parser.add_argument("--pruners", nargs="+", default=["sparsegpt", "alps"])
    parser.add_argument("--sparsities", type=float, nargs="*", default=[0.5, 0.6, 0.7], help="unstructured; and 2:4")
    parser.add_argument("--group", choices=["layer", "row"], default="layer", help="of unstructured sparsity")
    parser.add_argument("--blocks", type=int, nargs="+", help="all when absent")
    parser.add_argument("--samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--held-out", type=int, default=32, help="windows to evaluate on")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    plugins = load_plugins()
    pruners = [plugins.find(PRUNER, name) for name in arguments.pruners]
    patterns: list[Unstructured | NM] = [*(Unstructured(s, arguments.group) for s in arguments.sparsities), NM(2, 4)]
    model, tokenizer = load(arguments.model)
    texts = windows(
        tokenizer, arguments.text, arguments.samples, arguments.held_out, arguments.sequence_length, arguments.seed
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with (arguments.output / "layer-error.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for observed in blocks(model, texts, pruners, arguments.blocks):
            for row in measure(observed, patterns, pruners):
                rows.append(row)
                writer.writerow(row)
                file.flush()
                print(*row.values(), flush=True)
    (arguments.output / "layer-error.md").write_text(table(rows, arguments.pruners), encoding="utf-8")
    print(table(rows, arguments.pruners))


if __name__ == "__main__":
    main()
