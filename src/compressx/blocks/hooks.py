"""Hooks on the inputs and outputs of a model's linears, fused experts included."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compressx.api.pruner import Linear
from compressx.models.arithmetic import original
from compressx.runtime.errors import UnsupportedModelError

Take: TypeAlias = Callable[[str, Tensor], None]
"""Called with a linear's name and [batch, tokens, features], or [tokens, features] behind a router."""


_PRODUCTS = (nn.functional.linear, Tensor.__matmul__, Tensor.matmul, torch.matmul)
"""By which experts multiply."""


@contextmanager
def inputs_watched(linears: Mapping[str, Linear], take: Take) -> Iterator[None]:
    """Call `take` with the name and input of each linear before it runs, inside the `with`."""
    with ExitStack() as hooks:
        for name, linear in _plain(linears).items():

            def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                take(name, args[0] if args else next(iter(kwargs.values())))

            handle = linear.module.register_forward_pre_hook(before, with_kwargs=True)
            hooks.callback(handle.remove)
        hooks.enter_context(_experts_watched(linears, take, lambda _name, _output: None))
        yield


@contextmanager
def outputs_watched(linears: Mapping[str, Linear], take: Take) -> Iterator[None]:
    """Call `take` with the name and output of each linear after it runs, inside the `with`."""
    with ExitStack() as hooks:
        for name, linear in _plain(linears).items():

            def after(_: nn.Module, _args: Any, output: Tensor, name: str = name) -> None:
                take(name, output)

            hooks.callback(linear.module.register_forward_hook(after).remove)
        hooks.enter_context(_experts_watched(linears, lambda _name, _input: None, take))
        yield


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
        experts, by = given["top_k_index"], given["top_k_weights"]
        # The eager implementation gives an expert all tokens that chose it first, then those that chose it second.
        order = experts.T.flatten().argsort(stable=True)
        chosen[id(module)] = experts, by.T.flatten()[order]

    def weights(name: str, tokens: int) -> Tensor:
        experts, by_expert = chosen[id(linears[name].module)]
        start = torch.lt(experts, linears[name].expert or 0).sum()  # only the device knows it
        return by_expert[start + torch.arange(tokens, device=start.device)]

    with ExitStack() as hooks:
        for module in {x.module for x in linears.values()}:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield weights


def _plain(linears: Mapping[str, Linear]) -> dict[str, Linear]:
    return {name: linear for name, linear in linears.items() if linear.expert is None}


@contextmanager
def _experts_watched(linears: Mapping[str, Linear], before: Take, after: Take) -> Iterator[None]:
    """Watch the products with slices of fused expert parameters, if there are any.

    Fused experts are not modules, so they have no hooks. The eager implementation of transformers multiplies by one
    slice at a time, with `torch.nn.functional.linear` or `@`, where the slice's address identifies the expert.
    """
    experts = [linear for linear in linears.values() if linear.expert is not None]
    if not experts:
        yield
        return
    name_at = {linear.weight.data_ptr(): linear.name for linear in experts}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = name_at.get(original(args[1]).data_ptr()) if function in _PRODUCTS else None
            if name is None:
                return function(*args, **(kwargs or {}))
            before(name, args[0])
            output = function(*args, **(kwargs or {}))
            after(name, output)
            return output

    configs = {id(c): c for linear in experts if (c := getattr(linear.module, "config", None)) is not None}
    implementations = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = "eager"
        with Watch():
            yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = implementations[key]
