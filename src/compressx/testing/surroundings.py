"""What a plugin shares with all other code of its process: settings of torch, random states, standard output."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

import numpy as np
import torch

_SEED = 40_961
"""One that no plugin is likely to seed with itself."""


class _Shared(NamedTuple):
    """A value of the process: what it is called, how it is read and written, and what to do instead of changing it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    instead: str


_SETTING = "leave it to the user, or put it back in a `finally`"
_GENERATOR = "draw from a generator of your own, seeded by an option"
_GLOBAL_HOOKS = [x for name, x in vars(torch.nn.modules.module).items() if re.fullmatch("_global_.*_hooks", name)]


def _put_back_hooks(before: Sequence[dict[int, Any]]) -> None:
    for hooks, were in zip(_GLOBAL_HOOKS, before, strict=True):
        hooks.clear()
        hooks.update(were)


def _plain(state: Any) -> tuple[Any, ...]:
    return tuple(part.tolist() if isinstance(part, np.ndarray) else part for part in state)


_SHARED = (
    _Shared("torch's number of threads", torch.get_num_threads, torch.set_num_threads, _SETTING),
    _Shared("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype, _SETTING),
    _Shared("torch's default device", torch.get_default_device, torch.set_default_device, _SETTING),
    _Shared("torch's recording of gradients", torch.is_grad_enabled, torch.set_grad_enabled, _SETTING),
    _Shared(
        "torch's use of deterministic algorithms", torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms, _SETTING,
    ),
    _Shared(
        "torch's precision of matrix products", torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision, _SETTING,
    ),
    _Shared(
        "the list of hooks on all modules", lambda: tuple(map(dict, _GLOBAL_HOOKS)), _put_back_hooks,
        "remove() each handle in a `finally`",
    ),
    _Shared(
        "torch's random state", lambda: torch.get_rng_state().tolist(),
        lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
        f"{_GENERATOR}: torch.Generator(device).manual_seed(seed)",
    ),
    _Shared("Python's random state", random.getstate, random.setstate, f"{_GENERATOR}: random.Random(seed)"),
    _Shared(
        "NumPy's random state", lambda: _plain(np.random.get_state()), np.random.set_state,
        f"{_GENERATOR}: np.random.default_rng(seed)",
    ),
)  # fmt: skip


@contextmanager
def kept() -> Iterator[Callable[[], list[str]]]:
    """Keep what the code in a `with` does to its process from all other code; nothing of it is printed.

    Yields:
        A function that says what was changed or printed so far, each with what its author should do.
    """
    before = [shared.read() for shared in _SHARED]
    printed = io.StringIO()

    def changes() -> list[str]:
        found = [
            f"{shared.name} was changed{_values(was, now)}; {shared.instead}"
            for shared, was in zip(_SHARED, before, strict=True)
            if (now := shared.read()) != was
        ]
        if text := printed.getvalue():
            found.append(
                f"it printed {text[:40]!r} to standard output, where results of commands go; use `logging`, or "
                "PruneResult.info for a pruner's figures"
            )
        return found

    with redirect_stdout(printed):
        try:
            yield changes
        finally:
            for shared, was in zip(_SHARED, before, strict=True):
                if shared.read() != was:
                    shared.write(was)


def reseed() -> None:
    """Seed the random states, so that a plugin that seeds them changes them; use in `kept`."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)


def _values(was: Any, now: Any) -> str:
    return "" if isinstance(was, list | tuple) else f" from {was} to {now}"
