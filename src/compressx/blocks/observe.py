"""Hooks on inputs and outputs of linears, fused experts included, which feed statistics while a block runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compressx.api.pruner import Linear, RoutedStatistic, Statistic
from compressx.models.arithmetic import original
from compressx.runtime.errors import CalibrationError, PluginError, UnsupportedModelError, blamed_on
from compressx.runtime.finite import first_damaged

Hook: TypeAlias = Callable[[str, Tensor], None]
"""Called with a linear's name and its input or output [batch, tokens, features]; [tokens, features] behind a router."""

_MATMULS = (nn.functional.linear, Tensor.__matmul__, Tensor.matmul, torch.matmul, torch.bmm, Tensor.bmm)
"""Functions by which experts multiply."""


@dataclass(frozen=True, eq=False)
class SharedStatistic:
    """A statistic. Linears that share it hold the same object, which is the key of what is computed from it.

    Attributes:
        statistic: what sums up the inputs.
        pruner: the name of the plugin that asked for it, for the message if it fails.
        fresh: makes an empty statistic of the same kind.
    """

    statistic: Statistic
    pruner: str = ""
    fresh: Callable[[], Statistic | None] = lambda: None


def observe(
    linears: Mapping[str, Linear],
    wanted: dict[str, dict[str, SharedStatistic]],
    passes: Sequence[Callable[[], Any]],
) -> set[str]:
    """Run a block and fill the statistics that its linears' pruners asked for.

    Linears that are handed the same tensor (query, key and value; gate and up) share every statistic that compares
    equal: `wanted` is updated in place so that they hold one `SharedStatistic`.

    Args:
        linears: by name.
        wanted: by linear name, then by the role that asked; fresh statistics.
        passes: each runs the block on one batch.

    Returns:
        The names of those linears in `wanted` that a batch reached.
    """
    asked = {name: stats for name, stats in wanted.items() if stats}
    if not asked:
        return set()
    mine = {name: linears[name] for name in asked}
    routed = {n: mine[n] for n, stats in asked.items() if any(is_routed(s.statistic) for s in stats.values())}
    with routing_watched(routed) as weights, linears_watched(mine, feed := _StatisticFeed(asked, weights)):
        _run(passes, feed)
    if uncalled := {n: x for n, x in mine.items() if n not in feed.reached and x.expert is None}:
        with _uncalled_watched(uncalled, before=feed):
            _run(passes, feed)
    return feed.reached


def _run(passes: Sequence[Callable[[], Any]], feed: _StatisticFeed) -> None:
    for run in passes:
        try:
            with suppress(_AllObservedError):
                run()
        finally:
            feed.finish_batch()


def is_routed(statistic: Statistic) -> TypeGuard[RoutedStatistic]:
    """Return whether a statistic is given the router's weights, too."""
    return getattr(statistic, "routed", False) is True


def refuse_missed(names: Collection[str], reached: Collection[str]) -> None:
    """Refuse linears that no token reached: their statistics are empty."""
    if missed := sorted({*names} - {*reached}):
        others = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        end, advice = missed[0].rpartition(".")[2], "an expert may need more calibration samples"
        if not end.isdigit():  # an expert's name ends in its number
            advice += (
                "; a linear that the model does not call, such as Mamba's dt_proj, cannot be calibrated: leave it out "
                f"by ignore: ['*.{end}']"
            )
        raise CalibrationError(f"no calibration token reached {missed[0]}{others}; {advice}")


@contextmanager
def unchanged(pruner: str, where: str, *given: Tensor) -> Iterator[None]:
    """Refuse a statistic whose `update`, called inside the `with`, changes what it is given.

    Args:
        pruner: the name of the plugin that asked for the statistic.
        where: the name of the linear.
        given: its arguments, which the model and other statistics use after it.
    """
    before = [x._version for x in given]  # counted by torch, also for views, without a wait for the device
    yield
    if [x._version for x in given] != before:
        raise PluginError(
            f"update of the statistic of pruner {pruner!r} changed its input on {where} in place, which the model and "
            "other statistics go on with; write x = x - y instead of x -= y, and x.abs() instead of x.abs_()"
        )


class _AllObservedError(Exception):
    """Ends a block's forward once every linear has had its input: the rest is not needed."""


class _StatisticFeed:
    """Gives each input to the statistics of its linear, once for all linears that share input and statistic."""

    def __init__(self, wanted: dict[str, dict[str, SharedStatistic]], weights: Callable[[str, int], Tensor]) -> None:
        self.wanted = wanted
        self.weights = weights  # of the router, for the tokens that an expert's linear is given
        self.reached: set[str] = set()
        self.sharing: set[tuple[str, str]] = set()  # (linear, role) with another linear's statistic
        # Of the running batch: the first linear of each distinct input, the input, and the statistics that it updated.
        # Inputs are held, since a freed one's address may be another's.
        self.batch: list[tuple[str, Tensor, list[SharedStatistic]]] = []
        self.calls: list[str] = []  # of the batch that is running
        self.once = False  # whether every linear was called exactly once in the batch before

    def __call__(self, name: str, x: Tensor) -> None:
        self._take(name, x)
        self.calls.append(name)
        if self.once and len(set(self.calls)) == len(self.wanted):
            raise _AllObservedError

    def _take(self, name: str, x: Tensor) -> None:
        updated = next((statistics for _, seen, statistics in self.batch if seen is x), None)
        if updated is None:
            updated = []
            self.batch.append((name, x, updated))
        first = name not in self.reached
        earlier = list(updated)  # by linears before this one, not by another role of this one
        self.reached.add(name)
        for role, mine in self.wanted[name].items():
            if mine in updated:
                continue
            # Only fresh statistics are alike when they compare equal, so sharing is settled at the first batch.
            twin = next((s for s in updated if first and s.statistic == mine.statistic), None)
            if twin is not None:
                self.wanted[name][role] = twin
                if twin in earlier:
                    self.sharing.add((name, role))
            elif (name, role) in self.sharing and not self._separated(name, role):
                raise UnsupportedModelError(
                    f"{name} shared its input with another linear on the first batch and has one of its own on a later "
                    "one; give it a recipe rule with another pruner"
                )
            else:
                own = self.wanted[name][role]
                weights = (self.weights(name, len(x)),) if is_routed(own.statistic) else ()
                # The block's matmuls may be narrow; a Hessian of bfloat16 matmuls has negative eigenvalues.
                with (
                    torch.autocast(x.device.type, enabled=False),
                    unchanged(own.pruner, name, x, *weights),
                    blamed_on(f"update of the statistic of pruner {own.pruner!r} failed on {name}"),
                ):
                    own.statistic.update(x, *weights)
                updated.append(own)

    def _separated(self, name: str, role: str) -> bool:
        """Give a linear a copy of the statistic that it shares, if that has seen exactly the linear's inputs so far."""
        shared = self.wanted[name][role]
        if sum(shared in statistics for _, _, statistics in self.batch) != self.calls.count(name):
            return False
        self.wanted[name][role] = replace(shared, statistic=copy.deepcopy(shared.statistic))
        self.sharing.remove((name, role))
        return True

    def finish_batch(self) -> None:
        """Release the inputs of the batch that has run, and decide whether the next one may end early."""
        # All together, since the host waits for each check, and also after the block has failed: this may be why.
        damaged = first_damaged([x for _, x, _ in self.batch])
        if damaged is not None:
            name = self.batch[damaged][0]
            raise CalibrationError(f"the input of {name} has NaN or infinite values on the calibration text")
        self.once = sorted(self.calls) == sorted(self.wanted)
        self.calls.clear()
        self.batch.clear()


def _ignore(_name: str, _x: Tensor) -> None: ...


@contextmanager
def linears_watched(linears: Mapping[str, Linear], before: Hook = _ignore, after: Hook = _ignore) -> Iterator[None]:
    """Inside the `with`, call `before` with each linear's name and input, and `after` with its name and output."""
    with ExitStack() as hooks:
        for name, module in ((n, x.module) for n, x in linears.items() if x.expert is None):
            if before is not _ignore:
                hand = partial(_hand_input, before, name)
                hooks.callback(module.register_forward_pre_hook(hand, with_kwargs=True).remove)
            if after is not _ignore:
                hooks.callback(module.register_forward_hook(partial(_hand_output, after, name)).remove)
        if any(x.expert is not None for x in linears.values()):
            hooks.enter_context(_experts_watched(linears, before, after))
        if after is not _ignore:
            hooks.enter_context(_uncalled_watched(linears, after=after))
        yield


def _hand_input(hook: Hook, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hook(name, args[0] if args else next(iter(kwargs.values())))


def _hand_output(hook: Hook, name: str, _: nn.Module, _args: Any, output: Tensor) -> None:
    hook(name, output)


@contextmanager
def routing_watched(linears: Mapping[str, Linear]) -> Iterator[Callable[[str, int], Tensor]]:
    """Yield a function that returns the router's weights of the tokens that an expert's linear was just given.

    Args:
        linears: of fused experts, by name.

    Yields:
        Takes one of the names and the number of tokens of its input, and returns [tokens] in their order, while the
        experts run. The device is not waited for.
    """
    chosen: dict[int, tuple[Tensor, Tensor]] = {}  # by module: experts [tokens, k], weights by expert [k * tokens]

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if not {"top_k_index", "top_k_weights"} <= given.keys():
            raise UnsupportedModelError(
                f"{type(module).__name__} is called with {', '.join(given)}, expected top_k_index and top_k_weights, "
                "which are the router's weights"
            )
        experts, by_token = given["top_k_index"], given["top_k_weights"]  # both [tokens, k]
        # The eager implementation gives an expert all tokens that chose it first, then those that chose it second.
        order = experts.T.flatten().argsort(stable=True)
        chosen[id(module)] = experts, by_token.T.flatten()[order]

    def weights(name: str, tokens: int) -> Tensor:
        experts, by_expert = chosen[id(linears[name].module)]
        start = torch.lt(experts, linears[name].expert or 0).sum()  # stays on the device: nothing waits for it
        return by_expert[start + torch.arange(tokens, device=start.device)]

    with ExitStack() as hooks:
        for module in {x.module for x in linears.values()}:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield weights


@contextmanager
def _uncalled_watched(linears: Mapping[str, Linear], before: Hook = _ignore, after: Hook = _ignore) -> Iterator[None]:
    """Watch matmuls `weight @ x`, x [batch, features, tokens], by weights of modules that are never called.

    Mamba's `dt_proj` is one: without a call, no hook of the module runs.
    """
    name_at = {x.held.data_ptr(): name for name, x in linears.items() if x.expert is None}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = function(*args, **(kwargs or {}))
            name = name_at.get(original(args[0]).data_ptr()) if function in _MATMULS else None
            if name is None:
                return output
            before(name, args[1].mT)
            after(name, turned := output.mT)
            return turned.mT  # not `output`: `after` may have put a hook on `turned`

    with Watch():
        yield


@contextmanager
def _experts_watched(linears: Mapping[str, Linear], before: Hook, after: Hook) -> Iterator[None]:
    """Watch matmuls by fused expert parameters, in transformers' eager implementation."""
    experts = [linear for linear in linears.values() if linear.expert is not None]
    configs = {id(c): c for linear in experts if (c := getattr(linear.module, "config", None)) is not None}
    implementations = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = "eager"
        with _ExpertMatmuls(experts, before, after):
            yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = implementations[key]


class _ExpertMatmuls(TorchFunctionMode):
    """Calls hooks with inputs and outputs of experts, which are not modules and have no hooks of their own.

    Nearly all multiply by one slice of a parameter at a time, whose address identifies the expert. Llama 4 multiplies
    all tokens by all experts at once. It scales them by the router's scores first: 0 for a token not sent to an expert.
    """

    def __init__(self, experts: Collection[Linear], before: Hook, after: Hook) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.name_at = {linear.held.data_ptr(): linear.name for linear in experts}
        self.names = {(x.module, x.parameter, x.expert): x.name for x in experts}
        modules = {linear.module for linear in experts}
        self.whole_at = {x.data_ptr(): (m, n) for m in modules for n, x in m.named_parameters(recurse=False)}
        self.sent: dict[nn.Module, Tensor] = {}  # bool [experts, tokens]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        address = original(args[1]).data_ptr() if function in _MATMULS and len(args) > 1 else -1
        name, whole = self.name_at.get(address), self.whole_at.get(address)
        if whole is not None and args[0].dim() == 3 and len(args[0]) == len(args[1]):
            return self._each(*whole, args[0], function(*args, **(kwargs or {})))
        if name is None or not len(args[0]):  # JetMoE also multiplies 0 tokens
            return function(*args, **(kwargs or {}))
        self.before(name, args[0])
        output = function(*args, **(kwargs or {}))
        self.after(name, output)
        return output

    def _each(self, module: nn.Module, parameter: str, x: Tensor, output: Tensor) -> Tensor:
        """Call the hooks with the tokens of each expert, of [experts, tokens, features]; return the output."""
        if parameter != "down_proj":  # the input of down_proj may be 0 for other reasons
            self.sent[module] = x.ne(0).any(dim=-1)
        sent = self.sent[module]
        counts = sent.sum(dim=1).tolist()
        given, gave = (torch.split(part[sent], counts) for part in (x, output))
        for hook, parts in ((self.before, given), (self.after, gave)):
            for expert, tokens in enumerate(parts):
                if (name := self.names.get((module, parameter, expert))) and len(tokens):
                    hook(name, tokens)
        # So that gradients with respect to the parts, which `after` may ask for, are those of the output.
        return output.masked_scatter(sent[..., None], torch.cat(gave)) if output.requires_grad else output
