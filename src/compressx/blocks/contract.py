"""Asking a pruner: what it prepared, its answer, and the contract of `compressx.Pruner`, which refuses a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from compressx.api.patterns import FixedMask, Pattern, Structured, competing, count_dropped, of_units
from compressx.api.pruner import AnyPruner, Block, Linear, PreparingPruner, PruneResult
from compressx.blocks.observe import Observed
from compressx.masks.file import MaskEntry
from compressx.models.access import new_weight
from compressx.numerics.masked import count_in_groups, misplaced_groups
from compressx.runtime.errors import ArtifactError, PluginError, blamed_on
from compressx.runtime.finite import all_finite, first_damaged
from compressx.runtime.transfer import to_device

_Key = TypeVar("_Key")
_Found: TypeAlias = Mapping[tuple[str, str], int]
"""Counts of what is wrong, by what is counted and the name of a linear, or of the module of units."""


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
            **{self._shown(name): partial(getattr, linear, "held") for name, linear in block.linears.items()},
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
    if (bias := result.bias) is not None:
        if linear.bias is None:
            raise PluginError(f"{who}: it returned a bias, but the linear has none; leave bias out")
        if tuple(bias.shape) != shape[:1] or not bias.is_floating_point():
            got = f"{bias.dtype} {list(bias.shape)}"
            raise PluginError(f"{who}: bias must be a float tensor {[linear.out_features]}, got {got}")
    for part, tensor in (("keep", result.keep), ("weight", result.weight), ("bias", result.bias)):
        if tensor is not None and tensor.device != linear.held.device:
            raise PluginError(
                f"{who}: {part} is on {tensor.device}, expected the weight's device, "
                f"{linear.held.device}; make new tensors with device=weight.device"
            )
    _check_shown(who, result.info, result.images, result.history)


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


def fetched(numbers: Mapping[_Key, Tensor]) -> dict[_Key, int]:
    """Return whole numbers from the device of the first, in one transfer: the host waits for each."""
    if not numbers:
        return {}
    device = next(iter(numbers.values())).device
    values = torch.stack([x.to(device, torch.int64) for x in numbers.values()])
    return dict(zip(numbers, values.tolist(), strict=True))


def check_numbers(
    plugin: str, block: Block, patterns: Mapping[str, Pattern], results: Mapping[str, PruneResult]
) -> None:
    """Refuse masks with other zeros than the patterns', or other masks than were fixed, and weights that are none.

    Raises:
        PluginError: the message names plugin and linear, or the module of units.
    """
    # Of a mask that was fixed, too: a pruner could change it in place.
    chosen = {n: p.asked for n, p in patterns.items()}
    structured = {p.units.fqn: p for p in of_units(chosen.values())}
    asked: dict[tuple[str, str], Tensor] = {}
    for name, result in results.items():
        asked |= {(what, name): x for what, x in _counted(patterns[name], block.linears[name], result).items()}
    for fqn, pattern in structured.items():
        asked |= {(what, fqn): x for what, x in _counted_units(pattern, results).items()}
    found = fetched(asked)
    for name, result in results.items():
        _check_linear(f"pruner {plugin!r} on {name}", patterns[name], block.linears[name], result, found)
    for fqn, pattern in structured.items():
        _check_units(f"pruner {plugin!r} on {fqn}", pattern, found)
    if joint := competing(chosen):
        _check_joint_total(f"pruner {plugin!r} on {block.fqn}", {n: chosen[n] for n in joint}, results, found)


def refuse_lost_zeros(block: Block, masks: Mapping[str, MaskEntry]) -> None:
    """Refuse weights of a block that has run again, or was trained, and that are not zero where its masks drop them.

    Raises:
        ArtifactError: the message names a linear.
    """
    weights = {name: block.linears[name].weight for name in masks}
    lost = fetched({n: torch.count_nonzero((x != 0) > to_device(masks[n].keep, x.device)) for n, x in weights.items()})
    for name, count in lost.items():
        if count:
            raise ArtifactError(
                f"{name}: {count} weights that its mask drops are there again after pruning; look for hooks that write "
                "it"
            )


def _counted(pattern: Pattern, linear: Linear, result: PruneResult) -> dict[str, Tensor]:
    asked = {}
    if isinstance(pattern, FixedMask):
        asked["others"] = (result.keep != pattern.keep).sum()
    groups = pattern.asked.groups(*result.keep.shape)
    if groups and groups[0] <= result.keep.shape[1]:  # within rows
        kept = groups[0] - groups[1]
        least, most = count_in_groups(result.keep, groups[0]).aminmax()
        asked["misplaced"] = (least != kept) | (most != kept)
    else:
        asked["zeros"] = result.keep.numel() - torch.count_nonzero(result.keep)  # a sixth of the time of a sum
    if result.weight is not None:
        asked["finite"] = new_weight(linear, result.keep, result.weight).sum(dtype=torch.float32).isfinite()
    if result.bias is not None:
        asked["finite bias"] = result.bias.to(linear.held.dtype).isfinite().all()
    return asked


def _check_linear(who: str, pattern: Pattern, linear: Linear, result: PruneResult, found: _Found) -> None:
    name, dtype = linear.name, linear.held.dtype
    if found.get(("others", name)):
        raise PluginError(f"{who}: a reconstructing pruner must return the mask that it was given")
    groups = pattern.asked.groups(*result.keep.shape)
    if groups and groups[0] <= result.keep.shape[1]:
        if found["misplaced", name]:
            wrong = misplaced_groups(result.keep, groups[0], groups[0] - groups[1])
            raise PluginError(f"{who}: pattern {pattern} means that {wrong}")
    elif (expected := pattern.asked.zeros(*result.keep.shape)) not in (None, zeros := found["zeros", name]):
        raise PluginError(f"{who}: pattern {pattern} means {expected} zeros of {result.keep.numel()}, got {zeros}")
    # A sum that is not finite may have overflowed.
    damaged = result.weight is not None and not found["finite", name]
    if damaged and not all_finite(new_weight(linear, result.keep, result.weight)):
        raise PluginError(f"{who}: it returned weights that are NaN or infinite in the model's {dtype}")
    if not found.get(("finite bias", name), True):
        raise PluginError(f"{who}: it returned a bias that is NaN or infinite in the model's {dtype}")


def _counted_units(pattern: Structured, results: Mapping[str, PruneResult]) -> dict[str, Tensor]:
    """Count the weights whose masks differ from those of their unit, and the units that go."""
    units = pattern.units
    masks = {n: results[n].keep for n in units.owners}
    kept = units.kept(masks)
    whole = units.masks(kept, {n: (len(x), x.shape[1]) for n, x in masks.items()})
    return {"torn": torch.stack([(whole[n] != x).sum() for n, x in masks.items()]).sum(), "dropped": (~kept).sum()}


def _check_units(who: str, pattern: Structured, found: _Found) -> None:
    """Refuse masks that keep parts of units, or another number of them."""
    units = pattern.units
    if torn := found["torn", units.fqn]:
        raise PluginError(
            f"{who}: {units.kind} go or stay whole, in all of {', '.join(units.owners)}, but {torn} weights are "
            "dropped of units that are kept; make the masks by compressx.keep_masks or pattern.units.masks"
        )
    if (dropped := found["dropped", units.fqn]) != pattern.dropped:
        raise PluginError(
            f"{who}: pattern {pattern} means that {pattern.dropped} of {units.count} units go, got {dropped}"
        )


def _check_joint_total(
    who: str, joint: Mapping[str, Pattern], results: Mapping[str, PruneResult], found: _Found
) -> None:
    """Refuse another number of zeros over all linears that share a budget."""
    pattern, zeros = next(iter(joint.values())), sum(found["zeros", name] for name in joint)
    expected = count_dropped(pattern.sparsity, sum(results[name].keep.numel() for name in joint))
    if zeros != expected:
        raise PluginError(f"{who}: {pattern} means {expected} zeros over {', '.join(joint)}, got {zeros}")


def answer_of(
    plugin: str, pruner: AnyPruner, block: Block, patterns: Mapping[str, Pattern], observed: Mapping[str, Observed],
    kept: dict[Observed, Any] | None = None,
) -> Any:  # fmt: skip
    """Call a pruner's `prune`; what it returns is not looked at. Without `kept` one prepared value is held at a time.

    Raises:
        PluginError: any exception of the pruner's that is not for users.
    """
    stats = {name: of.statistic for name, of in observed.items()}
    with blamed_on(f"pruner {plugin!r} failed on {block.fqn}"):
        if isinstance(pruner, PreparingPruner):
            return pruner.prune(block, patterns, stats, Prepared(plugin, pruner, block, observed, kept))
        return pruner.prune(block, patterns, stats)


class Prepared(Mapping[str, Any]):
    """By linear name, what a pruner prepared of the linear's statistic.

    Iterates over linears that share a statistic in turn.

    The arguments are those of `answer_of`.
    """

    def __init__(
        self, plugin: str, pruner: PreparingPruner, block: Block, observed: Mapping[str, Observed],
        kept: dict[Observed, Any] | None = None,
    ) -> None:  # fmt: skip
        self._plugin, self._pruner, self._block = plugin, pruner, block
        order = list(dict.fromkeys(observed.values()))
        self._observed = dict(sorted(observed.items(), key=lambda item: order.index(item[1])))
        self._made, self._keeps = ({}, False) if kept is None else (kept, True)

    def __getitem__(self, name: str) -> Any:
        """Return a value, computed now unless it is kept.

        Raises:
            PluginError: any exception of `prepare`'s that is not for users; the message names plugin and linear.
        """
        of = self._observed[name]
        if of not in self._made:
            if not self._keeps:
                self._made.clear()  # before the next takes as much room
            with blamed_on(f"prepare of pruner {self._plugin!r} failed on {name}"):
                self._made[of] = self._pruner.prepare(self._block, name, of.statistic)
        return self._made[of]

    def __iter__(self) -> Iterator[str]:
        return iter(self._observed)

    def __len__(self) -> int:
        return len(self._observed)
