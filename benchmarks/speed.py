"""Time and memory of pruning, compared with llm-compressor and with the time of the arithmetic alone.

llm-compressor has its own virtual environment. Both prune the same model in the same dtype with the same calibration
batches, alternately, each time in a new process:

    python -m venv llmc && llmc/bin/pip install llmcompressor==0.14.0.1
    python benchmarks/speed.py MODEL --text train.txt --peer llmc/bin/python

MODEL is a folder with safetensors. `prune` is the time of pruning a loaded model, including calibration passes but
not text, loading and saving; `command` is the time of the whole process. `memory` is the process's peak resident
memory, and `above` its increase over the loaded model. The floor is the arithmetic of two forward passes of every
decoder block and of the statistics, at the rate of a large matrix product in each dtype. The measured time of two
forward passes is printed below the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import llm_compressor
from llm_compressor import peak, resident

METHODS = ("wanda", "sparsegpt")
SPARSITY = 0.5


def by_compressx(task: dict[str, Any], *, streaming: bool = False) -> dict[str, float]:
    """Prune and save by a recipe."""
    from compressx import run

    recipe = {
        "model": {"path": task["model"], "dtype": task["dtype"], "streaming": streaming},
        "calibration": task["calibration"],
        "prune": [{"targets": ["*"], "pruner": task["method"], "sparsity": SPARSITY}],
        "output": task["output"],
    }
    base: list[int] = []
    report = run(recipe, progress=lambda stage, *_: base.append(resident()) if stage == "prune" else None)
    return {"prune": report.seconds["prune"], "above": peak() - base[0], "sparsity": report.sparsity}


TOOLS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "compressx": by_compressx,
    "compressx, streamed": partial(by_compressx, streaming=True),
    "llm-compressor": llm_compressor.prune,
}


def child(tool: str, task: dict[str, Any], python: str) -> dict[str, float]:
    """Run one task in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        task = {**task, "output": f"{folder}/pruned", "result": str(result)}
        started = time.perf_counter()
        done = subprocess.run(
            [python, __file__, "--child", tool, json.dumps(task)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{tool} failed:\n{done.stderr[-3000:]}")
        return {**json.loads(result.read_text(encoding="utf-8")), "command": time.perf_counter() - started}


def rate(dtype: str, size: int = 2048) -> float:
    """Measure the FLOP/s of a large matrix product."""
    import torch

    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def floor(model: str, dtype: str, method: str, calibration: dict[str, Any]) -> float:
    """Return the seconds of the arithmetic at the rate of large matrix products."""
    from compressx.models.architecture import architecture_of
    from compressx.models.checkpoint import Checkpoint
    from compressx.models.loading import load_empty

    empty = load_empty(Checkpoint(model))
    config = empty.config
    tokens = calibration["samples"] * calibration["sequence_length"]
    linears = architecture_of(empty).linears
    # Each token attends to half of the others on average, with one product for scores and one for values.
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * tokens * calibration["sequence_length"] * config.num_attention_heads * head
    forward = 2 * tokens * sum(x.in_features * x.out_features for x in linears.values())
    forward += attention * config.num_hidden_layers
    gathered = 0.0
    inputs = {(n.rsplit(".", 2)[0], x.in_features, _input_of(n)): x.in_features for n, x in linears.items()}
    for width in inputs.values():
        # X^T X is symmetric: half of the products suffice.
        gathered += tokens * width * (width + 1) if method == "sparsegpt" else 2 * tokens * width
    return float(2 * forward / rate(dtype) + gathered / rate("float32"))


def forwards(model: str, dtype: str, windows: Any, batch: int) -> float:
    """Measure two forward passes of all decoder blocks in transformers."""
    import torch

    from compressx.models.checkpoint import Checkpoint
    from compressx.models.loading import load_model

    blocks = load_model(Checkpoint(model, dtype=dtype)).base_model
    with torch.no_grad():
        blocks(windows[:batch], use_cache=False)
        started = time.perf_counter()
        for part in (*torch.split(windows, batch), *torch.split(windows, batch)):
            blocks(part, use_cache=False)
    return time.perf_counter() - started


def _input_of(name: str) -> str:
    """Return which input of a Llama block a linear has."""
    last = name.rsplit(".", 1)[1]
    return {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(last, last)


def compare(arguments: argparse.Namespace) -> None:
    """Run both tools alternately and print medians and ratios."""
    from compressx.data.documents import documents
    from compressx.data.windows import calibration_sequences, token_ids
    from compressx.models.checkpoint import Checkpoint
    from compressx.models.loading import load_tokenizer
    from compressx.recipe.sources import DatasetSource

    calibration = {
        "dataset": {"text": str(arguments.text)}, "samples": arguments.samples, "sequence_length": arguments.length,
        "seed": 0, "batch_size": arguments.batch_size,
    }  # fmt: skip
    ids = token_ids(documents(DatasetSource(text=str(arguments.text)), "calibration"),
                    load_tokenizer(Checkpoint(arguments.model)))  # fmt: skip
    pythons = dict.fromkeys(("compressx", "compressx, streamed"), sys.executable)
    pythons |= {"llm-compressor": arguments.peer} if arguments.peer else {}
    print(f"{arguments.samples} x {arguments.length} tokens in batches of {arguments.batch_size}, {arguments.dtype}, "
          f"{int(SPARSITY * 100)}%, medians of {arguments.rounds} round(s)\n")  # fmt: skip
    print("| method | tool | prune, s | command, s | memory, MB | above, MB | sparsity | of the floor |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        windows = Path(folder) / "windows.json"
        drawn = calibration_sequences(ids, arguments.samples, arguments.length, 0)
        windows.write_text(json.dumps(drawn.tolist()), encoding="utf-8")
        for method in arguments.methods:
            task = {"model": arguments.model, "method": method, "dtype": arguments.dtype, "calibration": calibration,
                    "windows": str(windows), "sparsity": SPARSITY, "batch_size": arguments.batch_size}  # fmt: skip
            runs: dict[str, list[dict[str, float]]] = {tool: [] for tool in pythons}
            for _ in range(arguments.rounds):
                for tool, python in pythons.items():
                    runs[tool].append(child(tool, task, python))
            least = floor(arguments.model, arguments.dtype, method, calibration)
            for tool, each in runs.items():
                m = {key: statistics.median(r[key] for r in each) for key in each[0]}
                megabytes = f"{m['memory'] / 1e6:.0f} | {m['above'] / 1e6:.0f}"
                print(f"| {method} | {tool} | {m['prune']:.1f} | {m['command']:.1f} | {megabytes} | "
                      f"{m['sparsity']:.2%} | {m['prune'] / least:.2f} |", flush=True)  # fmt: skip
            print(f"| {method} | floor | {least:.1f} | | | | | 1 |", flush=True)
        twice = forwards(arguments.model, arguments.dtype, drawn, arguments.batch_size)
        print(f"\nTwo forward passes of the dense model's blocks in transformers, measured: {twice:.1f} s.")


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, or run a single task in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--peer", help="Python of an environment with llm-compressor; without it compressx runs alone")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=1, help="llm-compressor's default is 1")
    parser.add_argument("--rounds", type=int, default=3)
    compare(parser.parse_args(argv))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:  # run by either tool's Python
        given = json.loads(sys.argv[3])
        measured = TOOLS[sys.argv[2]](given)
        Path(given["result"]).write_text(json.dumps({**measured, "memory": peak()}), encoding="utf-8")
    else:
        main()
