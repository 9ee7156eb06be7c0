"""What `compressx plan` estimates: held against runs, and for models too large to run here.

    OMP_NUM_THREADS=1 python benchmarks/estimate.py compare recipe.yaml... --device cpu
    python benchmarks/estimate.py shapes --assume h100 --processes 8

`compare` estimates each recipe and then runs it, in a process for each. It prints by stage the seconds, on a CPU those
of the processor, which other programs disturb less than the clock, and the peak of the device's memory, on a CPU of the
resident. The checks that a plan does too are in its `start` and taken off what is measured of loading. On a CPU run it
with one thread: seconds of several add up. For ALPS it prints how many steps its solvers took, of which the estimate
takes a mean.

`shapes` writes the configs of Llama 3 8B and 70B to a folder and estimates pruning of 50%, calibrated on 128 windows of
2048 tokens, by one process or more. No weight is made or read, and nothing is fetched.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama 3 70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
_COMMON = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "dtype": "bfloat16"}
_ATTENTION = {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.5}
METHODS: dict[str, list[dict[str, Any]]] = {
    **{name: [{"targets": ["*"], "pruner": name, "sparsity": 0.5}] for name in ("wanda", "sparsegpt", "alps")},
    "attnprune + sparsegpt": [_ATTENTION, {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5}],
}


def compare(path: Path, named: str) -> None:
    """Print estimate and measurement of a recipe on a device."""
    from compressx import load_plugins, run
    from compressx.costs.recipe import estimate, machine_for
    from compressx.models.access import device_for
    from compressx.pipeline.preparation import loaded_recipe, prepare
    from compressx.runtime.timing import synchronize

    device = device_for(named)

    def clock() -> float:
        synchronize(device)
        return time.process_time() if device.type == "cpu" else time.perf_counter()

    plugins = load_plugins()
    loaded = loaded_recipe(path, (), plugins)
    prepared = prepare(loaded, plugins)
    found = estimate(loaded.recipe, prepared.plan, prepared.checkpoint, machine_for(None, named))
    expected: dict[str, float] = {}
    for stage in found.stages:
        name = stage.name.partition(":")[0]
        expected[name] = expected.get(name, 0.0) + found.seconds(stage)
    started = clock()
    prepare(loaded, plugins)
    spent = {"load": started - clock()}
    now: list[Any] = ["load", clock()]

    def entered(stage: str, *_: Any) -> None:
        spent[now[0]] = spent.get(now[0], 0.0) + clock() - now[1]
        now[:] = [stage, clock()]

    report = run(loaded, plugins=plugins, progress=entered, device=named, restart=True)
    entered("")
    for name, seconds in expected.items():
        print(f"| {path.stem} | {name} | {seconds:.1f} | {spent.get(name, 0.0):.1f} | "
              f"{seconds / max(spent.get(name, 0.0), 1e-9):.2f} |")  # fmt: skip
    memory, taken = sum(found.memory.values()), report.peak_gpu_memory_bytes or report.peak_memory_bytes
    print(
        f"| {path.stem} | peak memory, GB | {memory / 1e9:.2f} | {taken / 1e9:.2f} | {memory / taken:.2f} |", flush=True
    )
    solved = [x.info for block in report.blocks for x in block.layers if "solver_steps" in x.info]
    for name in ("steps", "solver_steps") if solved else ():
        print(f"mean {name}: {statistics.fmean(info[name] for info in solved):.1f}")


def shapes(assume: str, processes: int) -> None:
    """Print estimates of Llama 3 on an assumed machine, and what processes exchange in a block and in all."""
    from transformers import AutoConfig

    from compressx import load_plugins
    from compressx.costs.recipe import estimate, machine_for
    from compressx.models.checkpoint import Checkpoint
    from compressx.models.loading import load_skeleton
    from compressx.pipeline.preparation import loaded_recipe
    from compressx.planning.make import make_plan

    plugins, machine = load_plugins(), machine_for(assume, "cpu", processes)
    several = processes > 1
    print(f"| model | method | PFLOPs | minutes | GPU memory, GB |{' exchanged, GB |' * several} longest stages, s |")
    print(f"|---|---|---:|---:|---:|{'---:|' * several}---|")
    with tempfile.TemporaryDirectory() as folder:
        for model, sizes in LLAMA.items():
            where = Path(folder) / model
            AutoConfig.for_model("llama", **_COMMON, **sizes).save_pretrained(where)
            streaming = model.endswith("70B")
            for method, rules in METHODS.items():
                recipe = {
                    "model": {"path": str(where), "dtype": "bfloat16", "streaming": streaming},
                    "calibration": {"dataset": {"text": __file__}, "samples": 128, "sequence_length": 2048},
                    "prune": rules, "output": f"{folder}/out",
                }  # fmt: skip
                loaded = loaded_recipe(recipe, (), plugins)
                checkpoint = Checkpoint(str(where), dtype="bfloat16")
                plan = make_plan(loaded, plugins, load_skeleton(checkpoint))
                found = estimate(loaded.recipe, plan, checkpoint, machine, processes)
                flops = sum(stage.work.flops for stage in found.stages)
                longest = sorted(found.stages, key=found.seconds, reverse=True)[:3]
                told = ", ".join(
                    f"{stage.name.removeprefix('prune: ')} {found.seconds(stage):.0f}" for stage in longest
                )
                parts = (found.exchanged.block, found.exchanged.whole)
                exchanged = " / ".join(f"{sum(x.values()) / 1e9:.1f}" for x in parts) + " | " if several else ""
                print(f"| {model} | {method} | {flops / 1e15:.1f} | {found.total / 60:.1f} | "
                      f"{sum(found.memory.values()) / 1e9:.1f} | {exchanged}{told} |", flush=True)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    compared = commands.add_parser("compare")
    compared.add_argument("recipes", nargs="+", type=Path)
    compared.add_argument("--device", default="auto")
    shaped = commands.add_parser("shapes")
    shaped.add_argument("--assume", default="h100")
    shaped.add_argument("--processes", type=int, default=1)
    given = parser.parse_args(argv)
    if given.command == "compare":
        print("| recipe | stage | estimated, s | measured, s | ratio |\n|---|---|---:|---:|---:|", flush=True)
        for recipe in given.recipes:  # each in a process of its own: memory of a run before would count as held
            process = multiprocessing.get_context("spawn").Process(target=compare, args=(recipe, given.device))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)
    else:
        shapes(given.assume, given.processes)


if __name__ == "__main__":
    main()
