"""Speed and memory of the closed-form gradient in row blocks, against autograd on whole attention matrices.

Both differentiate ||P~ - P||_F^2 / ||P||_F^2 with respect to the pruned query and key weights of one layer with the
geometry of SmolLM2-135M (9 query heads, 3 key heads, head_dim 64, width 576, rotary), on random weights and inputs,
and are first checked to agree. Times are medians of alternating repeats in milliseconds, after one warm-up each. Memory
is the increase of peak memory by one call in a new process (resident memory on Linux, or the accelerator's).

    python benchmarks/attention_gradient.py --tokens 512 1024 2048 4096 --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from compressx_attnprune.attention import Attention, Projection, queries_and_keys
from compressx_attnprune.losses import MatrixLoss, Pair

HEADS, KEY_HEADS, HEAD_DIM, WIDTH, THETA = 9, 3, 64, 576, 100_000.0
WARM_UP_TOKENS = 64

Gradient = Callable[[Attention, Tensor, Pair, Pair], tuple[float, Pair]]


def in_row_blocks(attention: Attention, x: Tensor, dense: Pair, pruned: Pair) -> tuple[float, Pair]:
    """Differentiate in closed form, a block of query rows at a time."""
    error, gradients = MatrixLoss(attention).gradients(x, dense, pruned)
    return float(error), gradients


def by_autograd(attention: Attention, x: Tensor, dense: Pair, pruned: Pair) -> tuple[float, Pair]:
    """Differentiate by a backward pass over whole matrices, as one would write it."""
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)

    def matrices(query: Tensor, key: Tensor) -> Tensor:
        q, k = queries_and_keys(attention, x, query, key)
        scores = (q * attention.scaling) @ k.repeat_interleave(attention.groups, dim=1).transpose(2, 3)
        return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)  # [sequences, heads, tokens, tokens]

    with torch.no_grad():
        reference = matrices(*dense)
    query, key = (w.detach().requires_grad_() for w in pruned)
    p = matrices(query, key)
    relative = (p - reference).square().sum() / reference.square().sum()
    dq, dk = torch.autograd.grad(relative / 2.0, (query, key))
    return float(relative.detach()), (dq, dk)


GRADIENTS: dict[str, Gradient] = {"row blocks": in_row_blocks, "autograd": by_autograd}


def layer(tokens: int, sequences: int, device: str) -> tuple[Attention, Tensor, Pair, Pair]:
    """Return a random layer: geometry, inputs [sequences, tokens, width], and dense and half pruned weights."""
    generator = torch.Generator().manual_seed(0)
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (torch.arange(tokens)[:, None] * frequencies).repeat(1, 2)  # [tokens, head_dim]
    rotary = (angles.cos().to(device), angles.sin().to(device))
    attention = Attention(Projection(HEADS), Projection(KEY_HEADS), HEAD_DIM, scaling=HEAD_DIM**-0.5, rotary=rotary)
    x = torch.randn(sequences, tokens, WIDTH, generator=generator).to(device)
    query, key = (torch.randn(h * HEAD_DIM, WIDTH, generator=generator) * 0.05 for h in (HEADS, KEY_HEADS))
    pruned = (query * (query.abs() > query.abs().median()), key * (key.abs() > key.abs().median()))
    return attention, x, (query.to(device), key.to(device)), (pruned[0].to(device), pruned[1].to(device))


def check(tokens: int, device: str) -> None:
    """Exit if the two gradients disagree."""
    drawn = layer(tokens, 2, device)
    (ours, grads), (wanted, expected) = (gradient(*drawn) for gradient in GRADIENTS.values())
    off = max(float((g - e).norm() / e.norm()) for g, e in zip(grads, expected, strict=True))
    if abs(ours - wanted) > 1e-4 * wanted or off > 1e-3:
        raise SystemExit(f"the two disagree: {ours:.6g} and {wanted:.6g}, gradients by {off:.2g} of their norm")


def milliseconds(tokens: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Time both alternately; return medians."""
    drawn = layer(tokens, arguments.sequences, arguments.device)
    taken: dict[str, list[float]] = {name: [] for name in GRADIENTS}
    for repeat in range(arguments.repeats + 1):
        for name, gradient in GRADIENTS.items():
            started = time.perf_counter()
            gradient(*drawn)
            _wait(arguments.device)
            if repeat:  # the first is the warm-up
                taken[name].append(1000.0 * (time.perf_counter() - started))
    return {name: statistics.median(times) for name, times in taken.items()}


def growth(name: str, tokens: int, arguments: argparse.Namespace) -> float:
    """Measure the memory of one call in this process, which must be new; return MiB."""
    drawn = layer(tokens, arguments.sequences, arguments.device)
    GRADIENTS[name](*layer(WARM_UP_TOKENS, 1, arguments.device))  # excludes one-time allocations of libraries
    if arguments.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        GRADIENTS[name](*drawn)
        _wait(arguments.device)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # Unlike getrusage's, this peak can be reset: importing torch temporarily took more memory.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmHWM")
    GRADIENTS[name](*drawn)
    return (_resident("VmHWM") - before) / 2**20


def _resident(entry: str) -> int:
    """Return a memory entry of this process's status, in bytes."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{entry}:"))
    return int(line.split()[1]) * 1024


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def in_fresh_process(name: str, tokens: int, arguments: argparse.Namespace) -> float:
    """Run `growth` in a new process."""
    common = ["--threads", arguments.threads, "--device", arguments.device, "--sequences", arguments.sequences]
    command = [sys.executable, __file__, "--measure-memory", name, "--tokens", tokens, *common]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="sequence lengths")
    parser.add_argument("--sequences", type=int, default=1, help="sequences in a call")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure-memory", choices=GRADIENTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure_memory is not None:
        print(json.dumps(growth(arguments.measure_memory, arguments.tokens[0], arguments)))
        return
    check(300, arguments.device)
    memory = {n: {name: in_fresh_process(name, n, arguments) for name in GRADIENTS} for n in arguments.tokens}
    print(f"{arguments.sequences} sequence(s), {arguments.threads} thread(s), {arguments.device}\n")
    print("| tokens | row blocks, ms | autograd, ms | speed-up | row blocks, MiB | autograd, MiB |\n|" + "---:|" * 6)
    for tokens in arguments.tokens:
        ours, theirs = milliseconds(tokens, arguments).values()
        ours_memory, their_memory = memory[tokens].values()
        print(
            f"| {tokens} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} | {ours_memory:.0f} | {their_memory:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
