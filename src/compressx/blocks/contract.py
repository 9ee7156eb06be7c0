"""The contract of `compressx.Pruner`: an answer that breaks it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from compressx.api.patterns import Pattern
from compressx.api.pruner import AnyPruner, Block, Linear, PruneResult
from compressx.blocks.numbers import check_numbers, fetched
from compressx.blocks.observe import Observed
from compressx.blocks.prepared import answer_of
from compressx.runtime.errors import PluginError
from compressx.runtime.finite import first_damaged


def ask(
    plugin: str, pruner: AnyPruner, block: Block, patterns: Mapping[str, Pattern], observed: Mapping[str, Observed],
    untouched: Checksums, kept: dict[Observed, Any] | None = None,
) -> Mapping[str, PruneResult]:  # fmt: skip
    """Call a pruner, and refuse an answer that breaks its contract.

    Args:
        plugin: what messages call the pruner.
        pruner: to ask.
        block: the block.
        patterns: what each linear has to become, by name.
        observed: what the pruner asked for, by name; without those where it asked for nothing.
        untouched: the sums of what the block holds.
        kept: what the pruner has prepared in this block and will be handed again; nothing is kept when absent.

    Returns:
        One result for each name in `patterns`.

    Raises:
        PluginError: any exception of the pruner's that is not for users, other linears than were asked about, masks or
            weights of another shape or dtype, another number of zeros, numbers that are not finite, figures that cannot
            be drawn, or asked-for weights that it changed itself. The message names plugin and linear.
    """
    untouched.before_asking(patterns)
    results = answer_of(plugin, pruner, block, patterns, observed, kept)
    untouched.refuse_changes(patterns, [plugin])
    if not isinstance(results, Mapping):
        raise PluginError(
            f"pruner {plugin!r} on {block.fqn}: prune must return a mapping from linear names to PruneResult, got "
            f"{type(results).__name__}"
        )
    if set(results) != set(patterns):
        raise PluginError(
            f"pruner {plugin!r} on {block.fqn}: expected results for {sorted(patterns)}, got {sorted(results)}"
        )
    for name, result in results.items():
        if not isinstance(result, PruneResult):
            raise PluginError(
                f"pruner {plugin!r} on {name}: expected a PruneResult, got {type(result).__name__}"
                + ("; write PruneResult(mask)" if isinstance(result, Tensor) else "")
            )
        _check_form(f"pruner {plugin!r} on {name}", block.linears[name], result)
    check_numbers(plugin, block, patterns, results)
    return results


class Checksums:
    """Sums of the bits of what pruners must leave alone; what no pruner can have changed is not read again.

    Args:
        block: the block.
        plugins: those that will be asked about it.
    """

    def __init__(self, block: Block, plugins: Iterable[str]) -> None:
        self._block, self._plugins = block, tuple(plugins)
        owned = {id(getattr(x.module, x.parameter)) for x in block.linears.values()}
        held = [*block.module.named_parameters(), *block.module.named_buffers()]
        self._tensors: dict[str, Callable[[], Tensor]] = {
            **{self._shown(name): partial(getattr, linear, "weight") for name, linear in block.linears.items()},
            **{name: x.detach for name, x in held if id(x) not in owned and not x.is_meta},
        }
        self._sums: dict[str, Tensor] = {}  # on the device, since the host would wait for each
        self._doubtful: set[str] = set()  # what a pruner may have changed since it was last read

    def before_asking(self, about: Iterable[str]) -> None:
        """Sum what was not summed yet, since a pruner is about to be asked.

        Args:
            about: the linears that it is asked about.

        Raises:
            PluginError: a pruner that was asked before has changed one of those.
        """
        self.refuse_changes(about)
        self._sums |= {name: _bits(of()) for name, of in self._tensors.items() if name not in self._sums}
        self._doubtful = set(self._sums)

    def written(self, name: str) -> None:
        """Forget the weight and the bias of a linear that the host has written."""
        for shown in (self._shown(name), self._shown(name).removesuffix("weight") + "bias"):
            self._sums.pop(shown, None)
            self._doubtful.discard(shown)

    def refuse_changes(self, linears: Iterable[str] | None = None, plugins: Iterable[str] | None = None) -> None:
        """Compare with what is there now.

        Args:
            linears: whose weights are compared; everything when absent.
            plugins: those that may have changed them; all when absent.

        Raises:
            PluginError: something has changed; the message names it.
        """
        doubted = self._doubtful & (self._doubtful if linears is None else {*map(self._shown, linears)})
        differ = fetched({n: _bits(of()) != self._sums[n] for n, of in self._tensors.items() if n in doubted})
        if changed := [name for name, other in differ.items() if other]:
            raise PluginError(
                f"pruner {' or '.join(map(repr, plugins or self._plugins))} changed {changed[0]} of "
                f"{self._block.fqn or 'the model'} itself; a pruner returns new weights, and compressx writes them"
            )
        self._doubtful -= doubted

    def _shown(self, linear: str) -> str:
        return f"{linear}.weight".removeprefix(f"{self._block.fqn}.")


def _bits(tensor: Tensor) -> Tensor:
    """Sum a tensor's bits, int64 []; of a transposed one as they are stored."""
    stored = tensor if tensor.is_contiguous() or tensor.dim() < 2 else tensor.mT
    flat = stored.detach().contiguous().view(-1).view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()  # an expert of an odd size begins anywhere
    whole = len(flat) // 8 * 8  # eight bytes at a time
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


def _check_form(who: str, linear: Linear, result: PruneResult) -> None:
    """Refuse a result of another shape or type, and what cannot be reported of it."""
    for part in ("keep", "weight", "bias"):
        tensor = getattr(result, part)
        if not isinstance(tensor, Tensor) and (tensor is not None or part == "keep"):
            raise PluginError(f"{who}: {part} must be a torch.Tensor, got {type(tensor).__name__}")
    for part in ("info", "images", "history"):
        if not isinstance(shown := getattr(result, part), Mapping):
            raise PluginError(f"{who}: {part} must be a mapping from names, got {type(shown).__name__}")
    shape = (linear.out_features, linear.in_features)
    if result.keep.dtype != torch.bool or tuple(result.keep.shape) != shape:
        got = f"{result.keep.dtype} {list(result.keep.shape)}"
        raise PluginError(f"{who}: keep must be torch.bool {list(shape)}, got {got}")
    if result.weight is not None and (tuple(result.weight.shape) != shape or not result.weight.is_floating_point()):
        got = f"{result.weight.dtype} {list(result.weight.shape)}"
        raise PluginError(f"{who}: weight must be a float tensor {list(shape)}, got {got}")
    _check_bias(who, linear, result.bias)
    for part, tensor in (("keep", result.keep), ("weight", result.weight), ("bias", result.bias)):
        if tensor is not None and tensor.device != linear.weight.device:
            raise PluginError(
                f"{who}: {part} is on {tensor.device}, expected the weight's device, "
                f"{linear.weight.device}; make new tensors with device=weight.device"
            )
    _check_shown(who, result.info, result.images, result.history)


def _check_bias(who: str, linear: Linear, bias: Tensor | None) -> None:
    if bias is None:
        return
    if linear.bias is None:
        raise PluginError(f"{who}: it returned a bias, but the linear has none; leave bias out")
    if tuple(bias.shape) != (linear.out_features,) or not bias.is_floating_point():
        got = f"{bias.dtype} {list(bias.shape)}"
        raise PluginError(f"{who}: bias must be a float tensor {[linear.out_features]}, got {got}")


def _check_shown(
    who: str, info: Mapping[str, Any], images: Mapping[str, Any], history: Mapping[str, Sequence[Any]]
) -> None:
    """Refuse figures, images and curves that cannot be reported."""
    for name, value in info.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            hint = "; write float(...)" if isinstance(value, Tensor) and value.numel() == 1 else ""
            raise PluginError(f"{who}: info {name!r} must be a finite number, got {value!r:.80}{hint}")
    for name, image in images.items():
        if not isinstance(image, Tensor) or image.dim() != 2 or not image.numel() or image.is_complex():
            got = f"{image.dtype} {list(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise PluginError(f"{who}: image {name!r} must be a real tensor [rows, columns], got {got}")
    damaged = first_damaged(list(images.values()))
    if damaged is not None:
        raise PluginError(f"{who}: image {list(images)[damaged]!r} has entries that are NaN or infinite")
    for name, values in history.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise PluginError(f"{who}: history {name!r} must be a sequence of numbers, got {values!r:.80}")
        if len(values) == 0:
            raise PluginError(f"{who}: history {name!r} is empty; leave it out when there were no steps")
        for step, value in enumerate(values, start=1):
            if not isinstance(value, Real) or not math.isfinite(value):
                raise PluginError(f"{who}: history {name!r} must be finite numbers, got {value!r} at step {step}")
