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

_RESTORE = "put it back in a `finally`"


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
        self._tensors = {name: tensor.detach().clone() for name, tensor in _tensors(whole)}
        self._attributes = dict(_attributes(whole))
        self._config = copy.deepcopy(vars(whole.config))

    def expect_same(self) -> None:
        """Raise when something differs now."""
        self._expect_same_attributes(dict(_attributes(self._model)))
        for name, tensor in _tensors(self._model):
            same = torch.equal(tensor, self._tensors[name])
            expect(same, f"{name} was changed; a pruner returns new weights, and compressx writes them")
        for key, now in vars(self._model.config).items():
            was = self._config.get(key)
            expect(
                now == was,
                f"config.{key} was changed from {was!r:.40} to {now!r:.40}; the model computes with it, so change a "
                "copy.deepcopy(block.config)",
            )

    def _expect_same_attributes(self, now: dict[tuple[str, str], Any]) -> None:
        before = self._attributes
        for (where, name), value in now.items():
            left = f"it left {name}; keep it in the pruner, or delete it in a `finally`"
            if "_hooks" in name:
                left = f"it left a hook in {name.partition('[')[0]}; call remove() of its handle in a `finally`"
            expect((where, name) in before, f"{where or 'the model'}: {left}")
            was = before[where, name]
            expect(_same(was, value), f"{where or 'the model'}: {name} {value!r:.40}, was {was!r:.40}; {_RESTORE}")
        gone = [f"{where or 'the model'}: {name}" for where, name in before.keys() - now.keys()]
        expect(not gone, f"{gone and min(gone)} was removed; {_RESTORE}")


def _tensors(whole: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer, those that no checkpoint holds too."""
    yield from whole.named_parameters()
    yield from whole.named_buffers()


def _attributes(whole: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield every attribute of every module and parameter by (where, its name); of dictionaries every entry."""
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


def _same(was: Any, now: Any) -> bool:
    plain = (bool, int, float, str, tuple, torch.dtype, torch.device)
    return was is now or (type(was) is type(now) and isinstance(was, plain) and was == now)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random state, and put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
