"""Prune a checkpoint larger than memory should be, and hold the peak of resident memory against its bound.

A random Llama-shaped checkpoint in bfloat16 is written into FOLDER (once; it takes minutes and the room that is asked
for), and pruned with weights on disk, in a process of its own for each method. The bound is three decoder blocks, the
hidden states of the calibration text, and 1 GB for Python, torch and transformers.

    python benchmarks/streaming.py FOLDER --gigabytes 12

The table goes to standard output. The exit status is 1 when a peak is above its bound.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, LlamaConfig

from compressx import run, shards
from compressx.architecture import find_blocks

METHODS: dict[str, dict[str, Any]] = {
    "wanda 2:4": {"targets": ["*"], "pruner": "wanda", "pattern": "2:4"},
    "sparsegpt 50%": {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5},
}
BLOCKS_ALLOWED, BASE = 3, 10**9


def config(arguments: argparse.Namespace) -> LlamaConfig:
    """Describe a model with as many blocks as the size asks for."""
    width, inner = arguments.width, arguments.inner
    kv = width // 4
    block = 2 * (2 * width * width + 2 * width * kv + 3 * width * inner)  # bytes
    outside = 2 * 2 * arguments.vocabulary * width
    layers = max(1, math.ceil((arguments.gigabytes * 1e9 - outside) / block))
    return LlamaConfig(
        vocab_size=arguments.vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=width // 128, num_key_value_heads=max(1, kv // 128), max_position_embeddings=4096,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def make(folder: Path, settings: LlamaConfig) -> None:
    """Write random weights block by block, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    blocks = find_blocks(model)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, fqn in enumerate((shards.OUTSIDE, *blocks)):
        file = f"model-{number + 1:05d}-of-{len(blocks) + 1:05d}.safetensors"
        tensors = {
            name: torch.ones(t.shape, dtype=t.dtype)
            if t.dim() == 1
            else torch.empty(t.shape, dtype=t.dtype).normal_(std=0.02, generator=generator)
            for name, t in shards.tensors_of(model, blocks, fqn).items()
        }
        shards.write(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    settings.architectures = ["LlamaForCausalLM"]
    settings.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(settings.vocab_size)}, unk_token="w0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)  # noqa: S106
    # Last: a folder with an index is whole.
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def prune(asked: dict[str, Any], threads: int, sender: Any) -> None:
    """Run in a child, and tell its seconds and its own peak."""
    torch.set_num_threads(threads)
    started = time.perf_counter()
    report = run(asked, restart=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sender.send((time.perf_counter() - started, peak, report.sparsity))


def main() -> None:
    """Make the checkpoint if it is not there, prune it by each method, and print what it took."""
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
    settings = config(arguments)
    model = arguments.folder / "model"
    if not (model / "model.safetensors.index.json").exists():
        make(model, settings)
    text = arguments.folder / "text.txt"
    choice = random.Random(0)  # noqa: S311 - text, no secret
    count = 2 * arguments.samples * arguments.length
    text.write_text(" ".join(f"w{choice.randrange(arguments.vocabulary)}" for _ in range(count)))
    sizes = {p.name: p.stat().st_size for p in model.glob("*.safetensors")}
    block = sorted(sizes.values())[len(sizes) // 2]
    states = arguments.samples * arguments.length * arguments.width * 2
    bound = BLOCKS_ALLOWED * block + states + BASE
    print(f"{sum(sizes.values()) / 1e9:.1f} GB in {len(sizes) - 1} blocks of {block / 1e6:.0f} MB, hidden states "
          f"{states / 1e6:.0f} MB, {arguments.threads} thread(s)\n")  # fmt: skip
    print("| method | seconds | peak memory, GB | bound, GB | sparsity |\n|---|---:|---:|---:|---:|")
    above = False
    for name in arguments.methods:
        asked = {
            "model": {"path": str(model), "streaming": True},
            "calibration": {"dataset": {"text": str(text)}, "samples": arguments.samples,
                            "sequence_length": arguments.length, "batch_size": 1},
            "prune": [METHODS[name]],
            "output": str(arguments.folder / "pruned"),
        }  # fmt: skip
        context = multiprocessing.get_context("spawn")  # a fork would begin with this process's memory
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=prune, args=(asked, arguments.threads, sender))
        child.start()
        sender.close()
        seconds, peak, sparsity = receiver.recv()
        child.join()
        above |= peak > bound
        print(f"| {name} | {seconds:.0f} | {peak / 1e9:.2f} | {bound / 1e9:.2f} | {sparsity:.2%} |", flush=True)
    sys.exit(int(above))


if __name__ == "__main__":
    main()
