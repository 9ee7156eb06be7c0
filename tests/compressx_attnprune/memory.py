"""How large the tensors are that a computation makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation makes, and that a softmax makes, in elements.

    What a kernel holds within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_any = self.of_softmax = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.of_any = max(self.of_any, made.untyped_storage().nbytes() // made.element_size())
                if "softmax" in func.name():
                    self.of_softmax = max(self.of_softmax, made.numel())
        return result
