"""`compressx plan --time` against runs of the same recipes, without their evaluation and fine-tuning.

    python benchmarks/plan_time.py recipes/sparsegpt-50.yaml recipes/best-50.yaml --set calibration.samples=16

Each recipe is timed in one process and run in another, on the same text. Seconds on a CPU are those of the processor,
all threads together, which other programs disturb less than the clock. Printed are the seconds of each stage and the
peak of memory, on a GPU that of its tensors. The runs' output is deleted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_STAGES = ("load", "calibrate", "allocate", "prune")


def estimated(recipe: Path, overrides: Sequence[str], device: str) -> dict[str, float]:
    """Return what `plan --time` says: seconds by stage, and bytes as `memory`."""
    from compressx import load_plugins
    from compressx.models.access import device_for
    from compressx.pipeline.run import loaded_recipe
    from compressx.pipeline.stages import prepare
    from compressx.pipeline.timed import time_run
    from compressx.stages.state import RunState

    plugins = load_plugins()
    state = RunState(loaded_recipe(recipe, overrides, plugins), plugins, device_for(device), measured=False)
    prepare(state)
    found = time_run(state)
    return {**found.seconds, "memory": found.peak_gpu_memory_bytes or found.peak_memory_bytes}


def measured(recipe: Path, overrides: Sequence[str], device: str) -> dict[str, float]:
    """Return the same of a run."""
    from compressx import run

    report = run(recipe, overrides=overrides, device=device)
    return {**report.seconds, "memory": report.peak_gpu_memory_bytes or report.peak_memory_bytes}


def in_cpu_seconds(
    function: Callable[[Path, Sequence[str], str], dict[str, float]],
    recipe: Path,
    overrides: Sequence[str],
    device: str,
) -> dict[str, float]:
    """Call a function in a process of its own; on a CPU its clock is the time of the processor."""
    if device == "cpu":
        time.perf_counter = time.process_time
    return function(recipe, overrides, device)


def compare(recipe: Path, overrides: Sequence[str], device: str) -> None:
    """Print a row for each stage of a recipe, one for their sum, and one for the peak of memory."""
    with tempfile.TemporaryDirectory() as folder:
        # With a seed of its own no allocation is found in the cache.
        own = [
            *overrides,
            "evaluate=null",
            "finetune=null",
            f"output={folder}/out",
            f"calibration.seed={time.time_ns()}",
        ]
        found = []
        for function in (estimated, measured):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(in_cpu_seconds, (function, recipe, own, device)))
    for figures in found:
        figures["calibrate to prune"] = sum(figures.get(stage, 0.0) for stage in _STAGES[1:])
        figures["memory, GB"] = figures.pop("memory") / 1e9
    for name in (*_STAGES, "calibrate to prune", "memory, GB"):
        one, other = (figures.get(name, 0.0) for figures in found)
        if other:
            print(f"| {recipe.stem} | {name} | {one:.2f} | {other:.2f} | {one / other:.2f} |", flush=True)


def main() -> None:
    """Compare the recipes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    print("| recipe | stage, seconds | estimated | measured | ratio |\n|---|---|---:|---:|---:|", flush=True)
    for path in given.recipes:
        compare(path, given.overrides, given.device)


if __name__ == "__main__":
    main()
