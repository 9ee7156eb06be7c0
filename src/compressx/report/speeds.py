"""How fast models are, side by side: what `compressx bench` measured, and how it is shown."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from compressx.report import markdown, plots
from compressx.report.section import Column, Section, Table, Value, table
from compressx.runtime.files import atomic_write, json_text

Stage: TypeAlias = Literal["prefill", "decode"]
STAGES: tuple[Stage, ...] = ("prefill", "decode")
"""Reading the prompt up to the first new token, and writing the others one at a time."""


@dataclass(frozen=True)
class Length:
    """Tokens of a prompt, and tokens written after it; at least two, of which the first belongs to prefill."""

    prompt: int
    new: int

    def __str__(self) -> str:
        return f"{self.prompt} + {self.new}"

    def shown(self, stage: Stage) -> str:
        """Name a stage."""
        return f"prefill {self.prompt}" if stage == "prefill" else f"decode {self.new} after {self.prompt}"

    def tokens(self, stage: Stage) -> int:
        """Return the tokens of one sequence in a stage."""
        return self.prompt if stage == "prefill" else self.new - 1


@dataclass(frozen=True)
class Spread:
    """Values of several rounds: their median, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize values, at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"


@dataclass(frozen=True)
class ModelSpeed:
    """One model.

    Attributes:
        name: as it was given; a number follows where it was given twice.
        machine: what it ran on, in words.
        dtype: of its parameters; several are joined.
        parameters: their number.
        file_bytes: size of its weights on disk.
        weight_bytes: of all parameters in memory.
        read_bytes: of the weights that decoding one token reads; None where that depends on the token (experts).
        memory_bytes: `before` (of the process, with its libraries, before the weights are read), the peak while they
            are (`load`), and the peak of the rounds (`run`): resident memory on a CPU, allocated memory on a GPU.
        seconds: by length and stage, one value for each round.
    """

    name: str
    machine: str
    dtype: str
    parameters: int
    file_bytes: int
    weight_bytes: int
    read_bytes: int | None
    memory_bytes: Mapping[str, int]
    seconds: Mapping[Length, Mapping[Stage, Sequence[float]]]


@dataclass(frozen=True)
class Bench:
    """Models that were timed in turn, round by round.

    Attributes:
        models: in the order given; ratios are to the first.
        batch: sequences at a time.
        below: prompts are random token ids from 0 to this number, the smallest vocabulary.
        copy_rate: bytes/s of a copy within the device's memory, read plus written; on a CPU by one thread.
    """

    models: tuple[ModelSpeed, ...]
    batch: int
    below: int
    copy_rate: float

    @property
    def lengths(self) -> list[Length]:
        """What was measured of every model."""
        return [*self.models[0].seconds]

    @property
    def rounds(self) -> int:
        """How often."""
        return len(self.models[0].seconds[self.lengths[0]]["prefill"])

    def rate(self, model: ModelSpeed, length: Length, stage: Stage) -> Spread:
        """Return tokens per second, of all sequences together."""
        return Spread.of([self.batch * length.tokens(stage) / s for s in model.seconds[length][stage]])

    def ratio(self, model: ModelSpeed, length: Length, stage: Stage) -> Spread:
        """Return how many times as fast as the first model it was, each round compared with its own."""
        first = self.models[0].seconds[length][stage]
        return Spread.of([a / b for a, b in zip(first, model.seconds[length][stage], strict=True)])

    def read_rate(self, model: ModelSpeed, length: Length) -> float | None:
        """Return the bytes of weights that were read in a second of decoding, at the median rate."""
        if model.read_bytes is None:
            return None
        return model.read_bytes * self.rate(model, length, "decode").median / self.batch

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        settings = {"batch": self.batch, "rounds": self.rounds, "ids_below": self.below}
        return {**settings, "copy_rate": self.copy_rate, "models": [self._of(model) for model in self.models]}

    def _of(self, model: ModelSpeed) -> dict[str, Any]:
        plain = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name != "seconds"}
        speeds = [
            {"prompt": length.prompt, "new": length.new, "read_rate": self.read_rate(model, length), **{
                stage: {
                    "seconds": [*model.seconds[length][stage]],
                    "tokens_per_second": dataclasses.asdict(self.rate(model, length, stage)),
                    "ratio": dataclasses.asdict(self.ratio(model, length, stage)),
                }
                for stage in STAGES
            }}
            for length in self.lengths
        ]  # fmt: skip
        return {**plain, "speeds": speeds}

    def sections(self) -> Iterator[Section]:
        """Yield a table of sizes and one of speeds, each with what it means."""
        first = self.models[0]
        empty = first.memory_bytes["before"] / 1e6
        peaks = f"the process's, which has {empty:.0f} MB before it loads a model" if empty else "the GPU's"
        yield Section("Speed", f"{first.machine}. Peaks of memory are {peaks}.", self._sizes())
        yield Section(note=self._meaning(), table=self._speeds())

    def _sizes(self) -> Table:
        numbers = [Column(n, ".4g") for n in ("file, MB", "weights, MB", "peak of loading, MB", "peak, MB")]
        columns: list[Column | str] = ["model", "dtype", Column("parameters, M", ".1f"), *numbers]
        return table(columns, [
            (m.name, m.dtype, m.parameters / 1e6, m.file_bytes / 1e6, m.weight_bytes / 1e6,
             m.memory_bytes["load"] / 1e6, m.memory_bytes["run"] / 1e6)
            for m in self.models
        ])  # fmt: skip

    def _speeds(self) -> Table:
        numbers = [Column("tokens/s", "s"), Column("x", "s"), Column("weights, GB/s", ".1f")]
        columns: list[Column | str] = ["stage", "model", *numbers]
        return table(columns, [
            self._row(model, length, stage) for length in self.lengths for stage in STAGES for model in self.models
        ])  # fmt: skip

    def _row(self, model: ModelSpeed, length: Length, stage: Stage) -> list[Value]:
        rate = self.rate(model, length, stage)
        shown = f"{rate:,.0f}" if rate.median >= 100 else f"{rate:.1f}"
        read = self.read_rate(model, length) if stage == "decode" else None
        return [length.shown(stage), model.name, shown, f"{self.ratio(model, length, stage):.2f}",
                None if read is None else read / 1e9]  # fmt: skip

    def _meaning(self) -> str:
        return (
            f"Medians of {self.rounds} rounds (least to most) with the models in turn, after one that does not count. "
            f"x: times as fast as {self.models[0].name}, the median of ratios within a round. Batch {self.batch}; for "
            f"all models the same random token ids below {self.below}. Prefill reads the prompt and "
            "gives the first new token. Decode writes the others greedily with a key/value cache; in torch by the "
            "model's own forward pass, without what `generate` does around it. Weights: what decoding reads of "
            f"them; a copy within memory moves {self.copy_rate / 1e9:.1f} GB/s.{self._doubt()}"
        )

    def _doubt(self) -> str:
        """Say which ratios are no result: the rounds do not agree on which model is faster."""
        unsure = [
            f"{model.name}, {length.shown(stage)}"
            for length in self.lengths for stage in STAGES for model in self.models[1:]
            if (x := self.ratio(model, length, stage)).least < 1 < x.most
        ]  # fmt: skip
        told = "the rounds do not agree on which model is faster, so x says nothing; repeat it on an idle machine"
        return f" Of {'; '.join(unsure)} {told}, with more --rounds." if unsure else ""

    def write(self, folder: Path) -> list[Path]:
        """Write `bench.md`, `bench.json` and `bench.svg`; files of these names are replaced.

        Raises:
            ArtifactError: they cannot be written.
        """
        written = [folder / name for name in ("bench.md", "bench.json", "bench.svg")]
        caption = "Tokens per second: medians, with the range of the rounds."
        figure = Section(figures=({"file": written[2].name, "caption": caption},))
        atomic_write(written[0], markdown.page([*self.sections(), figure]).encode())
        atomic_write(written[1], json_text(self.to_dict(), indent=1).encode())
        plots.bars(written[2], {
            f"{stage}, tokens/s": {
                model.name: {str(length): self._bar(model, length, stage) for length in self.lengths}
                for model in self.models
            }
            for stage in STAGES
        })  # fmt: skip
        return written

    def _bar(self, model: ModelSpeed, length: Length, stage: Stage) -> tuple[float, float, float]:
        rate = self.rate(model, length, stage)
        return rate.least, rate.median, rate.most
