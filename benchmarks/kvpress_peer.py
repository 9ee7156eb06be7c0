"""Answer prompts with kvpress, in a Python environment that has it and need not have compressx.

    python -m venv kvp && kvp/bin/pip install kvpress==0.5.5
    kvp/bin/python benchmarks/kvpress_peer.py TASK.json

TASK.json has `model` (folder), `dtype`, `press` (a class of kvpress), `keep` (fraction), `tokens` (to write), `prompts`
(JSON file of token ids) and `result` (JSON file to write). The press is active while a prompt is read with its
question, so that its window of last tokens is the question.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from llm_compressor import peak, trimmed


def answers(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the model writes after each prompt, seconds to the first token, and peak memory above the model's."""
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=getattr(torch, task["dtype"])).eval()
    press = getattr(kvpress, task["press"])(compression_ratio=1 - task["keep"])
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}
    found = []
    for number, ids in enumerate(json.loads(Path(task["prompts"]).read_text(encoding="utf-8"))):
        base, started = trimmed(), time.perf_counter()
        cache = DynamicCache()
        written: list[int] = []
        with torch.no_grad():
            with press(model):
                # Without `logits_to_keep` the head would run on the whole prompt.
                logits = model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
            first, memory = time.perf_counter() - started, peak() - base
            while (token := int(logits[0, -1].argmax())) not in ends and len(written) < task["tokens"]:
                written.append(token)
                place = torch.tensor([[len(ids) + len(written) - 1]])
                logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=place).logits
        kept = cache.get_seq_length()
        found.append({"written": written, "seconds": first, "memory": memory, "cached": kept})
        print(f"{task['press']}: {number + 1}", flush=True)
    return found


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(given["result"]).write_text(json.dumps(answers(given)), encoding="utf-8")
