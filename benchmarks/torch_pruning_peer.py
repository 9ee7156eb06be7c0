"""Drop feed-forward neurons with torch-pruning, in a Python environment that has it and need not have compressx.

    python -m venv tp && tp/bin/pip install torch==2.13.0 transformers==5.23.0 torch-pruning==1.6.1
    tp/bin/python benchmarks/torch_pruning_peer.py TASK.json

TASK.json has `model` (folder), `importance` (magnitude, taylor or activation), `sparsity` (of the neurons of each
block), `windows` (JSON file of token ids), `output` (folder) and `result` (JSON file to write). `smaller_peer.py`
writes it.

The pruner is that of its example `examples/LLMs/prune_llm.py`, and so is magnitude; activation stands there as the
alternative. Taylor is its `GroupTaylorImportance`, with the gradient of the mean loss of all windows. The example
prunes the residual stream and heads, too; here all linears but gate and up projection are `ignored_layers`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def importance(name: str, model: Any, windows: Any) -> Any:
    """Return an importance of torch-pruning, with what it reads of the calibration windows, int64 [windows, tokens]."""
    import torch
    import torch_pruning

    if name == "magnitude":
        return torch_pruning.importance.GroupMagnitudeImportance(p=2, group_reduction="mean")
    if name == "taylor":
        for number, window in enumerate(windows):
            (model(window[None], labels=window[None], use_cache=False).loss / len(windows)).backward()
            print(f"taylor: {number + 1} of {len(windows)}", flush=True)
        return torch_pruning.importance.GroupTaylorImportance()
    measured = torch_pruning.importance.ActivationImportance(p=2, target_types=[torch.nn.Linear])
    with torch.no_grad(), measured.compute_importance(model):
        model.model(windows, use_cache=False)  # at once: a second pass would replace what the first has measured
    return measured


def prune(task: dict[str, Any]) -> dict[str, float]:
    """Drop the same number of neurons in every block, and save."""
    import torch
    import torch_pruning
    from transformers import AutoModelForCausalLM, AutoTokenizer

    windows = torch.tensor(json.loads(Path(task["windows"]).read_text(encoding="utf-8")))
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32).eval()
    model.config.use_cache = False  # torch-pruning cannot trace a cache among the outputs
    total, inner = model.num_parameters(), model.config.intermediate_size
    dropped = round(task["sparsity"] * inner)
    started = time.perf_counter()
    by = importance(task["importance"], model, windows)
    taken = {x for layer in model.model.layers for x in (layer.mlp.gate_proj, layer.mlp.up_proj)}
    pruner = torch_pruning.pruner.MetaPruner(
        model, example_inputs=windows[:1, :4], importance=by, global_pruning=False,
        pruning_ratio=(dropped - 0.5) / inner,  # of which it drops the next whole number
        ignored_layers=[m for m in model.modules() if isinstance(m, torch.nn.Linear) and m not in taken],
    )  # fmt: skip
    for group in pruner.step(interactive=True):
        group.prune()
    seconds = time.perf_counter() - started
    widths = {layer.mlp.down_proj.in_features for layer in model.model.layers}
    if widths != {inner - dropped}:
        sys.exit(f"torch-pruning left {sorted(widths)} neurons in a block, not {inner - dropped} in each")
    model.config.intermediate_size, model.config.use_cache = inner - dropped, True
    model.save_pretrained(task["output"])
    AutoTokenizer.from_pretrained(task["model"]).save_pretrained(task["output"])
    return {"prune": seconds, "parameters": model.num_parameters(), "gone": total - model.num_parameters()}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["result"]).write_text(json.dumps(prune(given)), encoding="utf-8")
