"""Prune a checkpoint larger than memory, and compare peak resident memory with its bound.

A random Llama in bfloat16 is written to FOLDER once (it takes minutes and the given size on disk), and pruned with
weights on disk, in a new process for each method. The bound is four decoder blocks, of which one is being written, the
hidden states of the calibration text, and 1 GB for Python, torch and transformers.

    python benchmarks/streaming.py FOLDER --gigabytes 12

The table goes to standard output. The exit status is 1 when a peak is above its bound.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

from compressx import run
from compressx.runtime.timing import peak_resident_bytes
from random_llama import config, make, write_text

METHODS: dict[str, dict[str, Any]] = {
    "wanda 2:4": {"targets": ["*"], "pruner": "wanda", "pattern": "2:4"},
    "sparsegpt 50%": {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5},
}
BLOCKS_ALLOWED, BASE = 4, 10**9


def layers_for(arguments: argparse.Namespace) -> int:
    """Return the number of blocks for a model of the given size."""
    width, inner, wanted = int(arguments.width), int(arguments.inner), float(arguments.gigabytes) * 1e9
    block = 2 * (2 * width * width + 2 * width * (width // 4) + 3 * width * inner)  # bytes
    return max(1, math.ceil((wanted - 2 * 2 * int(arguments.vocabulary) * width) / block))


def prune(recipe: dict[str, Any], threads: int, sender: Any) -> None:
    """Run in a child process, and send seconds and peak memory."""
    torch.set_num_threads(threads)
    started = time.perf_counter()
    report = run(recipe, restart=True)
    sender.send((time.perf_counter() - started, peak_resident_bytes(), report.sparsity))


def main() -> None:
    """Write the checkpoint if needed, prune it by each method, and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--samples", type=int, default=8, help="calibration windows")
    parser.add_argument("--length", type=int, default=128, help="tokens in a window")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    settings = config(arguments.width, arguments.inner, layers_for(arguments), arguments.vocabulary)
    model = arguments.folder / "model"
    if not (model / "model.safetensors.index.json").exists():
        make(model, settings)
    text = arguments.folder / "text.txt"
    write_text(text, 2 * arguments.samples * arguments.length, arguments.vocabulary)
    sizes = {p.name: p.stat().st_size for p in model.glob("*.safetensors")}
    block = sorted(sizes.values())[len(sizes) // 2]
    states = arguments.samples * arguments.length * arguments.width * 2
    bound = BLOCKS_ALLOWED * block + states + BASE
    print(f"{sum(sizes.values()) / 1e9:.1f} GB in {len(sizes) - 1} blocks of {block / 1e6:.0f} MB, hidden states "
          f"{states / 1e6:.0f} MB, {arguments.threads} thread(s)\n")  # fmt: skip
    print("| method | seconds | peak memory, GB | bound, GB | sparsity |\n|---|---:|---:|---:|---:|")
    above = False
    for name in arguments.methods:
        recipe = {
            "model": {"path": str(model), "streaming": True},
            "calibration": {"dataset": {"text": str(text)}, "samples": arguments.samples,
                            "sequence_length": arguments.length, "batch_size": 1},
            "prune": [METHODS[name]],
            "output": str(arguments.folder / "pruned"),
        }  # fmt: skip
        context = multiprocessing.get_context("spawn")  # a fork would start with this process's memory
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=prune, args=(recipe, arguments.threads, sender))
        child.start()
        sender.close()
        seconds, peak, sparsity = receiver.recv()
        child.join()
        above |= peak > bound
        print(f"| {name} | {seconds:.0f} | {peak / 1e9:.2f} | {bound / 1e9:.2f} | {sparsity:.2%} |", flush=True)
    sys.exit(int(above))


if __name__ == "__main__":
    main()
