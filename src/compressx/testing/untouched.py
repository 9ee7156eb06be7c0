"""What a plugin shares with all other code, and leaves as it is: the model and its config."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.pruner import Statistic
from compressx.testing.subject import expect


class StatisticTensors:
    """What a statistic has gathered: a copy of its tensors, those of its attributes too."""

    def __init__(self, of: Statistic) -> None:
        self._of = of
        self._before = {name: tensor.clone() for name, tensor in self._tensors().items()}

    def changed(self) -> list[str]:
        """Return the names of the tensors that are others now."""
        now = self._tensors()
        return [name for name, was in self._before.items() if name not in now or not torch.equal(now[name], was)]

    def _tensors(self) -> dict[str, Tensor]:
        attributes = {name: x for name, x in getattr(self._of, "__dict__", {}).items() if isinstance(x, Tensor)}
        return attributes | {name: tensor for name, (tensor, _) in self._of.tensors().items()}


class Snapshot:
    """What a model was like: its tensors, the attributes and hooks of its modules and parameters, its config."""

    def __init__(self, whole: Any) -> None:
        self._model = whole
        self._before = dict(_state(whole))

    def expect_same(self) -> None:
        """Raise when something differs now."""
        now = dict(_state(self._model))
        for where, name in {**now, **self._before}:
            was, found = (state.get((where, name), _ABSENT) for state in (self._before, now))
            advice = _ADVICE.get(where if where == "config" else name.partition("[")[0], "put it back in a `finally`")
            if "_hooks" in name:
                advice = "call remove() of its handle in a `finally`"
            elif was is _ABSENT:
                advice = "keep it in the pruner, or delete it in a `finally`"
            told = f"{where or 'the model'}: {name} is {found!r:.40}, was {was!r:.40}; {advice}"
            expect(_same(was, found, copied=where == "config" or name == "values"), told)


_ABSENT = "nothing"
_ADVICE = {
    "values": "a pruner returns new weights, and compressx writes them",
    "config": "the model computes with it, so change a copy.deepcopy(block.config)",
}


def _state(whole: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield copies of tensors and of the config's values, and attributes, of dictionaries each entry: (where, name)."""
    for where, tensor in (*whole.named_parameters(), *whole.named_buffers()):  # those that no checkpoint holds too
        yield (where, "values"), tensor.detach().clone()
    yield from ((("config", key), copy.deepcopy(value)) for key, value in vars(whole.config).items())
    for where, module in whole.named_modules():
        yield (where, "class"), type(module)
        for name, value in vars(module).items():
            if isinstance(value, dict):
                yield from (((where, f"{name}[{key!r}]"), entry) for key, entry in value.items())
            else:
                yield (where, name), value
    for where, parameter in whole.named_parameters():
        yield (where, "requires_grad"), parameter.requires_grad
        yield (where, "grad"), parameter.grad
        hooks = {**(parameter._backward_hooks or {}), **(parameter._post_accumulate_grad_hooks or {})}
        yield from (((where, f"_backward_hooks[{key}]"), hook) for key, hook in hooks.items())
        yield from (((where, name), value) for name, value in vars(parameter).items())


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
