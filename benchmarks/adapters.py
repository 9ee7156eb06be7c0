"""Masked LoRA adapters against adapters that are masked only when they are merged.

    python benchmarks/adapters.py runs/wanda-60 --training valid.txt --evaluation test.txt --output adapters

RUN is the output folder of a run. For each learning rate and both methods, adapters of rank 16 are trained on random
windows of the training text, without a teacher, and merged into the pruned weights. Perplexity is measured on the
evaluation text: of the pruned model, with the adapters, and after merging under the masks. OUTPUT gets `adapters.csv`
and `adapters.md`.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressx.data.windows import calibration_windows, token_ids
from compressx.evaluation.token_perplexity import token_perplexity
from compressx.masks import MaskSet, mask_adapters, merge_adapters
from compressx.models.access import InMemory
from compressx.training.distillation import next_token_loss
from loaded import load

RANK, BATCH = 16, 2


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        masked: whether the updates were masked while they were trained.
        rate: learning rate, which falls as a cosine.
        before, adapted, merged: perplexity of the pruned model, with adapters, and after merging.
        first, last: mean loss of the first and of the last five steps.
        outside: fraction of the update's squared norm outside the masks.
        seconds: per step.
        verified: whether every dropped weight is zero, and every other one finite, at the end.
    """

    masked: bool
    rate: float
    before: float
    adapted: float
    merged: float
    first: float
    last: float
    outside: float
    seconds: float
    verified: bool


def train(model: Any, windows: Tensor, rate: float, steps: int, seed: int) -> list[float]:
    """Train what requires a gradient; return the loss of every step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    model.train()
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        loss = next_token_loss(model(batch).logits, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


def measure(run: Path, training: Tensor, held_out: Tensor, rate: float, *, masked: bool, steps: int, seed: int) -> Row:
    """Train and merge adapters of a pruned model."""
    from peft import LoraConfig, get_peft_model

    model, _ = load(str(run))
    masks = MaskSet.load(run / "masks.safetensors")
    before = token_perplexity(InMemory(model), held_out)
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    if masked:
        mask_adapters(adapted, masks)
    started = time.perf_counter()
    losses = train(adapted, training, rate, steps, seed)
    seconds = (time.perf_counter() - started) / steps
    trained = token_perplexity(InMemory(adapted.get_base_model()), held_out)
    merged, outside = merge_adapters(adapted, masks)
    after = token_perplexity(InMemory(merged), held_out)
    few = min(5, steps)
    return Row(
        masked, rate, before, trained, after, sum(losses[:few]) / few, sum(losses[-few:]) / few, outside, seconds,
        masks.verify(merged),
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| learning rate | masked | loss | perplexity before | with adapters | merged | update outside | s a step |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.rate:g} | {'in training' if row.masked else 'when merged'} | {row.first:.2f} to {row.last:.2f} | "
        f"{row.before:.1f} | {row.adapted:.1f} | {row.merged:.1f} | {row.outside:.0%} | {row.seconds:.1f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every learning rate with both methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--training", type=Path, required=True, help="text file")
    parser.add_argument("--evaluation", type=Path, required=True, help="text file")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=128, help="tokens in a window of training; twice in evaluation")
    parser.add_argument("--windows", type=int, default=24, help="of evaluation")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    _, tokenizer = load(str(given.run))
    training = token_ids([given.training.read_text(encoding="utf-8")], tokenizer)
    evaluation = token_ids([given.evaluation.read_text(encoding="utf-8")], tokenizer)
    held_out = evaluation[: given.windows * 2 * given.length].view(given.windows, 2 * given.length)
    windows = calibration_windows(training, training.numel() // given.length, given.length, given.seed)
    given.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for rate in given.rates:
        for masked in (True, False):
            rows.append(measure(given.run, windows, held_out, rate, masked=masked, steps=given.steps, seed=given.seed))
            with (given.output / "adapters.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [*asdict(rows[0])])
                writer.writeheader()
                writer.writerows(map(asdict, rows))
            (given.output / "adapters.md").write_text(table(rows), encoding="utf-8")
            print(table(rows[-1:]).splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
