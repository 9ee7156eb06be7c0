"""What a plugin shares with all other code, and leaves as it is: the model and its config."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressx.testing.subject import expect


class Snapshot:
    """What a model was like: its tensors, the attributes and hooks of its modules and parameters, its config."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before = dict(_state(model))

    def expect_same(self) -> None:
        """Raise when something differs now."""
        now = dict(_state(self._model))
        for where, name in {**now, **self._before}:
            was, found = (state.get((where, name), "nothing") for state in (self._before, now))
            told = f"{where or 'the model'}: {name} is {found!r:.40}, was {was!r:.40}"
            same = _same(was, found, copied=where == "config" or name == "values")
            expect(same, f"{told}; compute on a copy, or put it back in a `finally`")


def _state(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield copies of tensors and of the config's values, and attributes, of dictionaries each entry: (where, name)."""
    for where, tensor in (*model.named_parameters(), *model.named_buffers()):  # those that no checkpoint holds too
        yield (where, "values"), tensor.detach().clone()
    yield from ((("config", key), copy.deepcopy(value)) for key, value in vars(model.config).items())
    for where, module in model.named_modules():
        yield (where, "class"), type(module)
        yield from _entries(where, vars(module))
    for where, parameter in model.named_parameters():
        slots = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
        yield from _entries(where, {**vars(parameter), **{name: getattr(parameter, name) for name in slots}})


def _entries(where: str, attributes: dict[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in attributes.items():
        if isinstance(value, dict):
            yield from (((where, f"{name}[{key!r}]"), entry) for key, entry in value.items())
        elif not name.endswith("_hooks"):  # None before the first hook, and a dictionary after the last is removed
            yield (where, name), value


def _same(was: Any, now: Any, *, copied: bool) -> bool:
    """Compare copies by their values, attributes by what they are."""
    if copied and isinstance(was, Tensor) and isinstance(now, Tensor):
        return torch.equal(was, now)
    plain = (bool, int, float, str, tuple, torch.dtype, torch.device)
    return was is now or ((copied or (type(was) is type(now) and isinstance(was, plain))) and bool(was == now))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random state, and put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
