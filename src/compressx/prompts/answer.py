"""Let a model answer prompts of which it reads the selected tokens only."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from compressx.prompts.frame import frame, frame_of_chat, text_ids
from compressx.prompts.scores import check_decoder
from compressx.prompts.selection import Selecting, Selection
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
    prompt: str | Sequence[Mapping[str, str]],
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
        tokenizer: its tokenizer. With a chat template, a text is given as a user's message.
        prompt: a long text, or chat messages. In a chat, tokens are selected from the longest message; the template and
            all other messages are kept.
        question: asked after a text, and kept; not with messages.
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
    ids, protected = framed(tokenizer, prompt, question)
    selection = None
    if selector is not None:
        selecting = Selecting.from_python(selector, keep, options, protect, plugins)
        selection = selecting.prepare(InMemory(model), tokenizer)
    return answer(model, tokenizer, ids, protected, max_new_tokens, selection)


def framed(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], question: str = "") -> tuple[Tensor, Tensor]:
    """Return the ids of a prompt, int64 [n], and which are no part of its long text, bool [n].

    Raises:
        CalibrationError: no text, a question beside messages, or messages that the chat template refuses.
    """
    if isinstance(prompt, str):
        text, (before, after) = prompt, frame(tokenizer, question)
    elif question:
        raise CalibrationError("question goes with a text; in messages, ask it in the last one")
    else:
        before, text, after = frame_of_chat(tokenizer, prompt)
    ids = text_ids(tokenizer, text)
    if not len(ids):
        raise CalibrationError("the prompt is empty; expected a text")
    protected = torch.ones(len(before) + len(ids) + len(after), dtype=torch.bool)
    protected[len(before) : len(before) + len(ids)] = False
    return torch.cat([before, ids, after]), protected


def answer(
    model: Any, tokenizer: Any, ids: Tensor, protected: Tensor, tokens: int, selection: Selection | None
) -> Answer:
    """Answer one prompt by at most so many tokens, 1 or more.

    The prompt's ids are int64 [n]; those that are `protected`, bool [n], are kept in any case. Without a selection the
    model reads all. Its training mode is restored.

    Raises:
        UnsupportedModelError: a model that cannot generate, or whose scores cannot be read.
        CalibrationError: more tokens than the model has positions, or more protected than kept.
        PluginError: an answer of the selector that breaks its contract.
    """
    check_ids(model, ids, tokenizer)
    forget_peaks()
    started = time.perf_counter()
    places = torch.arange(len(ids)) if selection is None else selection.places(ids, protected)
    selected, memory = time.perf_counter(), {"select": _peak(model)}
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
    return Answer(
        text=readable(tokenizer, written).strip(),
        prompt_tokens=len(ids),
        kept_tokens=len(kept),
        new_tokens=len(written),
        kept_text=_kept_text(tokenizer, kept, places),
        seconds={"select": selected - started, "prefill": first[0] - selected, "generate": ended - first[0]},
        peak_memory_bytes={**memory, "generate": _peak(model)},
        reason="" if selection is None else selection.wanted.reason,
    )


def _peak(model: Any) -> int:
    return peak_gpu_bytes() if next(model.parameters()).is_cuda else peak_resident_bytes()


def _kept_text(tokenizer: Any, kept: Tensor, places: Tensor) -> str:
    gaps = (places[1:] != places[:-1] + 1).nonzero()[:, 0] + 1
    parts = torch.tensor_split(kept, gaps.tolist())
    return " ... ".join(readable(tokenizer, part) for part in parts)


def answer_saved(
    source: ModelSource, prompt: str, question: str, tokens: int, *, selecting: Selecting | None,
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
    ids, protected = framed(tokenizer, prompt, question)
    check_ids(skeleton, ids, tokenizer)
    progress("loading the model")
    model = load_model(checkpoint).to(where)
    selection = None
    if selecting is not None:
        progress("choosing blocks and heads")
        selection = selecting.prepare(InMemory(model), tokenizer)
    progress("answering")
    return answer(model, tokenizer, ids, protected, tokens, selection)
