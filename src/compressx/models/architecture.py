"""Find a transformers model's decoder blocks and prunable linears in its module tree."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.utils import parametrize

from compressx.api.pruner import Linear
from compressx.runtime.errors import ArtifactError, UnsupportedModelError

_WRAPPERS = {"OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}
"""Classes around a model or its blocks, under which weights have other names."""

_COMPUTED = {
    "FakeSparsity": "compressx.masks.squash(sparsifier)",
    "BasePruningMethod": 'torch.nn.utils.prune.remove(module, "weight")',
    "WeightNorm": "torch.nn.utils.remove_weight_norm(module)",
    "SpectralNorm": "torch.nn.utils.remove_spectral_norm(module)",
    "Module": 'torch.nn.utils.parametrize.remove_parametrizations(module, "weight")',
}
"""Classes of hooks and parametrizations that compute a weight for each forward pass, and what makes it permanent."""

_PLAIN_CLASSES = frozenset(("Tensor", "Parameter"))
"""Names of the classes that weights may be of."""


@dataclass(frozen=True, eq=False)
class Architecture:
    """The decoder blocks and matrices of a model.

    Attributes:
        blocks: the decoder blocks in order, by fully qualified name.
        linears: every prunable linear in a block, by fully qualified name, in the model's order.
        outside: linears outside the blocks (`lm_head`, input and output projections), pruned only when named.
        unprunable: other matrices that cannot be pruned, with the reason.
    """

    blocks: Mapping[str, nn.Module]
    linears: Mapping[str, Linear]
    outside: Mapping[str, Linear]
    unprunable: Mapping[str, str]

    def inside(self, fqn: str) -> dict[str, Linear]:
        """Return the linears of one block by name."""
        return {name: linear for name, linear in self.linears.items() if name.startswith(f"{fqn}.")}

    def block_of(self, name: str) -> str:
        """Return the fully qualified name of the block that holds the linear `name`; empty if none does."""
        return next((fqn for fqn in self.blocks if name.startswith(f"{fqn}.")), "")


def architecture_of(model: nn.Module) -> Architecture:
    """Find a model's decoder blocks, prunable linears, and every other module with a matrix; also on `meta`."""
    blocks = find_blocks(model)
    linears: dict[str, Linear] = {}
    outside: dict[str, Linear] = {}
    unprunable: dict[str, str] = {}
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        if not any(True for _ in _matrices(module)):
            continue
        in_block = any(name.startswith(f"{fqn}.") for fqn in blocks)
        reason = _why_not_prunable(module)
        tied = owners.get(id(module._parameters.get("weight")), [])
        if reason is None and (others := [n for n in tied if n != f"{name}.weight"]):
            reason = f"its weight is tied to {', '.join(others)}; pruning it would prune both"
        if reason is not None:
            unprunable[name] = reason
        else:
            (linears if in_block else outside).update({x.name: x for x in linears_of(name, module)})
    if not linears:
        _refuse_without_linears(blocks, unprunable)
    return Architecture(blocks, linears, outside, unprunable)


def linears_of(name: str, module: nn.Module) -> list[Linear]:
    """Return the linears of one module: itself, or one per fused expert; none for other modules."""
    if isinstance(module, nn.Linear) or _is_conv1d(module):
        return [Linear(name, module, transposed=_is_conv1d(module))]
    experts, turned = _fused_experts(module) or (0, {})
    return [
        Linear(f"{name}.{parameter}.{expert}", module, parameter, transposed, expert, experts=experts)
        for parameter, transposed in turned.items()
        for expert in range(experts)
    ]


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the decoder blocks: the one outermost ModuleList whose length is the config's number of layers."""
    config = text_config(model)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    depth = getattr(config, "num_hidden_layers", None)
    if (layers := getattr(config, "num_layers", None)) and depth == 2 * layers:
        depth = layers  # LongCat counts attentions, two in each block
    fitting = {n: m for n, m in outermost.items() if len(m) == depth and any(True for _ in m.parameters())}
    if len(fitting) != 1:
        found = ", ".join(f"{n} ({len(m)})" for n, m in outermost.items()) or "none"
        expected = f"{depth} decoder blocks (config.num_hidden_layers)"
        if depth is None:
            expected = (
                "decoder blocks (config.num_hidden_layers, which it lacks: if it has it under another name, write "
                f'attribute_map = {{"num_hidden_layers": "..."}} with that name in class {type(config).__name__})'
            )
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected one list of {expected}, found {len(fitting)}; module lists in the "
            f"model: {found}. compressx prunes decoder-only language models"
        )
    ((name, modules),) = fitting.items()
    return {f"{name}.{i}": module for i, module in enumerate(modules)}


def refuse_prepared(model: nn.Module, action: str = "saved", allowed: str = "") -> None:
    """Refuse a model whose weights are no plain parameters: what is written to them is lost, or was never its own.

    `action` is what is refused, a participle; `allowed` the name of a class of parametrizations or tensors that is not.
    """
    found = [(name, *why) for name, module in model.named_modules() if (why := _not_plain(module, allowed))]
    if found:
        name, state, advice = found[0]
        more = f" and {len(found) - 1} more" if found[1:] else ""
        raise ArtifactError(
            f"the model cannot be {action} while its weights are {state} ({name or type(model).__name__}{more}); "
            f"{advice} first"
        )


def _not_plain(module: nn.Module, allowed: str) -> tuple[str, str] | None:
    """Return what a module's weights are, if they are no plain parameters, and what to do."""
    for name in _classes(module) & _WRAPPERS:
        inner = "_orig_mod" if name == "OptimizedModule" else "module"
        return f"wrapped in {name}", f"pass its `{inner}`, or load the model without the wrapper,"
    if "ScriptModule" in _classes(module):
        return "compiled by torch.jit", "pass the module that was compiled,"
    chains: Any = module.get_submodule("parametrizations").children() if parametrize.is_parametrized(module) else ()
    for made in (*chain.from_iterable(chains), *module._forward_pre_hooks.values()):
        names = _classes(made)
        if allowed not in names and (call := next((x for name, x in _COMPUTED.items() if name in names), None)):
            return f"parametrized by {type(made).__name__}", f"call {call}"
    if isinstance(vars(module).get("weight"), Tensor):
        return "no parameters", "set module.weight to an nn.Parameter"
    for x in (*module._parameters.values(), *module._buffers.values()):
        if x is not None and type(x).__name__ not in _PLAIN_CLASSES and allowed not in _classes(x):
            return f"of class {type(x).__name__}", "load the model whole and in full precision, or dequantize it,"
    return None


def _classes(value: object) -> set[str]:
    """Return the names of an object's classes: none of the libraries that they are from is imported for it."""
    return {cls.__name__ for cls in type(value).__mro__}


def text_config(model: nn.Module) -> Any:
    """Return the config of the model's language part; UnsupportedModelError for modules that have none."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no config of transformers; expected a causal language model of transformers"
        )
    return config.get_text_config(decoder=True)


def positions_of(model: nn.Module) -> int:
    """Return how many tokens a model reads at most; `sys.maxsize` where its config says none, or as XLNet's says -1."""
    told = getattr(text_config(model), "max_position_embeddings", None)
    return told if isinstance(told, int) and told > 0 else sys.maxsize


def count_parameters(model: Any, kept: Mapping[str, Tensor] | None = None) -> int:
    """Count parameters, a model's own or what is kept of them by name; tied ones, which on disk are two, count once."""
    tied = getattr(model, "all_tied_weights_keys", {})
    found = dict(model.named_parameters())
    return sum((kept or found)[name].numel() for name in found if name not in tied)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether the module stores [in_features, out_features]; avoids importing transformers."""
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and isinstance(module, home.Conv1D)


def _matrices(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the module's own parameters of two or more dimensions."""
    return ((n, p) for n, p in module.named_parameters(recurse=False) if p.dim() >= 2)


def _fused_experts(module: Any) -> tuple[int, dict[str, bool]] | None:
    """Return how many experts a module's parameters hold, and of each parameter whether it is stored turned.

    Known are `down_proj` beside `gate_up_proj` or `up_proj`, [experts, out_features, in_features] or, turned, [experts,
    in_features, out_features], as an attribute of transformers' kernels says, or else the shapes; JetMoE's `weight`,
    [num_experts, output_size, input_size]; DBRX's `w1`, `v1` and, turned, `w2`, [experts * ffn_hidden_size, width].
    """
    masked: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    held = dict(_matrices(module)) | {n: chain.original for n, chain in masked.items() if hasattr(chain, "original")}
    shapes = {name: tuple(x.shape) for name, x in held.items()}
    sizes = tuple(getattr(module, size, None) for size in ("num_experts", "output_size", "input_size"))
    if held and shapes == {"weight": sizes}:
        return len(held["weight"]), {"weight": False}
    if held.keys() == {"w1", "v1", "w2"} and len({*shapes.values()}) == 1:
        experts, rest = divmod(len(held["w1"]), getattr(module, "ffn_hidden_size", len(held["w1"]) + 1))
        return (experts, {"w1": False, "v1": False, "w2": True}) if experts and not rest else None
    names = {"gate_up_proj", "up_proj", "down_proj"} & held.keys()
    biases = {f"{name}_bias" for name in names} if getattr(module, "has_bias", False) else set()
    if not names or any(x.dim() != 3 if n in names else n not in biases or x.dim() != 2 for n, x in held.items()):
        return None
    if {"is_transposed", "has_bias"} <= vars(module).keys():
        turned = bool(module.is_transposed)
    elif names == {"gate_up_proj", "down_proj"}:
        (_, *up), (_, *down) = shapes["gate_up_proj"], shapes["down_proj"]
        turned = up == [down[1], 2 * down[0]]
        if turned == (up == [2 * down[1], down[0]]):
            return None
    else:
        return None
    count = min(len(held[name]) for name in names)  # LongCat's gate_up_proj has more, which are not used
    return count, {name: turned for name in held if name in names}


def _refuse_without_linears(blocks: Mapping[str, nn.Module], unprunable: Mapping[str, str]) -> NoReturn:
    """Refuse a model with nothing to prune in its blocks, and name the first matrix that they hold instead."""
    held = [(n, why) for n, why in unprunable.items() if any(n.startswith(f"{fqn}.") for fqn in blocks)]
    for n, module in (x for fqn, block in blocks.items() for x in block.named_modules(prefix=fqn)):
        if any(b.dim() >= 2 for b in module.buffers(recurse=False)):  # of classes that pack their weights
            held.append((n, f"not a linear: {type(module).__name__} holds buffers"))
    name, why = held[0] if held else (next(iter(blocks)), "not a module with matrices")
    said = f"{name} {'is' if why.startswith('not') else 'cannot be pruned:'} {why}"
    raise UnsupportedModelError(
        f"the blocks have no linear that compressx knows; {said}; expected nn.Linear, transformers' Conv1D or fused "
        "experts in floating point"
    )


def _why_not_prunable(module: nn.Module) -> str | None:
    if isinstance(module, nn.Embedding):
        return "an embedding, not a linear"
    if not isinstance(module, nn.Linear) and not _is_conv1d(module) and not _fused_experts(module):
        held = ", ".join(f"{n} {list(p.shape)}" for n, p in _matrices(module))
        return f"not a linear: {type(module).__name__} holds {held}"
    for _, weight in _matrices(module):
        if not weight.dtype.is_floating_point or weight.element_size() < 2:
            return f"its weight is quantized ({weight.dtype}); prune before quantizing"
    return None
