"""A small run's report, for tests of how it is shown."""

from __future__ import annotations

from typing import Any

from compressx.api.record import AllocationReport, BlockReport, LayerReport, RunReport, UnitReport, total_sparsity


def layer(name: str, *, pruner: str = "wanda", pattern: str = "50% row", rows: int = 4, sparsity: float = 0.5,
          seconds: float = 1.0, **info: float) -> LayerReport:  # fmt: skip
    return LayerReport(name, pruner, pattern, (rows, 8), 0.5, sparsity, seconds, info)


LAYERS = (
    layer("model.layers.0.self_attn.q_proj", pruner="attnprune", pattern="70% joint", sparsity=0.75,
          attention_error=0.0123),
    layer("model.layers.0.mlp.up_proj", rows=12, sparsity=0.25, seconds=0.5),
    layer("model.layers.1.mlp.up_proj", rows=4, sparsity=0.5, seconds=0.25),
)  # fmt: skip


def in_blocks(layers: tuple[LayerReport, ...]) -> tuple[BlockReport, ...]:
    """Return one block for all of them."""
    return (BlockReport(0, "model.layers.0", layers, 3.0, 0.0123),)


def report(layers: tuple[LayerReport, ...] = LAYERS, **values: Any) -> RunReport:
    given: dict[str, Any] = {
        "compressx": "1.2",
        "model": {"id": "org/model"},
        "sparsity": total_sparsity(layers),
        "blocks": in_blocks(layers),
        "skipped": ({"name": "lm_head", "reason": "outside the decoder blocks"},),
        "evaluation": {
            "dense": {"token_perplexity": 10.0, "arc": {"acc": 0.5, "acc_stderr": 0.01}},
            "pruned": {"token_perplexity": 12.5, "arc": {"acc": 0.4, "acc_stderr": 0.01}},
        },
        "seconds": {"load": 1.0, "calibrate": 0.0, "prune": 2.0, "evaluate": 3.0, "total": 6.04},
        "peak_memory_bytes": 123,
    }
    return RunReport(**(given | values))


UNITS = (
    UnitReport("model.layers.0", "attnprune", ("m.q_proj", "m.k_proj"), 32, 0.75, 0.0123, (0.5, 0.9), (0.001, 0.02)),
    UnitReport("", "magnitude", ("lm_head",), 128, 0.3125, None),
)  # fmt: skip
ALLOCATION = AllocationReport("attention-aware", 0.4, "rule", 160, 64, UNITS)
