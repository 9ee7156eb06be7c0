"""What a run did, as values: written as `report.json` and `report.md`."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One pruned linear.

    Attributes:
        name: fully qualified name.
        pruner: which pruner selected, and after a `+` which one reconstructed.
        pattern: as in the recipe, such as `2:4` or `50% row`.
        shape: [out_features, in_features].
        target: fraction of zeros that was asked for.
        sparsity: fraction of zeros, counted in the mask.
        seconds: this linear's share, by weights, of the time its rule took in its block.
        info: figures that the pruner gave.
    """

    name: str
    pruner: str
    pattern: str
    shape: tuple[int, int]
    target: float
    sparsity: float
    seconds: float
    info: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BlockReport:
    """One pruned decoder block.

    Attributes:
        index: position in the model.
        fqn: fully qualified name; empty for linears outside the blocks.
        layers: its pruned linears.
        seconds: for observing, pruning and computing the next block's input.
    """

    index: int
    fqn: str
    layers: tuple[LayerReport, ...]
    seconds: float


@dataclass(frozen=True)
class RunReport:
    """A whole run.

    Attributes:
        compressx: version of compressx.
        model: the model source as the recipe gives it.
        sparsity: fraction of zeros over all planned linears, counted.
        layers: every pruned linear.
        skipped: every linear or matrix that was not pruned, with the reason.
        evaluation: `dense` and `pruned`, each a mapping from the number's full name to its value; empty when the
            recipe evaluates nothing.
        seconds: by stage: load, calibrate, prune, evaluate, total.
        peak_memory_bytes: highest resident memory of the process, plus that of the accelerator if one was used.
        plugins: name, version and source of every plugin that was loaded.
        versions: of the libraries that decide the result.
    """

    compressx: str
    model: Mapping[str, Any]
    sparsity: float
    layers: tuple[LayerReport, ...]
    skipped: tuple[Mapping[str, str], ...]
    evaluation: Mapping[str, Mapping[str, Any]]
    seconds: Mapping[str, float]
    peak_memory_bytes: int
    plugins: tuple[Mapping[str, str | None], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the content of `report.json`."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def to_markdown(self) -> str:
        """Return the content of `report.md`: the summary, then every layer."""
        lines = [f"# Pruned {_model_name(self.model)}", "", f"compressx {self.compressx}, sparsity {self.sparsity:.2%}"]
        if self.evaluation:
            lines += ["", *_markdown_table(["", "dense", "pruned", "change"], self.evaluation_rows())]
        lines += ["", "## By module", "", *_markdown_table(SUMMARY_COLUMNS, self.summary_rows())]
        lines += [
            "",
            "## Seconds",
            "",
            *_markdown_table(["stage", "s"], [[k, f"{v:.1f}"] for k, v in self.seconds.items()]),
        ]
        lines += ["", "## Layers", ""]
        lines += _markdown_table(
            ["layer", "pruner", "pattern", "sparsity", "seconds", "figures"],
            [
                [x.name, x.pruner, x.pattern, f"{x.sparsity:.4f}", f"{x.seconds:.2f}",
                 ", ".join(f"{k} {v:.4g}" for k, v in x.info.items())]
                for x in self.layers
            ],
        )  # fmt: skip
        if self.skipped:
            lines += ["", "## Not pruned", ""]
            lines += _markdown_table(["weight", "reason"], [[s["name"], s["reason"]] for s in self.skipped])
        return "\n".join(lines) + "\n"

    def evaluation_rows(self) -> list[list[str]]:
        """Return `[name, dense, pruned, change]` for every number measured on both models."""
        dense, pruned = _flat(self.evaluation.get("dense", {})), _flat(self.evaluation.get("pruned", {}))
        return [
            [
                name,
                f"{dense[name]:.4g}",
                f"{pruned[name]:.4g}",
                f"{pruned[name] / dense[name] - 1:+.1%}" if dense[name] else "",
            ]
            for name in dense
            if name in pruned
        ]

    def summary_rows(self) -> list[list[str]]:
        """Return one row for each kind of module (last part of the name), pruner and pattern."""
        groups: dict[tuple[str, str, str], list[LayerReport]] = defaultdict(list)
        for layer in self.layers:
            kind = layer.name.rstrip("0123456789.").rsplit(".", 1)[-1]  # fused experts end in their number
            groups[kind, layer.pruner, layer.pattern].append(layer)
        rows = []
        for (kind, pruner, pattern), members in groups.items():
            weights = sum(m.shape[0] * m.shape[1] for m in members)
            zeros = sum(m.sparsity * m.shape[0] * m.shape[1] for m in members)
            seconds = sum(m.seconds for m in members)
            rows.append([kind, pruner, pattern, str(len(members)), f"{zeros / weights:.2%}", f"{seconds:.1f}"])
        return rows


SUMMARY_COLUMNS = ["module", "pruner", "pattern", "layers", "sparsity", "seconds"]


def total_sparsity(layers: tuple[LayerReport, ...]) -> float:
    """Return the fraction of zeros over all weights of `layers`; 0 when there are none."""
    weights = sum(x.shape[0] * x.shape[1] for x in layers)
    return sum(x.sparsity * x.shape[0] * x.shape[1] for x in layers) / weights if weights else 0.0


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name} ")
        elif isinstance(value, int | float):
            flat[f"{prefix}{name}"] = float(value)
    return flat


def _model_name(model: Mapping[str, Any]) -> str:
    return str(model.get("id") or model.get("path") or model.get("file"))


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(r)} |" for r in rows)]
