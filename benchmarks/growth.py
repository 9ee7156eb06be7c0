"""Scaling of time and memory with calibration tokens, width and depth, on random Llamas.

    python benchmarks/growth.py --output DIR

Every point is a run in a new process with weights on disk (`model.streaming: true`), so memory is what pruning needs.
DIR gets `growth.csv` and `growth.svg`. The table on standard output has the exponent of the power law between the last
two points of each line: 1 is linear. With the width w, a linear's weights and Hessian grow as w^2, and factoring the
Hessian takes w^3.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import resource
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from random_llama import config, make, write_text

VOCABULARY, LENGTH = 1000, 128
SIZE = {"tokens": 8192, "width": 512, "depth": 4}
AXES = {"tokens": (4096, 8192, 16384, 32768), "width": (256, 512, 1024, 2048), "depth": (2, 4, 8, 16)}
METHODS = ("wanda", "sparsegpt")


def prune(recipe: dict[str, Any], threads: int, sender: Any) -> None:
    """Run in a child process, and send the seconds of pruning and the memory added by it."""
    from compressx import run
    from compressx.runtime.timing import peak_resident_bytes

    torch.set_num_threads(threads)
    before: list[int] = []

    def note(stage: str, done: int, _total: int, _said: str) -> None:
        if (stage, done) == ("prune", 0):
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            before.append(pages * resource.getpagesize())

    report = run(recipe, progress=note)
    sender.send((report.seconds["prune"], peak_resident_bytes() - before[0]))


def point(size: dict[str, int], method: str, threads: int) -> tuple[float, int]:
    """Prune a model of one size."""
    width = size["width"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make(folder / "model", config(width, 3 * width, size["depth"], VOCABULARY, dtype="float32"))
        write_text(folder / "text.txt", 2 * size["tokens"], VOCABULARY)
        recipe = {
            "model": {"path": str(folder / "model"), "streaming": True},
            "calibration": {"dataset": {"text": str(folder / "text.txt")}, "samples": size["tokens"] // LENGTH,
                            "sequence_length": LENGTH, "batch_size": 4},
            "prune": [{"targets": ["*"], "pruner": method, "sparsity": 0.5}],
            "output": str(folder / "pruned"),
        }  # fmt: skip
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=prune, args=(recipe, threads, sender))
        child.start()
        sender.close()
        measured: tuple[float, int] = receiver.recv()
        child.join()
    return measured


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot seconds and memory against each axis."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "growth"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(AXES), figsize=(10, 6), layout="constrained")
    for column, axis in enumerate(AXES):
        for line, (quantity, unit) in enumerate((("seconds", "seconds"), ("megabytes", "memory above the model, MB"))):
            for method in METHODS:
                mine = [r for r in rows if (r["axis"], r["method"]) == (axis, method)]
                axes[line][column].loglog(
                    [r["value"] for r in mine], [r[quantity] for r in mine], marker="o", label=method
                )
            axes[line][column].set(xlabel=axis, ylabel=unit if column == 0 else "")
            axes[line][column].grid(visible=True, which="both", alpha=0.3)
    axes[0][0].legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure all points; print, write and plot them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), help="others are kept from growth.csv")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    table = arguments.output / "growth.csv"
    rows = [row for row in _read(table) if row["axis"] not in arguments.axes]
    print("| grows | method | values | seconds | power | MB above the model | power |\n|---|---|---|---|---:|---|---:|")
    for axis in arguments.axes:
        values = AXES[axis]
        for method in METHODS:
            mine = []
            for value in values:
                seconds, added = point({**SIZE, axis: value}, method, arguments.threads)
                mine.append(
                    {"axis": axis, "method": method, "value": value, "seconds": seconds, "megabytes": added / 1e6}
                )
            rows += mine
            times, sizes = ([r[quantity] for r in mine] for quantity in ("seconds", "megabytes"))
            cells = (
                axis, method, _listed(values, "d"), _listed(times, ".1f"), f"{_power(values, times):.2f}",
                _listed(sizes, ".0f"), f"{_power(values, sizes):.2f}",
            )  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, arguments.output / "growth.svg")


def _read(table: Path) -> list[dict[str, Any]]:
    """Read the points of an earlier run, if there are any."""
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        numbers = ("value", "seconds", "megabytes")
        return [{k: float(v) if k in numbers else v for k, v in row.items()} for row in csv.DictReader(file)]


def _listed(values: Iterable[float], how: str) -> str:
    return ", ".join(format(value, how) for value in values)


def _power(values: tuple[int, ...], found: list[float]) -> float:
    """Return the exponent p of found ~ value^p between the last two points."""
    return math.log(found[-1] / found[-2]) / math.log(values[-1] / values[-2])


if __name__ == "__main__":
    main()
