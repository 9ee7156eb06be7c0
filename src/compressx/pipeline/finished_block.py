"""What a run keeps of a finished block, in memory and as plain data for its journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressx.api.record import BlockReport, LayerReport, ReconstructionReport
from compressx.report.figures import Matrices
from compressx.report.plots import Pooled


@dataclass(frozen=True, eq=False)
class FinishedBlock:
    """What a run keeps of a finished block in memory."""

    report: BlockReport
    matrices: tuple[Matrices, ...]


def pooled(matrices: Matrices) -> list[Pooled]:
    """Return the images of some linears in the order in which they are stored."""
    return [*matrices.images.values(), *([] if matrices.difference is None else [matrices.difference])]


def block_to_dict(block: FinishedBlock) -> dict[str, Any]:
    """Convert a block to plain data; objects that linears share are written once and shared again on reading."""
    report = block.report
    infos = {id(x.info): x.info for x in report.layers}
    histories = {id(x.history): x.history for x in report.layers}
    layers = [
        {**vars(x), "info": list(infos).index(id(x.info)), "history": list(histories).index(id(x.history))}
        for x in report.layers
    ]
    matrices = [
        {"linears": m.linears, "names": [*m.images], "shapes": [p.shape for p in pooled(m)]} for m in block.matrices
    ]
    return {
        **vars(report),
        "layers": layers,
        "infos": [dict(x) for x in infos.values()],
        "histories": [dict(x) for x in histories.values()],
        "reconstruction": None if report.reconstruction is None else vars(report.reconstruction),
        "matrices": matrices,
    }


def block_from_dict(data: dict[str, Any], tensors: Mapping[str, Tensor]) -> FinishedBlock:
    """Make a block of what `block_to_dict` returned.

    Args:
        data: plain data.
        tensors: the pooled images; `i.j` is the j-th of the i-th matrices.

    Raises:
        ValueError, KeyError, TypeError: other data.
    """
    infos = data["infos"]
    histories = [{name: tuple(curve) for name, curve in h.items()} for h in data["histories"]]
    layers = tuple(
        LayerReport(**{**x, "shape": tuple(x["shape"]), "info": infos[x["info"]], "history": histories[x["history"]]})
        for x in data["layers"]
    )
    matrices = []
    for i, one in enumerate(data["matrices"]):
        stored = [Pooled(tensors[f"{i}.{j}"], tuple(shape)) for j, shape in enumerate(one["shapes"])]
        images = dict(zip(one["names"], stored, strict=False))
        matrices.append(Matrices(tuple(one["linears"]), images, stored[-1] if len(stored) > len(images) else None))
    trained = data["reconstruction"]
    reconstruction = (
        None if trained is None else ReconstructionReport(**{**trained, "history": tuple(trained["history"])})
    )
    report = BlockReport(data["index"], data["fqn"], layers, data["seconds"], data["output_error"], reconstruction)
    return FinishedBlock(report, tuple(matrices))
