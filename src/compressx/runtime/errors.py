"""The errors that compressx raises for its users.

The command line prints a `CompressxError` as one message and exits with 2; any other exception is a bug and shows its
traceback. Each message says what was wrong, where, what was expected and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import inspect
import re
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


ANOTHER_ENDED = "another process of this run has ended; see its own message for the reason"
"""The message of a process whose part in the run is over by no fault of its own."""


class CompressxError(Exception):
    """An error that the user can fix; shown as a message without a traceback."""


class RecipeError(CompressxError):
    """The recipe is wrong. The message begins with `file:line:column`."""


class PluginError(CompressxError):
    """A plugin cannot be loaded, or broke the contract of `compressx.Pruner`. The message names the plugin.

    Attributes:
        frames: the plugin's own that led to an exception, the innermost last.
    """

    frames: Sequence[traceback.FrameSummary] = ()


class UnsupportedModelError(CompressxError):
    """The model cannot be pruned this way. The message says why and what to use instead."""


class CalibrationError(CompressxError):
    """Calibration or evaluation text is missing, too short, or gives statistics that cannot be used."""


class ArtifactError(CompressxError):
    """A file cannot be read, verified or written. The message names the file."""


class OutOfMemoryError(CompressxError):
    """Something did not fit in memory. The message says what, how large it was, and on which device."""


class Mistakes:
    """Errors that do not depend on each other, collected to be raised together."""

    def __init__(self) -> None:
        self._found: list[CompressxError] = []

    def __len__(self) -> int:
        """Return their number."""
        return len(self._found)

    def add(self, *errors: CompressxError) -> None:
        """Keep errors."""
        self._found.extend(errors)

    @contextlib.contextmanager
    def collected(self, last: type[CompressxError] | tuple[()] = ()) -> Iterator[None]:
        """Keep a `CompressxError`, and go on without the result; one of class `last` is raised, with those before."""
        try:
            yield
        except CompressxError as error:
            self.add(error)
            if isinstance(error, last):
                self.raise_all()

    def raise_all(self) -> None:
        """Raise what was collected, if anything: several errors as one, with the lines of all.

        Raises:
            CompressxError: of the class of the errors, if they have the same.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            (kind, *others) = {type(error) for error in self._found}
            raise (CompressxError if others else kind)("\n".join(dict.fromkeys(map(str, self._found))))


def did_you_mean(value: str, valid: Iterable[str]) -> str:
    """Return a clause such as `did you mean 'wanda'? valid: alps, wanda`, of twelve names; empty without any."""
    names = sorted(set(valid))
    shown = one_line(", ".join(names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return f"{suggestion(value, names)}valid: {shown}" if names else ""


def suggestion(value: str, valid: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Suggest the nearest valid name, as in `did you mean 'wanda'? `; return the empty string when none is close.

    Case is ignored; `cutoff` is the minimum similarity, from 0 to 1.
    """
    names = {name.casefold(): name for name in valid}
    close = difflib.get_close_matches(value.casefold(), names, n=1, cutoff=cutoff)
    return f"did you mean {names[close[0]]!r}? " if close else ""


def printable(text: str) -> str:
    """Escape unprintable characters but the ends of lines, so that foreign text does nothing to a terminal."""
    return "\n".join(map(one_line, text.split("\n")))


@contextlib.contextmanager
def noted(kept: Callable[[], str]) -> Iterator[None]:
    """Add a note to an interruption (Ctrl-C, SIGTERM): what is kept of the work, or nothing if none is."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        stopped.add_note(kept())
        raise


def one_line(text: str) -> str:
    """Escape unprintable characters so that foreign text fits on one line of a message."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_NO_GPU_MEMORY = re.compile("CUDA error: out of memory|CU(BLAS|SOLVER)_STATUS_ALLOC_FAILED")
_NO_MAIN_MEMORY = re.compile("DefaultCPUAllocator: (can't allocate|not enough) memory|unable to mmap .* memory")
"""Messages of a plain RuntimeError; for the others torch, numpy and Python have classes."""


@contextlib.contextmanager
def memory_named(where: str) -> Iterator[None]:
    """Turn what torch, numpy and Python raise when memory runs out for `where` into an `OutOfMemoryError`."""
    try:
        yield
    except CompressxError:
        raise
    except Exception as error:
        _refuse_missing_memory(error, where)
        raise


def _refuse_missing_memory(error: BaseException, where: str) -> None:
    """Raise an `OutOfMemoryError` if an error says that memory ran out."""
    text, known = str(error), isinstance(error, RuntimeError)
    if type(error).__name__ == "OutOfMemoryError" or (known and _NO_GPU_MEMORY.search(text)):
        asked = _found(r"allocate ([\d.]+ \w+)", text)
        device, free = _found(r"GPU (\d+)", text), _found(r"of which ([\d.]+ \w+) is free", text)
        place = f"cuda:{device}" if device else "the GPU"
        place += f", where {free} of {_found(r'capacity of ([0-9.]+ [A-Za-z]+)', text)} are free" if free else ""
    elif isinstance(error, MemoryError) or (known and _NO_MAIN_MEMORY.search(text)):
        asked, place = _found(r"(?:allocate|mmap) ([\d.]+ \w+)", text), "main memory"
    else:
        return
    raise OutOfMemoryError(f"out of memory: {where}: {asked or 'what is needed'} did not fit in {place}") from error


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


@contextlib.contextmanager
def blamed_on(plugin: str) -> Iterator[None]:
    """Turn exceptions from plugin code into a `PluginError` with file and line; a `CompressxError` passes through.

    Memory that is not there is no fault of the plugin's, but an `OutOfMemoryError`.

    Args:
        plugin: start of the message, such as `pruner 'mine' failed on model.layers.0`.
    """
    try:
        yield
    except CompressxError:
        raise
    except (Exception, SystemExit) as error:  # a plugin that ends the process would end it without a word
        _refuse_missing_memory(error, plugin)
        if isinstance(error, RuntimeError) and "home directory" in str(error):
            raise  # which the command line explains
        # The first two frames are this one and the caller's.
        own = own_frames(traceback.extract_tb(error.__traceback__)[2:])
        raised = PluginError(f"{plugin}: {said_by(error)}{place_of(own)}")
        raised.frames = own
        raise raised from error


_BETWEEN = {Path(str(x.__file__)).parent for x in (importlib, importlib.metadata, pluggy)}
"""Folders of the code between the host and a plugin's, which imports it and calls its hooks."""


def own_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames in the folder of the first, which is the plugin's."""
    there = [f for f in frames if f.filename[0] != "<" and Path(f.filename).parent not in _BETWEEN]
    return [f for f in there if Path(f.filename).is_relative_to(Path(there[0].filename).parent)]


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return file and line of the innermost frame, in brackets; nothing if there is none."""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def said_by(error: BaseException) -> str:
    """Return an exception's class and message, with the attribute, variable or keyword that was probably meant."""
    if isinstance(error, CompressxError):
        return str(error)
    last = next(reversed([*traceback.walk_tb(error.__traceback__)]))[0]
    known, hint = {**last.f_globals, **last.f_locals}, ""
    message = re.sub(r"\. Did you mean '\w+'\?$", "", str(error))  # which Python says of keywords since 3.13
    if isinstance(error, AttributeError) and error.name:
        hint = suggestion(error.name, dir(error.obj))
    elif isinstance(error, NameError) and error.name:
        hint = suggestion(error.name, known)
    elif found := re.search(r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'$", message):
        spaces = [known, *(vars(x) for x in known.values() if isinstance(x, ModuleType))]
        called = next((x[found[1]] for x in spaces if found[1] in x), None)
        with contextlib.suppress(TypeError, ValueError):  # nothing that has a signature
            hint = suggestion(found[2], inspect.signature(called).parameters)  # type: ignore[arg-type]
    return f"{type(error).__name__}: {message}" + (f"; {hint.rstrip()}" if hint else "")
