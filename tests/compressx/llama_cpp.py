"""llama.cpp by its wheel `xllamacpp`, in one process of its own: the log-probabilities of the tokens that it writes."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROMPT = [10, 20, 30, 40, 50, 60, 11, 12]

_PROGRAM = """
import json, sys, urllib.request
import xllamacpp
for line in sys.stdin:
    path, asked = json.loads(line)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_parallel = path, 128, False, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    try:
        server, found = xllamacpp.Server(params), []
        if isinstance(asked, dict):
            said = server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
            found = [[x["id"], [[y["id"], y["logprob"]] for y in x["top_logprobs"]]] for x in said]
        for text in asked if isinstance(asked, list) else ():
            body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
            to, kind = f"{server.listening_address}/tokenize", {"Content-Type": "application/json"}
            said = urllib.request.urlopen(urllib.request.Request(to, body, kind)).read()
            found.append(json.loads(said)["tokens"])
        del server
    except Exception as error:
        found = str(error)
    print("SAID", json.dumps(found), flush=True)
"""

_running: list[subprocess.Popen[str]] = []


def _asked(path: Path, question: Any) -> Any:
    """Ask the process that runs llama.cpp, which is started for the first question and again if it has died."""
    if not _running or _running[-1].poll() is not None:
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        _running.append(subprocess.Popen([sys.executable, "-c", _PROGRAM], text=True, **options))
        atexit.register(_running[-1].kill)
    process = _running[-1]
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{json.dumps([str(path.resolve()), question])}\n")
    process.stdin.flush()
    said = next((line for line in process.stdout if line.startswith("SAID")), 'SAID "it died"')
    found = json.loads(said.removeprefix("SAID"))
    assert not isinstance(found, str), f"llama.cpp does not load {path}: {found}"
    return found


def log_probabilities(
    path: Path, prompt: list[int], vocabulary: int, count: int = 32, listed: int = 512
) -> tuple[list[int], Tensor]:
    """Let llama.cpp write the likeliest tokens after a prompt of token ids.

    Returns:
        The tokens that it wrote, and [tokens, vocabulary] log-probabilities; NaN of tokens that it does not list.
    """
    asked = {"prompt": prompt, "max_tokens": count, "n_predict": count, "logprobs": min(vocabulary, listed),
             "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}  # fmt: skip
    said = _asked(path, asked)
    probabilities = torch.full((len(said), vocabulary), torch.nan)
    for row, (_, top) in zip(probabilities, said, strict=True):
        for token, value in top:
            row[token] = value
    return [token for token, _ in said], probabilities


def continuation(path: Path, prompt: list[int], count: int, *, ends: bool) -> list[int]:
    """Return the likeliest tokens that llama.cpp writes after a prompt, until it stops if `ends`."""
    asked = {"prompt": prompt, "max_tokens": count, "n_predict": count, "logprobs": 1, "temperature": 0.0,
             "cache_prompt": False, "ignore_eos": not ends}  # fmt: skip
    return [token for token, _ in _asked(path, asked)]


def tokens_of(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens that llama.cpp makes of texts, special ones included where they stand there."""
    found: list[list[int]] = _asked(path, list(texts))
    return found


def agrees(model: Any, path: Path, prompt: Sequence[int] = PROMPT) -> bool:
    """Compare llama.cpp's log-probabilities of 32 tokens with the model's: 1e-2 on average by the model's own.

    llama.cpp rounds activations to float16, which moves the least likely tokens most.
    """
    tokens, found = log_probabilities(path, [*prompt], model.config.vocab_size)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    own = torch.log_softmax(logits.float(), dim=-1)
    listed = ~found.isnan()
    away = (found - own).nan_to_num(0).abs()
    assert len(tokens) == 32
    assert int(listed.sum(dim=1).min()) == min(model.config.vocab_size, 512)
    return float((own.exp() * away).sum(dim=1).max()) < 1e-2 and float(away.max()) < 5e-2
