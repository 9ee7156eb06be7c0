"""Processor time of calibration passes and of evaluation by the number of windows in a batch.

    OMP_NUM_THREADS=1 python benchmarks/batch_size.py MODEL --text valid.txt --length 2048 --windows 4 --sizes 1 2 4

MODEL is a folder with safetensors, of which one block is run, by the functions of a run. Figures are milliseconds of
processor time a window, of all threads and of the system, the least of all rounds; in brackets the system's part, most
of it for memory that is handed out anew. Sizes take turns within a round. `passed on` is a block's forward pass,
`Wanda` and `SparseGPT` one that gathers what these need and ends early, `head` the last norm, the logits and their
likelihoods. Each block that is pruned takes one of both kinds of passes; an evaluation takes the first for each block,
and the head.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import Block
from compressx.api.statistics import FeatureNorms, Hessian
from compressx.blocks.observe import SharedStatistic, observe
from compressx.evaluation.token_perplexity import token_perplexity
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import capture, each_block, passes, run_around
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import load_model, load_tokenizer

GATHERED = {"Wanda": FeatureNorms, "SparseGPT": Hessian}
_COLUMNS = ("passed on", *GATHERED, "head")


@dataclass(frozen=True, eq=False)
class Logits(InMemory):
    """A model whose blocks are skipped.

    Attributes:
        states: what leaves the last block, for each batch.
    """

    states: Sequence[Tensor] = ()

    def logits(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the logits of each batch."""
        blocks = architecture_of(self.model).blocks
        for ids, state in zip(batches, self.states, strict=True):
            yield run_around(self.model, blocks, ids, state).logits


def passed_on(runs: Sequence[Callable[[], Tensor]]) -> None:
    """Run a block on every batch."""
    for run in runs:
        run()


def observed(block: Block, runs: Sequence[Callable[[], Tensor]], statistic: Callable[[int], Any]) -> None:
    """Gather a statistic of every linear of a block."""
    observe(
        block.linears,
        {name: {"selects": SharedStatistic(statistic(x.in_features))} for name, x in block.linears.items()},
        runs,
    )


def measured(model: Any, windows: Tensor, index: int, sizes: Sequence[int], rounds: int) -> Mapping[Any, list[Any]]:
    """Return user's and system's seconds of each round, by column and batch size."""
    access, found = InMemory(model), architecture_of(model)
    name = [*found.blocks][index]
    entering = {size: capture(access, found, torch.split(windows, size)) for size in sizes}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for size in sizes:
            states, calls = entering[size]
            block, runs = next(each_block(access, found, calls, [name]))
            bound = passes(runs, states)
            timed: dict[str, Callable[[], Any]] = {"passed on": partial(passed_on, bound)}
            timed |= {what: partial(observed, block, bound, kind) for what, kind in GATHERED.items()}
            timed["head"] = partial(token_perplexity, Logits(model, states=states), windows, batch_size=size)
            for what, work in timed.items():
                before = os.times()
                work()
                after = os.times()
                times.setdefault((what, size), []).append((after[0] - before[0], after[1] - before[1]))
    return times


@torch.no_grad()
def main() -> None:
    """Measure all sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--block", type=int, default=0)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    checkpoint = Checkpoint(given.model, dtype=given.dtype)
    ids = load_tokenizer(checkpoint)(given.text.read_text(encoding="utf-8"))["input_ids"]
    windows = torch.tensor(ids[: given.windows * given.length]).view(given.windows, given.length)
    times = measured(load_model(checkpoint).eval(), windows, given.block, given.sizes, given.rounds)
    print(f"| {given.length} tokens, {given.dtype}, in a batch | {' | '.join(_COLUMNS)} |")
    print("|---:|" + "---:|" * len(_COLUMNS))
    for size in given.sizes:
        cells = []
        for what in _COLUMNS:
            user, system = (1e3 * x / given.windows for x in min(times[what, size], key=sum))
            cells.append(f"{user + system:.0f} ({system:.0f})")
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
