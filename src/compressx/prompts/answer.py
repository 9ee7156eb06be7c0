"""Let a model answer prompts of which it reads the selected tokens only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressx.models.access import Device, InMemory, device_for
from compressx.models.blockwise import evaluation_mode
from compressx.models.checkpoint import find_checkpoint
from compressx.models.generate import check_ids, check_room, greedy, readable
from compressx.models.loading import load_model, load_skeleton, load_tokenizer
from compressx.plugins.manager import Plugins
from compressx.prompts.scores import check_decoder
from compressx.prompts.selection import ReadySelector, SelectorSettings
from compressx.prompts.templates import prompt_of
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import CalibrationError
from compressx.runtime.timing import forget_peaks, peak_gpu_bytes, peak_resident_bytes


@dataclass(frozen=True, eq=False)
class Answer:
    """What a model wrote after a prompt, and what that took.

    Attributes:
        text: what it wrote.
        prompt_tokens: of the whole prompt.
        kept_tokens: of what it read.
        new_tokens: of what it wrote, with the end token.
        kept_text: what it read, with ` ... ` where tokens are left out.
        seconds: of `select` (running the first blocks on the whole prompt), `prefill` (reading the kept tokens up to
            the first new one) and `generate` (the other new ones).
        peak_memory_bytes: of tensors on GPUs if the model is on one, else of the process, during `select` and during
            `prefill` and `generate` together, as `generate`.
        reason: how the selector chose its blocks and heads.
    """

    text: str
    prompt_tokens: int
    kept_tokens: int
    new_tokens: int
    kept_text: str
    seconds: Mapping[str, float]
    peak_memory_bytes: Mapping[str, int]
    reason: str = ""


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    question: str = "",
    selector: str | None = "retrieval-heads",
    keep: float = 0.125,
    options: Mapping[str, Any] | None = None,
    protect: Mapping[str, int] | None = None,
    max_new_tokens: int = 50,
    plugins: Plugins | None = None,
) -> Answer:
    """Answer a long prompt, reading only its selected tokens; the likeliest token each time.

    Args:
        model: a transformers causal language model with all weights in memory; its training mode is restored.
        tokenizer: its tokenizer. With a chat template, the prompt is given as a user's message.
        prompt: a long text.
        question: asked after it, and kept.
        selector: name of a token selector; None reads the whole prompt.
        keep: tokens of the prompt to read: a number, or a fraction.
        options: the selector's own.
        protect: `first` and `last` tokens of the prompt that are always kept, as in a recipe.
        max_new_tokens: to write at most.
        plugins: what `load_plugins` returned; discovered when absent.

    Raises:
        CompressxError: an error that the user can fix.
    """
    if max_new_tokens < 1:
        raise CalibrationError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    check_decoder(model)
    ids, protected = prompt_of(tokenizer, prompt, question)
    ready = None
    if selector is not None:
        settings = SelectorSettings.from_python(selector, keep, options, protect, plugins)
        ready = settings.prepare(InMemory(model), tokenizer)
    return answer(model, tokenizer, ids, protected, max_new_tokens, ready)


def answer(
    model: Any, tokenizer: Any, ids: Tensor, protected: Tensor, tokens: int, selector: ReadySelector | None
) -> Answer:
    """Answer one prompt by at most so many tokens, 1 or more.

    The prompt's ids are int64 [n]; those that are `protected`, bool [n], are kept in any case. Without a selector the
    model reads all. Its training mode is restored.

    Raises:
        UnsupportedModelError: a model that cannot generate, or whose scores cannot be read.
        CalibrationError: more tokens than the model has positions, or more protected than kept.
        PluginError: an answer of the selector that breaks its contract.
    """
    check_ids(model, ids, tokenizer)
    forget_peaks()
    started = time.perf_counter()
    places = torch.arange(len(ids)) if selector is None else selector.positions(ids, protected)
    peak = peak_gpu_bytes if next(model.parameters()).is_cuda else peak_resident_bytes
    selected, selecting_took = time.perf_counter(), peak()
    forget_peaks()
    kept = ids[places]
    check_room(model, len(kept), tokens, "generate")
    first: list[float] = []

    def clock(_: Tensor, logits: Tensor) -> Tensor:
        if not first:
            first.append(time.perf_counter())
        return logits

    with evaluation_mode(model):
        written = greedy(model, tokenizer, kept[None], tokens, processors=[clock])[0]
    ended = time.perf_counter()
    gaps = (places[1:] != places[:-1] + 1).nonzero()[:, 0] + 1
    return Answer(
        text=readable(tokenizer, written).strip(),
        prompt_tokens=len(ids),
        kept_tokens=len(kept),
        new_tokens=len(written),
        kept_text=" ... ".join(readable(tokenizer, part) for part in torch.tensor_split(kept, gaps.tolist())),
        seconds={"select": selected - started, "prefill": first[0] - selected, "generate": ended - first[0]},
        peak_memory_bytes={"select": selecting_took, "generate": peak()},
        reason="" if selector is None else selector.rows.reason,
    )


def answer_saved(
    source: ModelSource, prompt: str, question: str, tokens: int, *, selecting: SelectorSettings | None,
    device: Device = "auto", progress: Callable[[str], None] = lambda _: None,
) -> Answer:  # fmt: skip
    """Let a saved model, which is loaded completely into memory, answer a prompt and a question, which may be empty.

    Without `selecting` it reads the whole prompt; `progress` is called with what begins, in a few words.
    """
    where = device_for(device)
    checkpoint = find_checkpoint(source)
    skeleton, tokenizer = load_skeleton(checkpoint), load_tokenizer(checkpoint)
    if selecting is not None:
        selecting.check(skeleton, tokenizer)
    ids, protected = prompt_of(tokenizer, prompt, question)
    check_ids(skeleton, ids, tokenizer)
    progress("loading the model")
    model = load_model(checkpoint).to(where)
    ready = None
    if selecting is not None:
        progress("choosing blocks and heads")
        ready = selecting.prepare(InMemory(model), tokenizer)
    progress("answering")
    return answer(model, tokenizer, ids, protected, tokens, ready)
