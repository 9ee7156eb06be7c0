"""Units of structured pruning in a decoder block (feed-forward neurons, key/value groups, experts), and routers.

Within a run a dropped expert is zeros, and its router is as large as before. Zeros are not enough: the router would go
on to send tokens there. So it computes with the rows of the experts that are left, as the smaller model's router will,
and the numbers that it chooses are translated back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.names import kind_of
from compressx.api.patterns import Owners, UnitKind, Units
from compressx.api.projections import find_projections, head_size, parent
from compressx.api.pruner import Block, Linear
from compressx.runtime.errors import UnsupportedModelError

_DOWN = ("down_proj", "fc2", "fc_out", "c_proj", "dense_4h_to_h", "w2")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)")
_UP = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "w1", "v1", "w3")


def find_units(kind: UnitKind, block: Block) -> list[Units]:
    """Find the units of one kind in a block; its weights may be on the meta device.

    There is one entry for each set of units that compete: of a mixture each expert's neurons compete by themselves.
    Refused are a block that has none, and weights that are laid out in an unknown way.
    """
    return {"neurons": _neurons, "kv-groups": _kv_groups, "experts": _experts}[kind](block)


def _neurons(block: Block) -> list[Units]:
    found = []
    all_ups: dict[str, list[Linear]] = {}
    for linear in block.linears.values():
        if kind_of(linear.name) in _UP:
            all_ups.setdefault(_home(linear), []).append(linear)
    for name, down in block.linears.items():
        ups = all_ups.get(_home(down))
        if kind_of(name) not in _DOWN or not ups:
            continue
        _refuse_biases(down)
        count = down.in_features
        if odd := next((x for x in ups if x.out_features not in (count, 2 * count)), None):
            raise UnsupportedModelError(
                f"{odd.name} has {odd.out_features} outputs and {name} {count} inputs, so compressx cannot tell which "
                "of them form a neuron"
            )
        # A fused gate and up projection holds all gates, then all ups.
        owners = {x.name: Owners(0, torch.arange(count).repeat(x.out_features // count)) for x in ups}
        found.append(Units("neurons", _home(down), count, {**owners, name: Owners(1, torch.arange(count))}))
    if not found:
        raise UnsupportedModelError(
            f"{block.fqn} has no feed-forward neurons that compressx knows: none of {', '.join(_DOWN)} beside one of "
            f"{', '.join(_UP)}; its linears: {', '.join(block.linears) or 'none'}"
        )
    return found


def _refuse_biases(linear: Linear) -> None:
    """Refuse units of experts that have biases, which would have to go with them."""
    if linear.expert is not None and linear.bias is not None:
        raise UnsupportedModelError(
            f"{linear.name}: experts with biases, as in GPT-OSS, are pruned by weights, or 2:4, but not by neurons or "
            "experts"
        )


def _home(linear: Linear) -> str:
    """Return the name of the module that holds a linear; of a fused expert followed by its number."""
    return parent(linear.name) if linear.expert is None else f"{parent(parent(linear.name))}.{linear.expert}"


def _kv_groups(block: Block) -> list[Units]:
    found = find_projections(block)
    size = head_size(block.submodule(found.attention), block.config)
    count, odd = divmod(found.key.count, size)
    inputs = found.output.in_features
    if odd or not count or found.value.count % count or found.query.count % (count * size) or inputs % count:
        raise UnsupportedModelError(
            f"{found.attention}: {found.query.count} query, {found.key.count} key and {found.value.count} value "
            f"features, and {inputs} inputs of {found.output.name}, are not heads of {size} features in groups"
        )
    owners: dict[str, Owners] = {}
    units: dict[str, torch.Tensor] = {}
    for rows in found.inward:
        each = torch.arange(count).repeat_interleave(rows.count // count)
        whole = units.setdefault(rows.name, torch.full((rows.linear.out_features,), -1))
        whole[slice(None) if rows.index is None else rows.index.cpu()] = each
        owners[rows.name] = Owners(0, whole)
    owners[found.output.name] = Owners(1, torch.arange(count).repeat_interleave(inputs // count))
    return [Units("kv-groups", found.attention, count, owners)]


def _experts(block: Block) -> list[Units]:
    homes: dict[str, dict[str, tuple[int, Linear]]] = {}
    for name, linear in block.linears.items():
        if match := _EXPERT.fullmatch(_home(linear)):
            _refuse_biases(linear)
            homes.setdefault(match[1], {})[name] = (int(match[2]), linear)
    if not homes:
        raise UnsupportedModelError(f"{block.fqn} has no experts; its linears: {', '.join(block.linears) or 'none'}")
    return [
        Units(
            "experts", home, 1 + max(number for number, _ in linears.values()),
            {name: Owners(0, torch.full((x.out_features,), number)) for name, (number, x) in linears.items()},
        )
        for home, linears in homes.items()
    ]  # fmt: skip


def router_of(block: Block, units: Units) -> tuple[str, nn.Module]:
    """Return name and module of the router of a block's experts; `rows_of` finds its rows. Weights may be on `meta`.

    Refused is a router that does more, or less, than choose experts by their own scores.
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
    """Let a block's router choose only among the experts that are kept, from now on; `keep` is bool [experts]."""
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

    `kept` are the numbers of the experts that are left, int64 [kept], in order; `count` is that of all.
    """

    kept: Tensor
    count: int
    _whole: dict[str, Tensor] = field(default_factory=dict, init=False)

    def before(self, router: Any, _args: Any) -> None:
        self._whole = rows_of(router, self.count)
        for name, x in self._whole.items():
            _tensors(router, name)[name] = x[self.kept.to(x.device)]
        if getattr(router, "num_experts", None) == self.count:
            router.num_experts = len(self.kept)

    def after(self, router: Any, _args: Any, output: Any) -> Any:
        for name, x in self._whole.items():
            _tensors(router, name)[name] = x
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


def _tensors(router: nn.Module, name: str) -> dict[str, Any]:
    return router._parameters if name in router._parameters else router._buffers


def _is_choice(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool
