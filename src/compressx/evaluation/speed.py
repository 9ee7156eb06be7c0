"""Time one model, prefill and decode, in a process of its own.

`python -m compressx.evaluation.speed` reads a task and then requests, one JSON object a line, from standard input, and
answers each on standard output: how `bench` lets several models take turns, each with memory of its own.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

import psutil
import torch
from torch import Tensor, nn

from compressx.models import gguf_header
from compressx.models.access import device_for
from compressx.models.architecture import linears_of, text_config
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import load_model, load_skeleton
from compressx.report.speeds import Length, Stage
from compressx.runtime.errors import CompressxError, UnsupportedModelError, memory_named, one_line
from compressx.runtime.machine import machine
from compressx.runtime.quiet import quiet_libraries
from compressx.runtime.timing import forget_peaks, peak_resident_bytes, synchronize

Engine: TypeAlias = Literal["torch", "llama.cpp"]


@dataclass(frozen=True)
class Task:
    """One model, and what all models are timed with.

    Attributes:
        name: of the model, for messages.
        checkpoint: of the model.
        device: as torch names it.
        threads: of torch on the CPU; None: its own choice.
        batch, below: prompts are random token ids from 0 to `below`, [batch, tokens].
        engine: what runs the model.
        room: the most tokens of one sequence, of the prompt and written.
    """

    name: str
    checkpoint: Checkpoint
    device: str
    threads: int | None
    batch: int
    below: int
    engine: Engine = "torch"
    room: int = 0


@torch.no_grad()
def timed(
    model: Any, ids: Tensor, new: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[Stage, float], Tensor]:
    """Write tokens greedily after prompts, with a key/value cache, never stopping early.

    As `generate`, prefill computes the logits of the last token only where the model can.

    Args:
        model: a transformers causal language model in evaluation mode.
        ids: the prompts, int64 [batch, prompt], on the model's device.
        new: tokens to write, at least 1.
        clock: seconds.

    Returns:
        Seconds of `prefill`, up to the first new token, and of `decode`, the other `new - 1`; and the new tokens, int64
        [batch, new].

    Raises:
        UnsupportedModelError: the model gives no key/value cache.
    """
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    synchronize(ids.device)
    started = clock()
    step = model(ids, use_cache=True, **last)
    written = [step.logits[:, -1].argmax(dim=-1, keepdim=True)]
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


def prompts(task: Task, tokens: int) -> Tensor:
    """Return the prompts of a task, int64 [batch, tokens]: the same for every model."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(task.below, (task.batch, tokens), generator=generator).to(task.device)


def answers(task: Task, requests: Iterable[Mapping[str, int]]) -> Iterator[dict[str, Any]]:
    """Load the model of a task and say what it is; then time it for each request, a `prompt` and `new`.

    Raises:
        CompressxError: an error that the user can fix, memory that ran out included.
    """
    if task.engine == "llama.cpp":
        yield from _in_llama_cpp(task, requests)
        return
    device = device_for(task.device)
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    load_skeleton(task.checkpoint)  # imports what the model needs, so that `before` has the libraries
    before = 0 if device.type == "cuda" else psutil.Process().memory_info().rss
    forget_peaks()
    with memory_named(f"{task.name}: its weights"):
        model = load_model(task.checkpoint).to(device)
    yield {
        "machine": machine(device),
        **sizes(model),
        "memory_bytes": {"before": before, "load": _peak(device)},
    }
    forget_peaks()
    for request in requests:
        length = Length(**request)
        with memory_named(f"{task.name}: {length} tokens, batch {task.batch}"), quiet_libraries():
            seconds, _ = timed(model, prompts(task, length.prompt), length.new)
        yield {"seconds": seconds, "peak_bytes": _peak(device)}


def _in_llama_cpp(task: Task, requests: Iterable[Mapping[str, int]]) -> Iterator[dict[str, Any]]:
    """Answer as `answers` does; llama.cpp itself says how long it read and wrote."""
    import xllamacpp

    engine, params = f"llama.cpp by xllamacpp {xllamacpp.__version__}", xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(task.checkpoint.file), task.room
    params.n_gpu_layers, params.verbosity, params.cache_ram_mib = 0, -1, 0
    threads = task.threads or psutil.cpu_count(logical=False) or 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    torch.set_num_threads(threads)  # for what `machine` says
    before, stored = psutil.Process().memory_info().rss, sizes_of_gguf(task.checkpoint.file)
    forget_peaks()
    try:
        server = xllamacpp.Server(params)
    except Exception as error:  # its one class for all
        raise UnsupportedModelError(
            f"{task.name}: {engine} cannot load it: {one_line(str(error))}; try a newer xllamacpp"
        ) from error
    device = torch.device("cpu")
    loaded = {"before": before, "load": _peak(device)}
    yield {"machine": f"{machine(device)}, {engine}", **stored, "memory_bytes": loaded}
    forget_peaks()
    greedy = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "cache_prompt": False}
    for request in requests:
        length = Length(**request)
        (ids,) = prompts(task, length.prompt).tolist()
        took = server.handle_completions({"prompt": ids, "n_predict": length.new, **greedy})["timings"]
        if (took["prompt_n"], took["predicted_n"]) != (length.prompt, length.new):
            raise UnsupportedModelError(
                f"{task.name}: llama.cpp read {took['prompt_n']} and wrote {took['predicted_n']} tokens, not {length}"
            )
        seconds = {"prefill": took["prompt_ms"] / 1e3, "decode": took["predicted_ms"] / 1e3}
        yield {"seconds": seconds, "peak_bytes": _peak(device)}


def sizes_of_gguf(file: Path) -> dict[str, Any]:
    """Return what `sizes` does, of a GGUF file; its dtype is the type of most of its tensors."""
    from gguf import LlamaFileType

    values, tensors = gguf_header.values_of(file), gguf_header.stored_arrays(file)
    weights = sum(x.nbytes for x in tensors.values())
    chosen = any("_exps." in name for name in tensors)  # as in `sizes`
    looked_up = tensors["token_embd.weight"].nbytes if "output.weight" in tensors else 0
    types: dict[Any, str] = {int(x): x.name.removeprefix("MOSTLY_") for x in LlamaFileType}
    return {
        "dtype": types.get(values.get("general.file_type"), "GUESSED"),
        "parameters": sum(map(math.prod, gguf_header.shapes_of(file).values())),
        "weight_bytes": weights,
        "read_bytes": None if chosen else weights - looked_up,
    }


def sizes(model: nn.Module) -> dict[str, Any]:
    """Return the `parameters` of a model, their `dtype`, `weight_bytes` and `read_bytes`, as `Measured` has them.

    Decoding a token reads every weight but the input embedding, of which it reads one row; a tied one is read as head.
    """
    bytes_of = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    heads = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    embeddings = [
        f"{name}.weight"
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding) and not any(m.weight is head for head in heads)
    ]
    linears = (x for name, m in model.named_modules() for x in linears_of(name, m))
    chosen = any(x.expert is not None for x in linears)  # which experts are read, the router says
    return {
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes": sum(bytes_of.values()),
        "read_bytes": None if chosen else sum(bytes_of.values()) - sum(bytes_of.get(name, 0) for name in embeddings),
    }


def vocabulary(model: Any) -> int:
    """Return the number of token ids of a model."""
    return int(text_config(model).vocab_size)


def _peak(device: torch.device) -> int:
    """Return the peak memory since `forget_peaks`: the device's of a GPU, the process's on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def task_of(line: str) -> Task:
    """Read a task that `json.dumps(dataclasses.asdict(task))` wrote."""
    given = json.loads(line)
    return Task(**{**given, "checkpoint": Checkpoint(**given["checkpoint"])})


def serve(requests: TextIO, told: TextIO) -> None:
    """Read a task and then requests, and write the answer to each; a `CompressxError` is the last answer."""

    def tell(answer: Mapping[str, Any]) -> None:
        told.write(json.dumps(answer) + "\n")
        told.flush()

    try:
        for answer in answers(task_of(requests.readline()), map(json.loads, requests)):
            tell(answer)
    except CompressxError as error:
        tell({"error": type(error).__name__, "message": str(error)})


def main() -> None:
    """Serve on standard input and output; what libraries print goes to standard error."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as told:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin, told)


if __name__ == "__main__":
    main()
