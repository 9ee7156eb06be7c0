"""Time models in turn, each in a process of its own, and compare them with the first."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from compressx.evaluation.speed import Engine, Task, vocabulary
from compressx.models import gguf_header
from compressx.models.access import Device, device_for
from compressx.models.architecture import text_config
from compressx.models.checkpoint import Checkpoint, find_checkpoint, find_local, local_folder
from compressx.models.generate import check_positions, check_room
from compressx.models.loading import load_skeleton
from compressx.models.packed_folder import is_packed, sizes_of
from compressx.models.shards import files_of
from compressx.recipe.sources import ModelSource
from compressx.report.speeds import STAGES, Bench, Length, ModelSpeed, Stage
from compressx.runtime import errors
from compressx.runtime.errors import CompressxError, OutOfMemoryError, RecipeError, UnsupportedModelError
from compressx.runtime.machine import rates

_log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[str], None]
"""Called with what is under way."""


class Worker(Protocol):
    """What has loaded a model and times it when asked."""

    def answer(self) -> dict[str, Any]:
        """Return the next answer of `compressx.evaluation.speed`."""

    def ask(self, request: Mapping[str, int]) -> None:
        """Ask for a timing."""


Start: TypeAlias = Callable[[Task], AbstractContextManager[Worker]]


@dataclass(frozen=True)
class BenchSettings:
    """What is measured of every model.

    Attributes:
        lengths: of prompts and of what is written after them.
        fit: shorten the prompts to what the positions of all models leave.
        engine: what runs the models; llama.cpp takes GGUF files, and one sequence at a time.
        batch: sequences at a time.
        rounds: that count, at least 1; one before them does not.
        device: where the models run.
        threads: of torch on the CPU; None: its own choice.
    """

    lengths: tuple[Length, ...]
    batch: int = 1
    rounds: int = 5
    device: Device = "auto"
    threads: int | None = None
    fit: bool = False
    engine: Engine = "torch"

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            RecipeError: a number that is too small. The message names the command's option.
        """
        least = {"--prompt-tokens": (min((x.prompt for x in self.lengths), default=0), 1), "--batch": (self.batch, 1),
                 "--new-tokens": (min((x.new for x in self.lengths), default=0), 2), "--rounds": (self.rounds, 1),
                 "--threads": (1 if self.threads is None else self.threads, 1)}  # fmt: skip
        for option, (value, minimum) in least.items():
            if value < minimum:
                why = "; the first new token belongs to prefill" if option == "--new-tokens" else ""
                raise RecipeError(f"{option} {value}: expected at least {minimum}{why}")
        if self.engine == "torch":
            return
        if self.batch > 1 or self.device not in {"auto", "cpu"}:
            raise RecipeError(
                "--engine llama.cpp times one sequence at a time on the CPU; leave out --batch and --device"
            )
        if importlib.util.find_spec("xllamacpp") is None:
            raise RecipeError(
                "llama.cpp is run by the package xllamacpp; install it by pip install 'compressx[llama-cpp]'"
            )


class Process:
    """A process that times one model: `python -m compressx.evaluation.speed`."""

    def __init__(self, task: Task) -> None:
        self._name = task.name
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "compressx.evaluation.speed"],  # -P: do not import from the working directory
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the process that waits, which ends this one
        )  # fmt: skip
        self._say(dataclasses.asdict(task))

    def ask(self, request: Mapping[str, int]) -> None:
        """Ask for a timing."""
        self._say(request)

    def answer(self) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            CompressxError: of the class that it was there; or the process was ended by a signal.
            RuntimeError: a bug, whose traceback the process has printed.
        """
        assert self.process.stdout is not None  # noqa: S101 - a pipe
        line = self.process.stdout.readline()
        if not line:
            raise _death(self._name, self.process.wait())
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise getattr(errors, found["error"])(found["message"])
        return found

    def _say(self, what: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None  # noqa: S101 - a pipe
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError:  # it has ended: `answer` says why
            return


def _death(name: str, status: int) -> Exception:
    """Return the error of a process that ended without an answer."""
    ended_by = signal.Signals(-status).name if status < 0 else ""
    if ended_by == "SIGKILL":
        return OutOfMemoryError(
            f"{name}: its process was killed (SIGKILL), as Linux does when memory runs out; give a smaller --batch or "
            "--prompt-tokens, or fewer models at a time, since all are in memory"
        )
    if ended_by:
        return CompressxError(
            f"{name}: its process was ended by {ended_by} while it was loaded or timed; time it "
            "alone to see whether it is this model, or its device"
        )
    return RuntimeError(f"{name}: its process ended with exit status {status} and no answer; its message is above")


@contextmanager
def process(task: Task) -> Iterator[Process]:
    """Start a process, and end it when the block ends."""
    started = Process(task)
    try:
        yield started
    finally:
        started.process.kill()  # it holds nothing but memory
        with suppress(BrokenPipeError), started.process:  # closes the pipes and waits
            pass


def bench(
    sources: Sequence[ModelSource], asked: BenchSettings, *, start: Start = process, progress: Progress = lambda _: None
) -> Bench:
    """Time models in turn: in every round and for every length one model after the other.

    So what slows the machine for a while slows all of them. All are in memory at once.

    Raises:
        CompressxError: an error that the user can fix.
    """
    asked.check()
    device = device_for("cpu" if asked.engine == "llama.cpp" else asked.device)
    names = _names(sources)
    checkpoints = [find_checkpoint(source) for source in sources]
    limits = [_limits(name, checkpoint, asked.engine) for name, checkpoint in zip(names, checkpoints, strict=True)]
    asked, below = _fitted(asked, names, [x[0] for x in limits]), [x[1] for x in limits]
    room = max(x.prompt + x.new for x in asked.lengths)
    tasks = [
        Task(name, checkpoint, str(device), asked.threads, asked.batch, min(below), asked.engine, room)
        for name, checkpoint in zip(names, checkpoints, strict=True)
    ]
    with ExitStack() as stack:
        workers = [stack.enter_context(start(task)) for task in tasks]
        progress(f"loading {', '.join(names)}")
        loaded = [worker.answer() for worker in workers]
        seconds = _rounds(workers, names, asked, loaded, progress)
    models = [
        ModelSpeed(name=name, seconds=measured, file_bytes=file_bytes(source, checkpoint), **found)
        for name, measured, found, source, checkpoint in zip(names, seconds, loaded, sources, checkpoints, strict=True)
    ]
    return Bench(tuple(models), asked.batch, min(below), rates(device).copy)


def _limits(name: str, checkpoint: Checkpoint, engine: Engine) -> tuple[int | None, int]:
    """Return the number of a model's positions, None if it is not limited, and of its token ids.

    Raises:
        UnsupportedModelError: no causal language model, or for llama.cpp no GGUF file.
    """
    if engine == "torch":
        skeleton = load_skeleton(checkpoint)
        check_room(skeleton, 0, 0, name)
        return getattr(text_config(skeleton), "max_position_embeddings", None), vocabulary(skeleton)
    if checkpoint.gguf_file is None:
        raise UnsupportedModelError(
            f"{name}: --engine llama.cpp reads GGUF files; write one by compressx export {name} --format gguf"
        )
    values = gguf_header.values_of(checkpoint.file)
    gguf_header.close(checkpoint.file)
    tokens = str(values.get("tokenizer.ggml.tokens", "0")).split()[0]
    return values.get(f"{values['general.architecture']}.context_length"), int(tokens)


def _fitted(asked: BenchSettings, names: Sequence[str], limits: Sequence[int | None]) -> BenchSettings:
    """Shorten prompts that may be shortened to what the models have positions for, and refuse what is too long."""
    for name, positions in zip(names, limits, strict=True):
        if asked.fit and positions is not None and any(x.prompt + x.new > positions for x in asked.lengths):
            shorter = tuple(Length(min(x.prompt, max(1, positions - x.new)), x.new) for x in asked.lengths)
            _log.warning("timing %s tokens: %s has %d positions", ", ".join(map(str, shorter)), name, positions)
            asked = dataclasses.replace(asked, lengths=shorter)
        for x in asked.lengths:
            check_positions(positions, x.prompt, x.new, f"{name}: --prompt-tokens {x.prompt}, --new-tokens {x.new}")
    return asked


def _rounds(
    workers: Sequence[Worker],
    names: Sequence[str],
    asked: BenchSettings,
    loaded: Sequence[dict[str, Any]],
    progress: Progress,
) -> list[dict[Length, dict[Stage, list[float]]]]:
    """Return the seconds of every model, by length and stage; the peaks of memory are added to what was `loaded`."""
    seconds: list[dict[Length, dict[Stage, list[float]]]] = [
        {length: {stage: [] for stage in STAGES} for length in asked.lengths} for _ in workers
    ]
    for turn in range(1 + asked.rounds):
        for length in asked.lengths:
            for i, worker in enumerate(workers):
                progress(f"round {turn} of {asked.rounds}: {names[i]}, {length} tokens")
                worker.ask(dataclasses.asdict(length))
                found = worker.answer()
                loaded[i]["memory_bytes"]["run"] = found["peak_bytes"]
                for stage in STAGES if turn else ():  # the first round loads kernels and fills caches
                    seconds[i][length][stage].append(found["seconds"][stage])
    return seconds


def file_bytes(source: ModelSource, checkpoint: Checkpoint) -> int:
    """Return the size of a model's weights on disk: the safetensors that are loaded, packed ones, or its GGUF file."""
    if source.path is not None:
        place = find_local(source.path)  # not what a packed folder was unpacked to
    elif checkpoint.gguf_file is not None:
        place = Path(checkpoint.location, checkpoint.gguf_file)
    else:
        place = local_folder(checkpoint)
    if place.is_file():
        return place.stat().st_size
    if is_packed(place):
        return sizes_of(place).packed_bytes
    # Others may lie beside them: `consolidated.safetensors` of Mistral holds the same weights in another format.
    return sum((place / name).stat().st_size for name in {*files_of(place).values()})


def _names(sources: Sequence[ModelSource]) -> list[str]:
    """Name models as they were given; the second of the same name becomes `NAME (2)`."""
    seen: Counter[str] = Counter()
    named = []
    for source in sources:
        name = str(source.path or source.id or source.package)
        seen[name] += 1
        named.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return named
