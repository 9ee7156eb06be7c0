"""Prune with llm-compressor, in a Python environment that has it and need not have compressx.

    python -m venv llmc && llmc/bin/pip install llmcompressor==0.14.0.1
    llmc/bin/python benchmarks/llm_compressor.py TASK.json

TASK.json has `model` (folder), `dtype`, `method` (wanda or sparsegpt), `sparsity`, `pattern` (N:M or null), `windows`
(JSON file of token ids), `batch_size`, `output` (folder) and `result` (JSON file to write).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trimmed() -> int:
    """Return freed memory to the system, and return the resident memory in bytes; later peaks are counted from here."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident()


def peak() -> int:
    """Return its peak in bytes; getrusage would include the parent process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def prune(task: dict[str, Any]) -> dict[str, float]:
    """Prune with the defaults of `oneshot`, and save."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    windows = json.loads(Path(task["windows"]).read_text(encoding="utf-8"))
    rows = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(row) for row in windows]})
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=task["dtype"])
    modifier = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}[task["method"]]
    structure = {"mask_structure": task["pattern"]} if task.get("pattern") else {}
    base, started = resident(), time.perf_counter()
    oneshot(
        model=model, processor=tokenizer, dataset=rows, batch_size=task["batch_size"],
        # With targets="Linear", as in its docstrings, 0.14.0.1 silently prunes nothing.
        recipe=[modifier(sparsity=task["sparsity"], targets=[r"re:model\.layers\.\d+$"], **structure)],
        num_calibration_samples=len(windows), max_seq_length=len(windows[0]), shuffle_calibration_samples=False,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    model.save_pretrained(task["output"])
    tokenizer.save_pretrained(task["output"])
    weights = [m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
    return {"prune": seconds, "above": peak() - base, "memory": peak(), "sparsity": zeros}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["result"]).write_text(json.dumps(prune(given)), encoding="utf-8")
