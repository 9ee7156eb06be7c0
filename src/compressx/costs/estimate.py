"""The estimate of a run: the work of its stages, and what it takes on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compressx.api.work import Work
from compressx.costs.exchanged import Exchanged
from compressx.costs.machine import Machine


@dataclass(frozen=True)
class Stage:
    """A stage of a run.

    Attributes:
        name: of the stage, and of the pruner in it.
        work: what is counted.
        memory: bytes at its peak beyond the interpreter, by what holds them.
    """

    name: str
    work: Work
    memory: Mapping[str, float] = field(default_factory=dict)


def largest(*moments: Mapping[str, float]) -> Mapping[str, float]:
    """Return what is held, in bytes by what holds it, at the moment that takes the most."""
    return max(moments, key=lambda held: sum(held.values()))


@dataclass(frozen=True)
class Estimate:
    """What a run will cost on a machine.

    Attributes:
        machine: the machine.
        stages: in their order.
        disk: bytes by what takes them.
        interpreter: resident bytes of a process that has loaded the libraries and no weights, measured in this one.
        started: seconds of the processor that this process took to get there, and that a run takes, too.
        unknown: what is not estimated.
        notes: what was assumed.
        processes: that share the work; seconds and memory are those of the one that takes longest.
        exchanged: what they hand to one another.
    """

    machine: Machine
    stages: tuple[Stage, ...]
    disk: Mapping[str, float]
    interpreter: float
    started: float
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    processes: int = 1
    exchanged: Exchanged = field(default_factory=Exchanged)

    def seconds(self, stage: Stage) -> float:
        """How long a stage takes."""
        return self.machine.seconds(stage.work)

    @property
    def total(self) -> float:
        """Seconds of all stages, and those of loading the libraries."""
        return self.started + sum(map(self.seconds, self.stages))

    @property
    def peak(self) -> Stage:
        """The stage with the most memory."""
        # Weights are loaded into the host's memory.
        return max(self.stages[self.machine.gpu :], key=lambda stage: sum(stage.memory.values()))

    @property
    def memory(self) -> dict[str, float]:
        """Peak bytes of the host, or of the GPU where there is one, by what holds them."""
        return {**({} if self.machine.gpu else {"interpreter": self.interpreter}), **self.peak.memory}

    @property
    def host(self) -> float:
        """Peak bytes of the host: beside a GPU, the interpreter and the model while it is loaded."""
        loading = sum(self.stages[0].memory.values())
        return self.interpreter + loading if self.machine.gpu else sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "machine": self.machine.name,
            "rates": dict(self.machine.rates),
            "seconds": self.total,
            "started_seconds": self.started,
            "stages": [
                {"name": s.name, "seconds": self.seconds(s), "flops": s.work.flops, "work": dict(s.work.counts),
                 "memory_bytes": dict(s.memory)}
                for s in self.stages
            ],
            "memory_bytes": self.memory,
            "host_memory_bytes": self.host,
            "disk_bytes": dict(self.disk),
            "processes": self.processes,
            "exchanged_bytes": dict(self.exchanged.whole),
            "exchanged_bytes_of_a_block": dict(self.exchanged.block),
            "not_estimated": list(self.unknown),
            "assumed": list(self.notes),
        }  # fmt: skip
