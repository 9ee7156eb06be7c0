"""Counts the FLOPs of matrix products that run, those in place included, which torch's own context leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
_AS = {_ATEN.addmm_: _ATEN.addmm, _ATEN.baddbmm_: _ATEN.baddbmm}


class counter(TorchDispatchMode):  # noqa: N801 - a context
    """Counts by torch's formulas; its own context also follows modules, which `autograd.grad` does not survive."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        packet = _AS.get(operation._overloadpacket, operation._overloadpacket)
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result
