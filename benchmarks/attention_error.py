"""Held-out attention error of pruned query and key projections, method by method, on the dense model's stream.

The figure is ||P~ - P||_F^2 / ||P||_F^2, the ratio of *squared* norms over all heads of a layer, where P is the dense
attention matrix and P~ that of the pruned projections on the same inputs. Every method sees the same calibration
sequences and is measured on the same other ones.

    python benchmarks/attention_error.py MODEL --calibration train.txt --evaluation test.txt --layers 3 10 25

MODEL is a hub id, a folder, or a `.gguf` file. When both texts are one file, the windows are still different ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compressx import Block, Hessian, SequenceSample, Unstructured, keep_masks
from compressx.architecture import survey, text_config
from compressx.capture import capture_calls, replay
from compressx.obs import inverse_cholesky, sweep
from compressx.observe import observe
from compressx_attnprune import layer, solver
from compressx_attnprune.geometry import Attention
from compressx_attnprune.solver import Pair

DAMPING = 0.01
MASK_STEPS, MASK_LEARNING_RATE = 60, 0.05  # the defaults of the plugin's mask mode


@dataclass(frozen=True, eq=False)
class Problem:
    """One layer: its attention, dense weights, and inputs of calibration and of held-out text."""

    attention: Attention
    weights: Pair
    calibration: Tensor  # [sequences, tokens, in_features]
    held_out: Tensor

    def masked(self, scores: Pair, pattern: Unstructured) -> Pair:
        """Drop the lowest scores of query and key."""
        query, key = keep_masks(dict(zip("qk", scores, strict=True)), dict.fromkeys("qk", pattern)).values()
        return self.weights[0] * query, self.weights[1] * key


Method = Callable[[Problem, float], Pair]


def magnitude(problem: Problem, sparsity: float) -> Pair:
    """Keep the largest |W| over query and key together."""
    query, key = problem.weights
    return problem.masked((query.abs(), key.abs()), Unstructured(sparsity, "joint"))


def wanda(problem: Problem, sparsity: float) -> Pair:
    """Keep the largest |W| ||x||_2 of each row (arXiv 2306.11695)."""
    norms = problem.calibration.flatten(0, 1).norm(dim=0)
    query, key = problem.weights
    return problem.masked((query.abs() * norms, key.abs() * norms), Unstructured(sparsity, "row"))


def sparsegpt(group: str) -> Method:
    """SparseGPT's own selection and update (arXiv 2301.00774) with a budget per row or per layer."""

    def prune(problem: Problem, sparsity: float) -> Pair:
        hessian = Hessian(problem.calibration.shape[-1])
        hessian.update(problem.calibration)
        factor, _ = inverse_cholesky(hessian.matrix, DAMPING)
        query, key = (sweep(w, factor, Unstructured(sparsity, group))[1] for w in problem.weights)
        return query, key

    return prune


def gauss_newton(problem: Problem, sparsity: float) -> Pair:
    """Attention-aware scores over query and key together, and the update (attnprune's default)."""
    x, pattern = problem.calibration, Unstructured(sparsity, "joint")
    found = solver.sensitivities(problem.attention, x, problem.weights)
    scored = [solver.scores(s, x, w) for s, w in zip(found, problem.weights, strict=True)]
    masks = keep_masks(dict(zip("qk", scored, strict=True)), dict.fromkeys("qk", pattern)).values()
    query, key = (
        solver.update(s, x, w, keep, pattern, damping=DAMPING)[0]
        for s, w, keep in zip(found, problem.weights, masks, strict=True)
    )
    return query, key


def mask(problem: Problem, sparsity: float) -> Pair:
    """Masks learnt on the attention error as published (attnprune's `mode: mask`)."""
    relaxed = solver.learn_masks(
        problem.attention,
        problem.calibration,
        problem.weights,
        regularization=solver.default_regularization(sparsity),
        steps=MASK_STEPS,
        learning_rate=MASK_LEARNING_RATE,
    )
    ranked = solver.ranked(relaxed, problem.calibration, problem.weights)
    return problem.masked(ranked, Unstructured(sparsity, "joint"))


METHODS: dict[str, Method] = {
    "magnitude, joint": magnitude,
    "Wanda, row": wanda,
    "SparseGPT, row": sparsegpt("row"),
    "SparseGPT, layer": sparsegpt("layer"),
    "attnprune mask": mask,
    "attnprune gauss-newton": gauss_newton,
}


def load(model: str) -> tuple[torch.nn.Module, object]:
    """Load a model in float32 and its tokenizer from a hub id, a folder or a `.gguf` file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(model)
    if path.suffix == ".gguf":
        where, extra = str(path.parent), {"gguf_file": path.name}
    else:
        where, extra = model, {}
    loaded = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **extra).eval()
    return loaded, AutoTokenizer.from_pretrained(where, **extra)


def windows(arguments: argparse.Namespace, tokenizer: object) -> tuple[Tensor, Tensor]:
    """Draw calibration and held-out windows [sequences, length], disjoint also when both come from one file."""
    generator = torch.Generator().manual_seed(arguments.seed)

    def shuffled(path: Path) -> Tensor:
        ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]  # type: ignore[operator]
        count = len(ids) // arguments.length
        whole = ids[: count * arguments.length].view(count, arguments.length)
        return whole[torch.randperm(count, generator=generator)]

    wanted, held = arguments.samples, arguments.held_out
    drawn = shuffled(arguments.calibration)
    same = arguments.calibration.resolve() == arguments.evaluation.resolve()
    others = drawn[wanted:] if same else shuffled(arguments.evaluation)
    if len(drawn) < wanted or len(others) < held:
        raise SystemExit(f"too little text: {wanted} calibration and {held} held-out windows of {arguments.length}")
    return drawn[:wanted], others[:held]


@torch.no_grad()
def problems(model: torch.nn.Module, layers: list[int], calibration: Tensor, held_out: Tensor) -> dict[int, Problem]:
    """Run the dense model block by block and collect what the layers need."""
    found = survey(model)
    batches = [*calibration.split(8), *held_out.split(8)]
    states, calls = capture_calls(model, found.blocks, batches)
    collected = {}
    for index, (fqn, module) in enumerate(found.blocks.items()):
        linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")}
        if index in layers:
            block = Block(index, fqn, module, linears, tuple(calls[fqn]), text_config(model))
            query, key = layer.find_projections(block)
            wanted = {query.name: {"inputs": SequenceSample(query.in_features)}}
            runs = [lambda x=x, c=c, m=module: replay(m, x, c) for x, c in zip(states, calls[fqn], strict=True)]
            observe(linears, wanted, runs)
            x = wanted[query.name]["inputs"].sequences
            weights = (query.weight.float(), key.weight.float())
            collected[index] = Problem(layer.describe(block), weights, x[: len(calibration)], x[len(calibration) :])
        if index == max(layers):
            break
        states = [replay(module, x, c) for x, c in zip(states, calls[fqn], strict=True)]
    return collected


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder, or .gguf file")
    parser.add_argument("--calibration", type=Path, required=True, metavar="TEXT")
    parser.add_argument("--evaluation", type=Path, required=True, metavar="TEXT")
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences")
    parser.add_argument("--held-out", type=int, default=8, help="held-out sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = load(arguments.model)
    layers = problems(model, arguments.layers, *windows(arguments, tokenizer))
    cells = [f"layer {i}, {s:.0%}" for i in arguments.layers for s in arguments.sparsities]
    print(f"Held-out ||P~ - P||_F^2 / ||P||_F^2, {arguments.samples} x {arguments.length} calibration tokens\n")
    print(f"| method | {' | '.join(cells)} | seconds per layer |\n|{'---|' * (len(cells) + 2)}")
    for name in arguments.methods:
        errors, seconds = [], 0.0
        for index in arguments.layers:
            problem = layers[index]
            for sparsity in arguments.sparsities:
                started = time.perf_counter()
                pruned = METHODS[name](problem, sparsity)
                seconds += time.perf_counter() - started
                errors.append(solver.relative_error(problem.attention, problem.held_out, problem.weights, pruned))
        row = " | ".join(f"{e:.4f}" for e in errors)
        print(f"| {name} | {row} | {seconds / len(errors):.1f} |", flush=True)


if __name__ == "__main__":
    main()
