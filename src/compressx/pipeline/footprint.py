"""How large a model is before a run and after it, by arithmetic: parameters, bytes of files, and what decode reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from compressx.api.names import kind_of
from compressx.api.patterns import Structured
from compressx.api.projections import parent
from compressx.models.architecture import architecture_of, text_config
from compressx.models.gguf_export import stored_bytes, stored_type
from compressx.runtime.errors import UnsupportedModelError
from compressx.shrink.cuts import remaining_tensors
from compressx.shrink.stage import expected_units
from compressx.stages.state import RunState

TYPES = ("Q8_0", "Q4_0", "F16")
"""The GGUF types that are counted."""


class _Part(NamedTuple):
    """A tensor: the name that decides its type, and its shapes [..., rows, columns], dense and cut.

    `kept` is the share of it that is in blocks that are kept, `read` how many of its first dimension a token reads.
    """

    name: str
    shapes: list[Sequence[int]]
    kept: float
    read: int | None


def footprint(state: RunState) -> dict[str, Any]:
    """Count a planned run's model; empty where no units are removed, or none that a smaller model can lack.

    Returns:
        `parameters`; by type, `bytes` of the file, and `decode_bytes` that a token reads of it: of each the dense
        model's number and the pruned one's, the mean where blocks that may be removed differ. A GGUF file's metadata
        counts where an exporter of the recipe knows it.
    """
    plan = state.plan
    if not any(isinstance(x.pattern, Structured) for x in plan.linears):
        return {}
    exporters = (state.exporter(i)[1] for i in range(len(state.recipe.export)))
    sized = next((x for x in exporters if hasattr(x, "tensor_bytes")), None)
    beside = 0 if sized is None else sized.tensor_bytes(state.planned_model).get("", 0)
    try:
        parts, chosen = [*_parts(state)], 1.0 if plan.allocation is None else plan.allocation.fraction
    except UnsupportedModelError:  # units that are zeros in the run, and that nothing can leave out
        return {}
    tied = not any(x.name == "output.weight" for x in parts)

    def summed(size: Callable[[str, Sequence[int]], int], *, read: bool = False, more: int = 0) -> list[int]:
        dense, pruned = 0.0, 0.0
        for x in parts:
            whole, cut = (size(x.name, s) * (x.read / s[0] if read and x.read else 1) for s in x.shapes)
            dense, pruned = dense + whole, pruned + x.kept * (whole + chosen * (cut - whole))
        return [round(dense) + more, round(pruned) + more]

    kinds: dict[str, Callable[[str, Sequence[int]], int]] = {
        kind: lambda name, shape, kind=kind: stored_bytes(shape, stored_type(name, shape, kind, tied=tied))  # type: ignore[misc]
        for kind in TYPES
    }
    if state.recipe.shrink:
        kinds["safetensors"] = lambda _, shape: math.prod(shape) * state.dtype.itemsize
    return {
        "parameters": summed(lambda _, shape: math.prod(shape)),
        "bytes": {kind: summed(size, more=beside * (kind in TYPES)) for kind, size in kinds.items()},
        "decode_bytes": {kind: summed(size, read=True) for kind, size in kinds.items()},
    }


def _parts(state: RunState) -> Iterator[_Part]:
    model, depth, found = state.skeleton, state.plan.depth, architecture_of(state.skeleton)
    left, every = remaining_tensors(model, expected_units(state.plan)), {**found.linears, **found.outside}
    linears = {f"{name}.weight" if x.expert is None else parent(name): x for name, x in every.items()}
    table, head = (getattr(x, "weight", None) for x in (model.get_input_embeddings(), model.get_output_embeddings()))
    for name, x in model.named_parameters():
        if name in getattr(model, "all_tied_weights_keys", {}):
            continue
        linear, of_tokens, read = linears.get(name), isinstance(model.get_submodule(parent(name)), nn.Embedding), None
        shapes: list[Sequence[int]] = [x.shape, left[name].shape]
        if linear is not None and linear.transposed:
            shapes = [(*s[:-2], s[-1], s[-2]) for s in shapes]
        if linear is not None and linear.expert is not None:
            read = getattr(text_config(model), "num_experts_per_tok", linear.experts)
        elif of_tokens and x is not head:
            read = 1
        stored = "token_embd.weight" if x is table else "output.weight" if x is head else name
        if stored == name and (linear is None or kind_of(linear.name) in {"gate", "router", "shared_expert_gate"}):
            stored = "position_embd" if of_tokens else "ffn_gate_inp"  # in float32
        listed = depth is not None and any(name.startswith(f"{fqn}.") for fqn in depth.blocks)
        kept = 1 - depth.pattern.dropped / len(depth.blocks) if depth is not None and listed else 1.0
        yield _Part(stored, shapes, kept, read)
