"""What a computation asks of a machine, counted from shapes before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KINDS = {
    "float32": "FLOPs of matrix products in float32",
    "bfloat16": "FLOPs of matrix products in bfloat16",
    "float16": "FLOPs of matrix products in float16",
    "attention": "FLOPs of fused attention in float32, of all pairs of tokens, also those that a causal kernel skips",
    "attention16": "the same in bfloat16 or float16, as FLOPs",
    "factor": "FLOPs of Cholesky factors, their inverses and triangular solves",
    "eigen": "FLOPs of eigendecompositions, 9 n^3 each",
    "moved": "bytes that elementwise operations read and write",
    "selected": "numbers of which the smallest are found",
    "launches": "operations started one after the other",
    "hashed": "bytes whose checksums are taken",
    "dequantized": "numbers of a GGUF file that are made floats",
    "read": "bytes read from disk",
    "written": "bytes written to disk",
}
"""What is counted, by name; a machine has a rate for each."""


@dataclass(frozen=True)
class Work:
    """Counts of what a computation does. A multiplication and an addition are two FLOPs.

    Works are added, and multiplied by how often they are done.

    Attributes:
        counts: by their name in `KINDS`.
        memory: most bytes that are alive at once beyond what was there before; the largest one of a sum's.
        returned: bytes of what is handed back: of a pruner's answer new weights and biases, without its masks, whose
            size is known; what it has prepared.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.0
    returned: float = 0.0

    def __post_init__(self) -> None:
        if unknown := sorted({*self.counts} - {*KINDS}):
            raise ValueError(f"work is counted as {', '.join(KINDS)}; got {unknown[0]!r}")

    @classmethod
    def of(cls, memory: float = 0.0, returned: float = 0.0, **counts: float) -> Work:
        """Make one of keyword arguments, such as `Work.of(float32=2 * rows * columns)`.

        Raises:
            ValueError: a name that is not among `KINDS`.
        """
        return cls(counts, memory, returned)

    def __add__(self, other: Work) -> Work:
        kinds = dict.fromkeys([*self.counts, *other.counts])
        counts = {kind: self[kind] + other[kind] for kind in kinds}
        return Work(counts, max(self.memory, other.memory), self.returned + other.returned)

    def __mul__(self, times: float) -> Work:
        counts = {kind: times * count for kind, count in self.counts.items()}
        return Work(counts, self.memory, times * self.returned)

    __rmul__ = __mul__

    def __getitem__(self, kind: str) -> float:
        return self.counts.get(kind, 0.0)

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return sum(self[kind] for kind, what in KINDS.items() if "FLOPs" in what)


@dataclass(frozen=True)
class Windows:
    """Text that statistics are gathered on.

    Attributes:
        count: windows.
        length: tokens in a window.
        batch: windows in a batch.
        itemsize: bytes of a number of the hidden states.
        share: fraction of the tokens that reaches the linear, below 1 behind a router.
        gpu: whether the model is on a GPU.
    """

    count: int
    length: int
    batch: int
    itemsize: int = 4
    share: float = 1.0
    gpu: bool = False

    @property
    def tokens(self) -> float:
        """Tokens in all windows, of those that reach the linear."""
        return self.share * self.count * self.length

    @property
    def batches(self) -> int:
        """Number of batches."""
        return -(-self.count // self.batch)
