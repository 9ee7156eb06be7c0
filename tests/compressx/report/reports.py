"""A small run's report, for tests of how it is shown."""

from __future__ import annotations

from html.parser import HTMLParser
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


class Page(HTMLParser):
    """What a page holds: its elements in their order, links, ids and text, and which elements it leaves open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.elements.append(tag)
        self.links += [values[k] for k in ("src", "href", "xlink:href") if k in values]
        self.ids += [values["id"]] if "id" in values else []
        if tag not in ("meta", "img", "br", "wbr", "path", "use", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("img", "br", "path", "use", "rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
