"""Routers of mixtures whose experts are dropped: they choose among those that are left.

Within a run a dropped expert is zeros, and its router is as large as before. Zeros are not enough: the router would go
on to send tokens there. So it computes with the rows of the experts that are left, as the smaller model's router will,
and the numbers that it chooses are translated back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.projections import parent
from compressx.api.pruner import Block
from compressx.api.units import Units
from compressx.runtime.errors import UnsupportedModelError


def router_of(block: Block, units: Units) -> tuple[str, nn.Module]:
    """Find the router of a block's experts, beside them.

    Args:
        block: the block; its weights may be on the meta device.
        units: its experts.

    Returns:
        Its fully qualified name, and the module. Its own tensors that have a row or an entry for each expert are found
        by `rows_of`.

    Raises:
        UnsupportedModelError: none is found, or it does more, or less, than choose experts by their own scores.
    """
    home = parent(units.fqn)
    beside = {n: m for n, m in block.submodule(home).named_children() if f"{home}.{n}" != units.fqn}
    found = {n: m for n, m in beside.items() if any(x.dim() == 2 for x in rows_of(m, units.count).values())}
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{home}: expected one router with a row for each of the {units}, found {', '.join(found) or 'none'} among "
            f"{', '.join(beside) or 'nothing'}"
        )
    ((name, router),) = found.items()
    if isinstance(router, nn.Linear):
        raise UnsupportedModelError(
            f"{home}.{name} is a linear, and {type(block.submodule(home)).__name__} chooses experts from its output, "
            "where compressx cannot leave some out; expected a router that returns which experts it has chosen"
        )
    if (groups := getattr(router, "num_group", getattr(block.config, "n_group", None)) or 1) > 1:
        raise UnsupportedModelError(
            f"{home}.{name} chooses among {groups} groups of experts first, which would no longer be equal; prune "
            "neurons of the experts instead"
        )
    return f"{home}.{name}", router


def rows_of(router: nn.Module, count: int) -> dict[str, Tensor]:
    """Return a router's own tensors that have a row or an entry for each of `count` experts, by name in the module."""
    own = {**dict(router.named_parameters(recurse=False)), **dict(router.named_buffers(recurse=False))}
    return {name: x for name, x in own.items() if x.dim() and len(x) == count}


def leave_out(block: Block, units: Units, keep: Tensor) -> None:
    """Let a block's router choose only among the experts that are kept, from now on.

    Args:
        block: the block.
        units: its experts.
        keep: bool [experts], True = keep.
    """
    router: Any = router_of(block, units)[1]
    reinstate(router)
    chosen = _Chosen(torch.nonzero(keep.cpu()).flatten(), units.count)
    handles = (
        router.register_forward_pre_hook(chosen.before),
        router.register_forward_hook(chosen.after, always_call=True),
    )
    router._compressx_chosen = handles


def reinstate(model: nn.Module) -> None:
    """Let the routers in a model choose among all experts again."""
    for module in model.modules():
        for handle in vars(module).pop("_compressx_chosen", ()):
            handle.remove()


@dataclass(eq=False)
class _Chosen:
    """Hooks that hide the rows of dropped experts from a router while it runs, and translate what it chooses.

    Attributes:
        kept: numbers of the experts that are left, int64 [kept], in order.
        count: of all experts.
    """

    kept: Tensor
    count: int
    _whole: dict[str, Tensor] = field(default_factory=dict, init=False)

    def before(self, router: Any, _args: Any) -> None:
        self._whole = rows_of(router, self.count)
        for name, x in self._whole.items():
            _home(router, name)[name] = x[self.kept.to(x.device)]
        if getattr(router, "num_experts", None) == self.count:
            router.num_experts = len(self.kept)

    def after(self, router: Any, _args: Any, output: Any) -> Any:
        for name, x in self._whole.items():
            _home(router, name)[name] = x
        if getattr(router, "num_experts", None) == len(self.kept):
            router.num_experts = self.count
        if output is None:  # it has failed
            return None
        if not isinstance(output, tuple) or not any(_is_choice(x) for x in output):
            raise UnsupportedModelError(
                f"{type(router).__name__} returns no numbers of experts, so that compressx cannot tell which it has "
                "chosen; prune neurons of the experts instead"
            )
        return tuple(self.kept.to(x.device)[x].to(x.dtype) if _is_choice(x) else x for x in output)


def _home(router: nn.Module, name: str) -> dict[str, Any]:
    return router._parameters if name in router._parameters else router._buffers


def _is_choice(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool
