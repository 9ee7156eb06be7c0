"""What reading a model's weights costs, by the steps of transformers and of `models/loading.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compressx.api.work import Work
from compressx.costs.basis import Basis
from compressx.costs.estimate import Stage, largest
from compressx.models.gguf_header import Stored

_F32 = 4

_ENTRY = 4
"""Operations of torch that start in the time that Python takes for one number or string of a GGUF file's metadata."""


def load(of: Basis) -> Stage:
    """Read the weights, look for damage, and take their checksum."""
    size = float(of.parameters * of.itemsize)
    looked_through = Work.of(hashed=size, moved=4 * size)
    if of.gguf is None:
        # Weights are the file's own pages, unless they are converted.
        held = {"weights": max(of.weights, of.around)}
        if of.stored != of.itemsize:
            held["checkpoint's file"] = held["weights"] / of.itemsize * of.stored
        return Stage("load", looked_through + Work.of(read=size), held)
    # Each tensor is dequantized into new ones. The metadata are gone through for the config and for the weights.
    made = Work.of(read=of.gguf.size, dequantized=of.gguf.quantized, moved=2 * size)
    made = made + of.python(2.0 * _ENTRY * of.gguf.entries)
    return Stage("load", looked_through + made, dequantizing(of.gguf.tensors, of.itemsize))


def dequantizing(tensors: Iterable[Stored], itemsize: int) -> Mapping[str, float]:
    """Return the most bytes at once while a GGUF file is read, by what holds them.

    transformers goes through the tensors in their order. It keeps what it has made, the file's pages that were read,
    and the float32 numbers of the tensor before until it has those of the next.

    Args:
        tensors: of the file.
        itemsize: bytes of a number of the weights.
    """
    weights = read = before = 0.0
    peak: Mapping[str, float] = {}
    for tensor in tensors:
        read += tensor.size
        wide = float(_F32 * tensor.numbers)
        floats = 0.0 if tensor.kind == "F32" else wide  # those of the file itself are looked at where they are
        # Parts are dequantized one by one and then joined. The result is copied, and the copy made narrower.
        joined = before + (2 * wide if tensor.quantized else floats)
        copied = floats + wide + (itemsize * tensor.numbers if itemsize < _F32 else 0)
        now = {"weights": weights, "checkpoint's file": read, "tensors being dequantized": max(joined, copied)}
        peak = largest(peak, now)
        weights, before = weights + itemsize * tensor.numbers, floats
    return largest(peak, {"weights": weights, "checkpoint's file": read})
