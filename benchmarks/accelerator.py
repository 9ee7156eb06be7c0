"""Correctness, time, memory and determinism of the pruners of weights, on the device that is here, in ten minutes.

    python benchmarks/accelerator.py --output DIR

On a GPU it prunes a decoder block of Llama-3-8B's shape with random weights, and SmolLM2-135M whole; on a CPU a tiny
block only, unless `--size` says otherwise. DIR gets `accelerator.json` and `accelerator.md`, which is printed too:

- agreement: a small float32 model is pruned on the CPU and on the device; the share of mask entries that are equal, and
  both errors of the block's output. Sums are rounded otherwise, so masks of nearly equal scores differ; how much that
  does is seen on the CPU, with weights changed in their last bit: `rounded`.
- stages: whole runs of tiny models on the CPU and on the device: the share of equal mask entries, and perplexities.
- block: seconds of pruning and peak device memory above the model's, with the sparsity counted in the masks.
- determinism: the same block pruned twice; whether masks and weights are equal to the bit.
- model: SmolLM2 whole.
- 2:4, by `two_four.py`: a linear against the dense one, with the error of its output; and tokens a second of a random
  Llama, dense and 2:4, in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compressx
import two_four
from compressx.masks.maskset import MaskSet
from compressx.models.access import device_for
from compressx.runtime.machine import machine
from compressx.runtime.timing import forget_peaks, peak_resident_bytes, synchronize
from random_llama import config

QK = ["*.q_proj", "*.k_proj"]
METHODS: dict[str, list[dict[str, Any]]] = {
    "magnitude 50%": [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}],
    "Wanda 50%": [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}],
    "Wanda 2:4": [{"targets": ["*"], "pruner": "wanda", "pattern": "2:4"}],
    "SparseGPT 50%": [{"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5}],
    "SparseGPT 2:4": [{"targets": ["*"], "pruner": "sparsegpt", "pattern": "2:4"}],
    "ALPS 50%": [{"targets": ["*"], "pruner": "alps", "sparsity": 0.5}],
    "sensitivity 50%": [{"targets": ["*"], "pruner": "sensitivity", "sparsity": 0.5, "group": "joint"}],
    "attnprune, q and k 80%": [{"targets": QK, "pruner": "attnprune", "sparsity": 0.8}],
}


@dataclass(frozen=True)
class Size:
    """What is measured.

    Attributes:
        width, inner: of the block, in features.
        vocabulary: of its model, small, because embeddings are not pruned.
        windows, length: calibration text, in windows and tokens.
        dtype: of the block's weights.
        linears: [out_features, in_features] of the linears timed at 2:4.
        tokens: that enter them.
        blocks: of the model whose tokens a second are measured.
        lengths: of its prompts, and of what it writes.
        batches: of these.
        whole: whether SmolLM2 is pruned too.
    """

    width: int
    inner: int
    vocabulary: int
    windows: int
    length: int
    dtype: str
    linears: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    blocks: int
    lengths: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    whole: bool


SIZES = {
    "tiny": Size(64, 192, 100, 4, 32, "float32", ((64, 64),), (16,), 2, ((16, 4),), (1,), whole=False),
    "llama-3-8b": Size(
        4096, 14336, 1000, 128, 2048, "bfloat16", ((4096, 4096), (14336, 4096), (4096, 14336)), (1, 64, 2048, 16384), 8,
        ((2048, 64),), (1, 16), whole=True,
    ),
}  # fmt: skip
PARTS = ("agreement", "stages", "block", "2:4", "speed", "model")
SMALL = Size(256, 768, 1000, 16, 128, "float32", (), (), 0, (), (), whole=False)
"""Of the comparison with the CPU: large enough for several column blocks, small enough for a CPU."""


def model_of(size: Size, device: torch.device, blocks: int = 1) -> Any:
    """Return a random Llama on the device."""
    from transformers import AutoModelForCausalLM

    settings = config(size.width, size.inner, blocks, size.vocabulary, size.dtype)
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, size.dtype)).eval()
    return model.to(device)


def text_of(size: Size) -> Tensor:
    """Return random token ids, int64 [windows, tokens]."""
    return torch.randint(size.vocabulary, (size.windows, size.length), generator=torch.Generator().manual_seed(0))


def pruned(model: Any, size: Size, rules: list[dict[str, Any]], ids: Tensor) -> compressx.PrunedModel:
    """Prune a copy of a model."""
    recipe = {"calibration": {"batch_size": max(1, 4096 // size.length)}, "prune": rules}
    return compressx.prune(deepcopy(model), None, recipe, calibration=ids)


class Memory:
    """Peak memory since it was made, above what there was: of the device, on a CPU of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        forget_peaks()
        self.before = torch.cuda.memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()

    def above(self) -> int:
        """Return the bytes."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_resident_bytes()
        return peak - self.before


def agreements(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield for each method how far the device's masks are the CPU's."""
    model, ids = model_of(SMALL, torch.device("cpu")), text_of(SMALL)
    for name, rules in METHODS.items():
        here = pruned(model.to("cpu"), SMALL, rules, ids)
        near = pruned(rounded(model), SMALL, rules, ids)
        there = pruned(model.to(device), SMALL, rules, ids)
        yield {
            "method": name, "equal": equal(here.masks, there.masks), "rounded": equal(here.masks, near.masks),
            "error on the CPU": here.report.blocks[0].output_error, "error": there.report.blocks[0].output_error,
        }  # fmt: skip


def rounded(model: Any) -> Any:
    """Return a copy whose float32 weights are changed in their last bit, half of them."""
    changed, generator = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1 + 2.0**-23 * torch.randint(2, weight.shape, generator=generator))
    return changed


def equal(one: MaskSet, other: MaskSet) -> float:
    """Return the share of entries in which masks are equal."""
    same = sum(int((one[n].keep == other[n].keep).sum()) for n in one)
    return same / sum(one[n].keep.numel() for n in one)


SPARSITIES = {"target": 0.5, "sparsities": [0.4, 0.6], "samples": 4}
STAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "allocation by divergence": ("llama", "wanda", {"allocation": {"method": "divergence", **SPARSITIES}}),
    "allocation by outliers": ("gpt2", "wanda", {"allocation": {"method": "owl", "target": 0.5}}),
    "block reconstruction": ("mixtral", "wanda", {"reconstruct_block": {"passes": 1}}),
    "fine-tuning": ("llama-tied", "wanda", {"finetune": {"steps": 2, "batch_size": 2}}),
    "adapters": ("llama", "wanda", {"finetune": {"steps": 2, "batch_size": 2, "lora": {"rank": 4}}}),
    "streaming": ("phi3", "sparsegpt", {"model": {"streaming": True}}),
    "states in files": ("gemma3", "sparsegpt", {"calibration": {"memory_limit": "1KB"}}),
    "bfloat16 products": ("opt", "wanda", {"compute_dtype": "bfloat16", "reconstruct_block": {"passes": 1}}),
}
"""What a run may do beside pruning: the tiny model, its pruner, and the sections of the recipe."""


def stages(device: torch.device, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield for each stage of a run how a tiny model ends on the CPU and on the device."""
    from compressx.testing import save_tiny_model, tiny_text

    for stage, (architecture, pruner, sections) in STAGES.items():
        where = save_tiny_model(folder / architecture, architecture)
        text = folder / "text.txt"
        text.write_text(tiny_text(), encoding="utf-8")
        found = []
        for name in ("cpu", str(device)):
            rule = {"targets": ["*"], "pruner": pruner, **({} if "allocation" in sections else {"sparsity": 0.5})}
            recipe: dict[str, Any] = {
                "model": {"path": str(where)}, "compute_dtype": "float32", "prune": [rule],
                "calibration": {"dataset": {"text": str(text)}, "samples": 8, "sequence_length": 32},
                "evaluate": {"token_perplexity": {"dataset": {"text": str(text)}, "sequence_length": 32, "samples": 4}},
                "output": str(folder / f"{stage}-{name}".replace(" ", "-").replace(":", "-")),
            }  # fmt: skip
            for key, section in sections.items():
                recipe[key] = {**recipe.get(key, {}), **section} if isinstance(section, dict) else section
            report = compressx.run(recipe, device=name, restart=True)
            keeps = MaskSet.load(Path(recipe["output"]) / "masks.safetensors")
            found.append((keeps, [*report.evaluation.values()][-1]["token_perplexity"], report.sparsity))
        (here, before, _), (there, after, sparsity) = found
        yield {
            "stage": stage, "model": architecture, "equal": equal(here, there), "sparsity": sparsity,
            "perplexity on the CPU": before, "perplexity": after,
        }  # fmt: skip


def blocks(device: torch.device, size: Size) -> Iterator[dict[str, Any]]:
    """Yield for each method the time and memory of a block, pruned twice, and whether both results are equal."""
    model, ids = model_of(size, device), text_of(size)
    pruned(model, size, METHODS["Wanda 50%"], ids)  # warms up
    for name, rules in METHODS.items():
        results, seconds, inside, memory = [], [], [], []
        for _ in range(2):
            synchronize(device)
            room = Memory(device)
            started = time.perf_counter()
            result = pruned(model, size, rules, ids)
            synchronize(device)
            seconds.append(time.perf_counter() - started)
            memory.append(room.above())
            results.append({n: (e.keep, result.model.get_submodule(n).weight.cpu()) for n, e in result.masks.items()})
            report = result.report
            inside.append(report.seconds["prune"])
            del result
        equal = all(torch.equal(a, b) for n in results[0] for a, b in zip(results[0][n], results[1][n], strict=True))
        yield {
            "method": name, "seconds": min(seconds), "prune": min(inside), "bytes": max(memory),
            "sparsity": report.sparsity, "twice the same": equal,
        }  # fmt: skip


def wholes(device: torch.device, model: dict[str, Any], text: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield for each method the time and memory of SmolLM2 whole, on 128 x 512 tokens."""
    for name, rules in METHODS.items():
        recipe = {
            "model": model, "calibration": {"dataset": {"text": text} if text != "wikitext" else text, "samples": 128,
                                            "sequence_length": 512},
            "prune": rules, "output": str(folder / name.replace(" ", "-").replace("%", "").replace(":", "of")),
        }  # fmt: skip
        report = compressx.run(recipe, device=str(device), restart=True)
        yield {
            "method": name, "seconds": report.seconds["prune"],
            "bytes": report.peak_gpu_memory_bytes or report.peak_memory_bytes, "sparsity": report.sparsity,
        }  # fmt: skip


def measured(title: str, rows: Callable[[], Iterator[dict[str, Any]]]) -> dict[str, Any]:
    """Return the rows of a section, and after an error those before it, with the reason."""
    found: list[dict[str, Any]] = []
    started = time.perf_counter()
    try:
        for row in rows():
            found.append(row)
            print(f"{title}: {row}", file=sys.stderr, flush=True)
    except (RuntimeError, compressx.CompressxError) as error:
        return {
            "rows": found,
            "not measured": f"{type(error).__name__}: {error}",
            "seconds": time.perf_counter() - started,
        }
    return {"rows": found, "seconds": time.perf_counter() - started}


def table(title: str, section: dict[str, Any]) -> str:
    """Return a section as Markdown."""
    rows = section["rows"]
    lines = [f"## {title}", ""]
    if rows:
        lines += ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
        lines += [
            "| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in r.values()) + " |" for r in rows
        ]
    if reason := section.get("not measured"):
        lines += ["", f"Not measured: {reason}"]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure everything; print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", choices=("auto", *SIZES), default="auto", help="auto: tiny on a CPU")
    parser.add_argument("--model", type=Path, help="GGUF file of SmolLM2; from its package when absent")
    parser.add_argument("--text", default="wikitext", help="calibration text of SmolLM2, a file or `wikitext`")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to measure; all when absent")
    arguments = parser.parse_args()
    device = device_for(arguments.device)
    size = SIZES[("llama-3-8b" if device.type == "cuda" else "tiny") if arguments.size == "auto" else arguments.size]
    arguments.output.mkdir(parents=True, exist_ok=True)
    parts: dict[str, tuple[str, Callable[[], Iterator[dict[str, Any]]]]] = {
        "agreement": ("agreement with the CPU", lambda: agreements(device)),
        "stages": ("stages of a run", lambda: stages(device, arguments.output / "tiny")),
        "block": (
            f"a block of width {size.width}, {size.windows} x {size.length} tokens", lambda: blocks(device, size)
        ),
        "2:4": ("2:4 products", lambda: two_four.products(device, size.linears, size.tokens)),
        "speed": (
            f"tokens a second of {size.blocks} blocks",
            lambda: two_four.speeds(device, model_of(size, device, size.blocks), size.lengths, size.batches),
        ),
    }  # fmt: skip
    if size.whole:
        from compressx.recipe.schema import load_recipe

        source = load_recipe(Path(__file__).parents[1] / "recipes" / "wanda-50.yaml").recipe.model
        model = source.model_dump(exclude_defaults=True) if arguments.model is None else {"path": str(arguments.model)}
        parts["model"] = (
            "SmolLM2-135M, 128 x 512 tokens",
            lambda: wholes(device, model, arguments.text, arguments.output / "runs"),
        )
    where = machine(device)
    if missing := sorted({*(arguments.only or ())} - parts.keys()):
        parser.error(f"--only {' '.join(missing)}: not measured at this size; --size llama-3-8b has it")
    sections: dict[str, Any] = {}
    text = where
    for name in arguments.only or parts:
        title, rows = parts[name]
        sections[title] = measured(name, rows)
        # After each, so that a run which is stopped has what it measured.
        found = {"machine": where, "size": asdict(size), "sections": sections}
        (arguments.output / "accelerator.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        text = "\n".join([where, "", *(table(title, section) for title, section in sections.items())])
        (arguments.output / "accelerator.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
