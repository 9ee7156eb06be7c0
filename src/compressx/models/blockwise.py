"""The loop over decoder blocks, for models in memory and for streamed ones.

A model's forward computes embeddings, rotary tables and masks, and calls each block with them. `capture` runs it once
per batch with every block replaced by one that records its arguments and returns its input. The hidden states are then
run through each block alone (`each_block`, `advance`), and passed to the rest of the model (`run_around`).
"""

from __future__ import annotations

import contextlib
import copy
import dis
import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from compressx.api.pruner import Block, BlockCall, Linear
from compressx.models.access import Access, differences
from compressx.models.architecture import Architecture, text_config
from compressx.models.arithmetic import matmuls_in
from compressx.models.shards import OUTSIDE
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.files import os_errors_named
from compressx.runtime.finite import first_damaged, looks_finite, not_finite
from compressx.runtime.transfer import to_device, to_host, written_behind

KeepStates: TypeAlias = Callable[[Tensor], Tensor]
"""Stores the hidden states of one batch; returns a persistent, writable tensor of the same values."""

_PROBE_TOKENS = 16
"""Length of the sequence that only shows how blocks are called."""

_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""What a model's own code may raise on the meta device or on weights of zeros."""


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The hidden states between two blocks, one [batch, tokens, width] for each calibration batch.

    `dense` are the dense blocks' output, if blocks are reconstructed, else empty.
    """

    pruned: Sequence[Tensor]
    dense: Sequence[Tensor] = ()


def in_memory(states: Tensor) -> Tensor:
    """Return the tensor itself."""
    return states


@dataclass
class StateFiles:
    """Keeps each batch in a memory-mapped file, so that the kernel can evict its pages.

    Attributes:
        folder: for the files; created if missing.
    """

    folder: Path
    _count: int = field(default=0, init=False)

    def __call__(self, states: Tensor) -> Tensor:
        """Return a copy in a file. Its space is reserved: on a full disk, a write to a mapping kills the process."""
        path = self.folder / f"{self._count}.states"
        self._count += 1
        with os_errors_named("write", path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                reserve = getattr(os, "posix_fallocate", lambda fd, _, size: os.truncate(fd, size))  # macOS has none
                reserve(file.fileno(), 0, max(1, states.numel() * states.element_size()))
        mapped = torch.from_file(str(path), shared=True, size=states.numel(), dtype=states.dtype)
        return mapped.view(states.shape).copy_(to_host(states))


class _Output(Tensor):
    """Output of a replaced block, usable as a tensor or as a tuple whose first item is the tensor."""

    plain: Tensor
    fqn: str
    # Operations on it return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        # Only the caller's bytecode shows how long the tuple has to be: `hidden_states, indices = block(...)`.
        caller = sys._getframe(1)
        reading = next(x for x in dis.get_instructions(caller.f_code) if x.offset == caller.f_lasti)
        if reading.opname != "UNPACK_SEQUENCE":
            raise UnsupportedModelError(
                f"{self.fqn}: the model iterates over the output of this block; supported are models that use it "
                "whole, index it, or unpack it into names"
            )
        return (self[i] for i in range(reading.argval))

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModelError(
            f"{self.fqn}: the model reads {name} of the output of this block; supported are tensors, and tuples whose "
            "first item is the hidden states"
        )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.plain if index == 0 else _ExtraOutput(self.fqn, index)
        return self.plain[index]


@dataclass(frozen=True)
class _ExtraOutput:
    """Stands for what a replaced block would return besides its hidden states, as item `index` of its output."""

    fqn: str
    index: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedModelError(
            f"{self.fqn}: the model reads {name} of what this block returns at {self.index}, which can only be handed "
            "on to later blocks"
        )

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise UnsupportedModelError(
            f"the model computes {function.__name__} of what a block returns besides hidden states, which can only be "
            "handed on to later blocks"
        )


@dataclass(frozen=True, eq=False)
class LinkedCall(BlockCall):
    """A call of a block that passes extra outputs to later ones, besides hidden states, or receives them.

    `extra` has those outputs by the block's name, and is the same object for all blocks of a batch. Those of the blocks
    `done`, which no later block receives, are deleted after the call.
    """

    fqn: str
    extra: UserDict[str, tuple[Any, ...]]
    done: frozenset[str]


class _AllBlocksReachedError(Exception):
    """Stops the model's forward once the last block has been called."""


def capture_calls(
    model: Callable[..., Any], blocks: Mapping[str, nn.Module], batches: Sequence[Tensor], keep: KeepStates = in_memory
) -> tuple[list[Tensor], dict[str, list[BlockCall]]]:
    """Record the hidden states before the first block, and each block's further arguments.

    A model is refused unless each block is called once, in order, on the previous block's output. `batches` are token
    ids, each [batch, tokens].

    Returns:
        The input of block 0, [batch, tokens, width] for each batch, stored by `keep`; and for each block, one call per
        batch. Equal tensors (rotary tables, masks) are one object for all batches and blocks.
    """
    states: list[Tensor] = []
    calls: dict[str, list[BlockCall]] = {fqn: [] for fqn in blocks}
    known: list[Tensor] = []
    for batch in batches:
        entered, made = _calls_of(model, blocks, batch)
        states.append(keep(entered))
        for fqn, call in _linked(made).items():
            calls[fqn].append(_mapped(call, partial(_deduplicated, known=known)))
    return states, calls


def _calls_of(
    model: Callable[..., Any], blocks: Mapping[str, nn.Module], batch: Tensor
) -> tuple[Tensor, dict[str, BlockCall]]:
    """Return what enters the first block, and the other arguments of each, for one batch."""
    passed: list[Tensor] = []
    reached: list[str] = []
    made: dict[str, BlockCall] = {}
    order = list(blocks)

    def record(fqn: str, hidden: Tensor, call: BlockCall) -> Tensor:
        if reached and not _same(hidden, passed[-1]):
            raise UnsupportedModelError(
                f"{fqn}: the model changes the hidden states between {reached[-1]} and this block, so blocks cannot be "
                "pruned one at a time"
            )
        if hidden.dim() != 3:
            raise UnsupportedModelError(
                f"{fqn} takes hidden states {[*hidden.shape]}, expected [batch, tokens, width]; a model with several "
                "residual streams can only be pruned without calibration, such as by magnitude"
            )
        reached.append(fqn)
        passed.append(hidden)
        made[fqn] = call
        if fqn == order[-1]:
            raise _AllBlocksReachedError
        return hidden

    with replaced_forwards(blocks, record), torch.no_grad(), contextlib.suppress(_AllBlocksReachedError):
        model(batch, use_cache=False)
    if reached != order:
        raise UnsupportedModelError(
            f"{order[0].rpartition('.')[0]}: expected its {len(order)} blocks to be called once each, in order; "
            f"called: {', '.join(reached) or 'none'}"
        )
    return passed[0], made


def _linked(calls: Mapping[str, BlockCall]) -> dict[str, BlockCall]:
    """Make `LinkedCall`s of those calls of a batch, by block in order, that pass or receive extra outputs."""
    extra: UserDict[str, tuple[Any, ...]] = UserDict()
    wanted: set[str] = set()
    linked: dict[str, BlockCall] = {}
    for fqn, call in reversed([*calls.items()]):  # `wanted`: what later blocks receive
        found: list[str] = []
        _mapped(call, lambda x, found=found: found.append(x.fqn) if isinstance(x, _ExtraOutput) else None)  # type: ignore[misc]
        linked[fqn] = call
        if found or fqn in wanted:
            linked[fqn] = LinkedCall(call.args, call.kwargs, fqn, extra, frozenset({*found, fqn}) - wanted)
        wanted |= {*found}
    return linked


def check_calls(model: nn.Module, found: Architecture) -> tuple[bool, set[str]]:
    """Refuse before weights are read what `capture_calls` would refuse after; nothing of the model is changed.

    The model runs with its blocks skipped and with zeros, which take no memory, for all weights outside of them. Then
    each block runs on the meta device.

    Returns:
        Whether a block receives more of an earlier one than hidden states; and linears that their blocks do not call,
        such as the attention of a decoder to an encoder that is not there.
    """
    zeros = {
        name: torch.zeros((), dtype=x.dtype).expand(x.shape)
        for name, x in chain(model.named_parameters(), model.named_buffers())
        if not found.block_of(name)
    }
    linked, unused = False, set[str]()
    # Other failures say nothing about the structure: the zeros may cause them.
    with evaluation_mode(model), torch.no_grad(), contextlib.suppress(*_FAILURES):
        weightless = lambda ids, **settings: functional_call(model, zeros, (ids,), settings)  # noqa: E731 - one call
        (state,), calls = capture_calls(weightless, found.blocks, [torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)])
        linked = any(isinstance(call, LinkedCall) for made in calls.values() for call in made)
        for fqn, block in found.blocks.items():
            with contextlib.suppress(*_FAILURES):  # of a block that cannot be copied
                (call,) = calls[fqn]
                unused |= _unused(block, found.inside(fqn), state.to("meta"), _mapped(call, _on_meta))
    return linked, unused


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _unused(block: nn.Module, linears: Mapping[str, Linear], state: Tensor, call: BlockCall) -> set[str]:
    """Return the linears of a block whose input cannot be seen: neither called nor the first factor of a matmul."""
    twins: dict[int, Any] = {id(x): nn.Parameter(_on_meta(x), x.requires_grad) for x in block.parameters()}
    twins |= {id(x): _on_meta(x) for x in block.buffers()}
    twin = copy.deepcopy(block, twins)  # of no memory
    names = {name: x for name, x in linears.items() if x.expert is None}
    first = {id(twins[id(getattr(x.module, x.parameter))]): name for name, x in names.items()}
    seen, converted = set[str](), set[str]()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and (name := first.get(id(args[0]))) is not None:
                operation = getattr(function, "__name__", "")
                seen.update({name} if "matmul" in operation else ())
                converted.update({name} if operation in {"float", "to", "type"} else ())
            return function(*args, **(kwargs or {}))

    for module in twin.modules():
        called = [first[id(x)] for x in module.parameters(recurse=False) if id(x) in first]
        module.register_forward_pre_hook(lambda *_, called=called: seen.update(called))
    try:
        with Watch():
            replay(twin, state, call)
    except _FAILURES:  # such as experts, whose code reads numbers, which meta tensors lack
        return converted - seen
    return {*names} - seen


def replay(block: nn.Module, hidden: Tensor, call: BlockCall) -> Tensor:
    """Run one block on hidden states [batch, tokens, width] with recorded arguments.

    For float32 hidden states, tensors of fewer bits among the arguments (ALiBi, additive masks) are converted to
    float32 too, unless autocast is enabled.
    """
    if isinstance(linked := call, LinkedCall):
        extra = linked.extra
        call = _mapped(call, lambda x: extra[x.fqn][x.index] if isinstance(x, _ExtraOutput) else x)
    if hidden.dtype == torch.float32 and (hidden.is_meta or not torch.is_autocast_enabled(hidden.device.type)):
        narrow = (torch.bfloat16, torch.float16)
        call = _mapped(call, lambda x: x.float() if isinstance(x, Tensor) and x.dtype in narrow else x)
    output = block(hidden, *call.args, **call.kwargs)
    result: Tensor = output[0] if isinstance(output, tuple | list) else output
    if isinstance(linked, LinkedCall) and isinstance(output, tuple | list):
        linked.extra[linked.fqn] = (None, *output[1:])
    return result


def run_around(model: Any, blocks: Mapping[str, nn.Module], ids: Tensor, state: Tensor) -> Any:
    """Run a model on token ids with its blocks skipped and `state` as the last block's output."""
    first = next(iter(blocks))
    with replaced_forwards(blocks, lambda fqn, hidden, _: state if fqn == first else hidden):
        return model(ids, use_cache=False)


def skipped(blocks: Mapping[str, nn.Module]) -> AbstractContextManager[None]:
    """Skip blocks within a `with`, also in training: each returns the hidden states that it is given."""
    return replaced_forwards(blocks, lambda _fqn, hidden, _call: hidden)


@contextlib.contextmanager
def replaced_forwards(
    blocks: Mapping[str, nn.Module], forward: Callable[[str, Tensor, BlockCall], Tensor]
) -> Iterator[None]:
    """Replace the forward of every block by `forward(fqn, hidden_states, call)` within a `with`."""

    def stand_in(fqn: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            hidden, further = (kwargs.pop("hidden_states"), args) if "hidden_states" in kwargs else (args[0], args[1:])
            if isinstance(hidden, _Output):
                hidden = hidden.plain
            result = forward(fqn, hidden, BlockCall(further, kwargs))
            output = result.as_subclass(_Output)
            output.plain, output.fqn = result, fqn
            return output

        return run

    own = {fqn: vars(module)["forward"] for fqn, module in blocks.items() if "forward" in vars(module)}
    try:
        for fqn, module in blocks.items():
            module.forward = stand_in(fqn)
        yield
    finally:
        for fqn, module in blocks.items():
            vars(module).pop("forward", None)
            if fqn in own:
                module.forward = own[fqn]


def _same(hidden: Tensor, passed: Tensor) -> bool:
    """Return whether hidden states are the output of the block before, or a view of all of it."""
    return hidden is passed or (
        hidden.data_ptr() == passed.data_ptr()
        and (hidden.shape, hidden.stride(), hidden.dtype) == (passed.shape, passed.stride(), passed.dtype)
    )


def _deduplicated(value: Any, known: list[Tensor]) -> Any:
    """Replace a tensor by an equal one in `known`: rotary tables and masks repeat for batches of one shape."""
    if not isinstance(value, Tensor) or any(other is value for other in known):
        return value
    for other in () if value.is_meta else known:
        if other.shape == value.shape and other.dtype == value.dtype and torch.equal(other, value):
            return other
    known.append(value)
    return value


def _mapped(call: BlockCall, change: Callable[[Any], Any]) -> BlockCall:
    """Return a call with `change` applied to each argument, and to each item of those that are containers."""

    def inside(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(inside, value))
        return {k: inside(v) for k, v in value.items()} if isinstance(value, dict) else change(value)

    return replace(call, args=inside(call.args), kwargs=inside(dict(call.kwargs)))


def copy_shared_states(call: BlockCall, copies: dict[int, Any] | None = None) -> BlockCall:
    """Return a call with copies of its `shared_states`; the tensors there are the same.

    `copies` are those made already, by id of the original: several blocks' calls get the same copy.
    """
    made = {} if copies is None else copies
    if not shared_states(call):
        return call

    def own(value: Any) -> Any:
        return made.setdefault(id(value), copy.copy(value)) if isinstance(value, UserDict) else value

    extra = {"extra": own(call.extra)} if isinstance(call, LinkedCall) else {}
    return replace(_mapped(call, own), **extra)


def shared_states(call: BlockCall) -> list[UserDict[Any, tuple[Any, ...]]]:
    """Return what a model's blocks share besides hidden states: keys and values that later blocks of Gemma 4 use again.

    It is in a `UserDict` among a block's arguments, the same object for all blocks of a batch, and in `LinkedCall`s.
    """
    extra = [call.extra] if isinstance(call, LinkedCall) else []
    return [*extra, *(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, UserDict))]


class BlockwiseBackward:
    """Blocks from last to first, with the gradients that reach their `shared_states`.

    A block that reads them is a function of them. Their gradients are added up over all blocks that read them, and are
    passed to the block that wrote them.
    """

    def __init__(self, call: BlockCall) -> None:
        self._states = shared_states(call)
        self._leaves: list[dict[Any, tuple[Any, ...]]] = [{} for _ in self._states]
        self._gradients: dict[int, Tensor] = {}  # by id of a leaf

    def run(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a block on its input, which requires a gradient."""
        for kept, leaves in zip(self._states, self._leaves, strict=True):
            for key, tensors in [*kept.items()]:
                if key not in leaves:  # indices have no gradient
                    leaves[key] = tuple(
                        x.detach().requires_grad_(True) if isinstance(x, Tensor) and x.is_floating_point() else x
                        for x in tensors
                    )
                kept[key] = leaves[key]
        return run(x)

    def gradient(self, out: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of `x`, the input, from that of `out`, which `run` returned; no weight gets one."""
        outputs, gradients = [out], [gradient.to(out.dtype)]
        read: list[Tensor] = []
        for kept, leaves in zip(self._states, self._leaves, strict=True):
            for key in [*leaves]:
                if kept[key] is leaves[key]:
                    read += [leaf for leaf in leaves[key] if isinstance(leaf, Tensor) and leaf.requires_grad]
                    continue
                for written, leaf in zip(kept.pop(key), leaves.pop(key), strict=True):  # earlier blocks have none
                    if (reached := self._gradients.pop(id(leaf), None)) is not None:
                        outputs.append(written)
                        gradients.append(reached)
        entered, *of_read = torch.autograd.grad(outputs, [x, *read], gradients, allow_unused=bool(read))
        for leaf, reached in zip(read, of_read, strict=True):
            if reached is not None:
                before = self._gradients.get(id(leaf))
                self._gradients[id(leaf)] = reached if before is None else before + reached
        return entered


@dataclass(frozen=True, eq=False)
class BlockRun:
    """Runs a block, with its current weights, on the hidden states of one batch; changes the `shared_states`.

    `call` has the batch's other arguments.
    """

    module: nn.Module
    access: Access
    call: BlockCall

    def __call__(self, state: Tensor) -> Tensor:
        """Return the output of the block; both [batch, tokens, width], on any device."""
        with matmuls_in(self.access.matmul_dtype, self.module, self.access.device):
            return replay(self.module, to_device(state, self.access.device), self.call)

    def isolated(self, state: Tensor) -> Tensor:
        """Return the output, and leave `shared_states` as they are."""
        return BlockRun(self.module, self.access, copy_shared_states(self.call))(state)


def capture(
    access: Access, found: Architecture, batches: Sequence[Tensor], keep: KeepStates = in_memory
) -> tuple[list[Tensor], dict[str, list[BlockCall]]]:
    """Return the hidden states before the first block and the arguments of every block (see `capture_calls`)."""
    if not batches:
        return [], {fqn: [] for fqn in found.blocks}
    with access.materialise(OUTSIDE):
        return capture_calls(access.model, found.blocks, [ids.to(access.device) for ids in batches], keep)


def each_block(
    access: Access, found: Architecture, calls: Mapping[str, Sequence[BlockCall]], names: Iterable[str] | None = None
) -> Iterator[tuple[Block, list[BlockRun]]]:
    """Yield the decoder blocks `names` (None: all), and for each batch a function that runs them.

    Its weights are loaded until the next iteration. `calls` are the arguments of each block, from `capture`.
    """
    order, config = list(found.blocks), text_config(access.model)
    wanted = order if names is None else list(names)
    for fqn, following in zip(wanted, [*wanted[1:], None], strict=False):
        with access.materialise(fqn) as module, differences(access, fqn, found.inside(fqn)) as linears:
            if following is not None:
                access.read_ahead(following)
            block = Block(order.index(fqn), fqn, module, linears, tuple(calls[fqn]), config)
            yield block, [BlockRun(module, access, call) for call in calls[fqn]]


def passes(runs: Sequence[BlockRun], states: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """Bind each batch's hidden states to its run of a block, which leaves `shared_states` as they are."""
    return [partial(run.isolated, state) for run, state in zip(runs, states, strict=True)]


def advance(fqn: str, runs: Sequence[BlockRun], states: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> None:
    """Replace a block's input by its output, or write that into `into`, and change the `shared_states`."""
    targets, finite = states if into is None else into, []
    with written_behind() as put:
        for run, state, target in zip(runs, states, targets, strict=True):
            output = run(state)
            finite.append(looks_finite(output))
            put(target, output)
            if isinstance(call := run.call, LinkedCall):
                for name in call.done:
                    call.extra.pop(name, None)
    if first_damaged(targets, finite) is not None:  # once, after all are written: each check waits for the device
        raise not_finite(fqn)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore the mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
