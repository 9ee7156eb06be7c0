"""Time models in turn: reading a prompt (prefill), and writing after it (decode).

Transformers models run in torch, GGUF files in llama.cpp. All are in memory at once.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from compressx.models.access import Device, device_for
from compressx.models.architecture import text_config
from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.generate import check_room
from compressx.models.loading import load_model, load_skeleton
from compressx.recipe.sources import ModelSource
from compressx.report.section import Column, Section, Spread, table
from compressx.runtime.errors import RecipeError, UnsupportedModelError, one_line
from compressx.runtime.machine import machine
from compressx.runtime.timing import synchronize


@dataclass(frozen=True)
class Speeds:
    """What was measured.

    Attributes:
        machine: what the models ran on, in words.
        tokens: of one sequence in each stage. The first new token belongs to `prefill`.
        names: of the models, in the order given.
        seconds: of each model by stage, one value for each round.
    """

    machine: str
    tokens: dict[str, int]
    names: list[str]
    seconds: list[dict[str, list[float]]]

    def rate(self, model: int, stage: str) -> Spread:
        """Return tokens per second."""
        return Spread.of([self.tokens[stage] / s for s in self.seconds[model][stage]])

    def ratio(self, model: int, stage: str) -> Spread:
        """Return how many times as fast as the first model it was, each round compared with its own."""
        return Spread.of([a / b for a, b in zip(self.seconds[0][stage], self.seconds[model][stage], strict=True)])

    def sections(self) -> Iterator[Section]:
        """Yield a table with a row for each model, and which of its ratios say nothing."""
        several = len(self.names) > 1
        rows, doubtful = [], []
        for i, name in enumerate(self.names):
            rows.append([name])
            for stage in self.tokens:
                rate, ratio = self.rate(i, stage), self.ratio(i, stage)
                rows[-1] += [f"{rate:,.0f}" if rate.median >= 100 else f"{rate:.1f}", f"{ratio:.2f}" if several else ""]
                doubtful += [f"{name}, {stage}"] if ratio.least < 1 < ratio.most else []
        columns = [c for s in self.tokens for c in (Column(f"{s}, tokens/s", "s"), Column("x", "s"))]
        note = (
            f"{self.machine}. Prefill of {self.tokens['prefill']} tokens, decode of {self.tokens['decode']} after the "
            f"first. Medians of {len(self.seconds[0]['prefill'])} rounds (least to most), the models in turn, after "
            "a round that does not count."
        )
        if several:
            note += f" x: times as fast as {self.names[0]}, the median of the ratios within a round."
        if doubtful:
            note += (
                f" Of {'; '.join(doubtful)} the rounds do not agree on which model is faster, so x says nothing; "
                "repeat it on an idle machine, with more --rounds."
            )
        yield Section("Speed", note, table(["model", *columns], rows))


def time_in_turn(
    sources: Sequence[ModelSource], prompt: int, new: int, rounds: int, *, device: Device = "auto",
    threads: int | None = None, progress: Callable[[str], None] = lambda _: None,
) -> Speeds:  # fmt: skip
    """Time models in turn, in every round one after the other, so that what slows the machine slows all of them.

    Args:
        sources: the first is the one that the others are compared with.
        prompt: tokens of the prompt, random ones.
        new: tokens written after it, at least 2; an end of text does not stop them.
        rounds: that count; one before them, which loads kernels and fills caches, does not.
        device: where torch runs; llama.cpp runs on the CPU.
        threads: on the CPU; None: torch's own choice, and the number of cores for llama.cpp.
        progress: called with what is under way.
    """
    where = device_for(device)
    if threads is not None:
        torch.set_num_threads(threads)
    names = [str(source.path or source.id or source.package) for source in sources]
    checkpoints, ids = [find_checkpoint(source) for source in sources], []
    for name, checkpoint in zip(names, checkpoints, strict=True):
        skeleton = load_skeleton(checkpoint)
        check_room(skeleton, prompt, new, f"{name}: --prompt-tokens {prompt}, --new-tokens {new}")
        vocabulary = int(text_config(skeleton).vocab_size)
        ids.append(torch.randint(vocabulary, (1, prompt), generator=torch.Generator().manual_seed(0)))
    timers: list[Callable[[], tuple[dict[str, float], Any]]] = []  # each returns the seconds of its stages first
    for name, checkpoint, tokens in zip(names, checkpoints, ids, strict=True):
        progress(f"loading {name}")
        if checkpoint.file is None:
            timers.append(partial(timed, load_model(checkpoint).to(where), tokens.to(where), new))
        else:
            timers.append(_in_llama_cpp(name, checkpoint, tokens, new, threads))
    seconds: list[dict[str, list[float]]] = [{"prefill": [], "decode": []} for _ in timers]
    for turn in range(1 + rounds):
        for name, timer, measured in zip(names, timers, seconds, strict=True):
            progress(f"round {turn} of {rounds}: {name}")
            for stage, took in timer()[0].items():
                measured[stage] += [took] if turn else []
    return Speeds(machine(where), {"prefill": prompt, "decode": new - 1}, names, seconds)


@torch.no_grad()
def timed(
    model: Any, ids: Tensor, new: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[str, float], Tensor]:
    """Write tokens greedily after prompts, with a key/value cache, never stopping early.

    Args:
        model: a transformers causal language model in evaluation mode.
        ids: the prompts, int64 [batch, prompt], on the model's device.
        new: tokens to write, at least 1.
        clock: seconds.

    Returns:
        Seconds of `prefill`, up to the first new token, and of `decode`, the other `new - 1`; and the new tokens, int64
        [batch, new].
    """
    # As `generate`, compute only the last token's logits where the model can.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    synchronize(ids.device)
    started = clock()
    step = model(ids, use_cache=True, **last)
    written = [step.logits[:, -1].argmax(dim=-1, keepdim=True)]  # [batch, 1]
    synchronize(ids.device)
    read = clock()
    if getattr(step, "past_key_values", None) is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives no key/value cache, so its decoding cannot be timed; its forward has to "
            "take and return past_key_values"
        )
    for _ in range(new - 1):
        step = model(written[-1], past_key_values=step.past_key_values, use_cache=True, **last)
        written.append(step.logits[:, -1].argmax(dim=-1, keepdim=True))
    synchronize(ids.device)
    return {"prefill": read - started, "decode": clock() - read}, torch.cat(written, dim=1)


def _in_llama_cpp(
    name: str, checkpoint: Checkpoint, ids: Tensor, new: int, threads: int | None
) -> Callable[[], tuple[dict[str, float], Any]]:
    """Load a GGUF file in llama.cpp, which itself says how long it read and wrote."""
    try:
        import xllamacpp
    except ImportError as error:
        raise RecipeError(
            f"{name} is run by llama.cpp, of the package xllamacpp: pip install 'compressx[llama-cpp]'"
        ) from error
    prompt, params = ids[0].tolist(), xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(checkpoint.file), len(prompt) + new
    params.n_gpu_layers, params.verbosity, params.cache_ram_mib = 0, -1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads or psutil.cpu_count(logical=False) or 1
    try:
        server = xllamacpp.Server(params)
    except Exception as error:  # its one class for all
        raise UnsupportedModelError(
            f"{name}: llama.cpp cannot load it: {one_line(str(error))}; try a newer xllamacpp"
        ) from error
    greedy = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "cache_prompt": False}

    def timer() -> tuple[dict[str, float], Any]:
        took = server.handle_completions({"prompt": prompt, "n_predict": new, **greedy})["timings"]
        if (took["prompt_n"], took["predicted_n"]) != (len(prompt), new):
            raise UnsupportedModelError(
                f"{name}: llama.cpp read {took['prompt_n']} and wrote {took['predicted_n']} tokens, not {len(prompt)} "
                f"and {new}"
            )
        return {"prefill": took["prompt_ms"] / 1e3, "decode": took["predicted_ms"] / 1e3}, None

    return timer
