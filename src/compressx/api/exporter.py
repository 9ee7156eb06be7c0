"""What an exporter is given: the contract between the host and plugins that write models in other formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True, eq=False)
class FinishedModel:
    """A pruned model to write; nothing of it, and no file of its folder, may be changed.

    Attributes:
        folder: the model as transformers reads it: config, tokenizer, and weights with zeros as dense safetensors.
        access: its weights, in memory or streamed from disk; `access.model` is the transformers model.
        tokenizer: its tokenizer.
        masks: which weights are kept, by the names of linears: a `masks.MaskSet`.
        base: folder with the safetensors of the model whose bits a dropped weight has, if the recipe names a `base`
            that is a folder.
        source: the single file that the dense model was read from; None if that was a folder.
    """

    folder: Path
    access: Any
    tokenizer: Any
    masks: Mapping[str, Any]
    base: Path | None = None
    source: Path | None = None


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """What is known of a model before its weights are read.

    Attributes:
        model: the dense transformers model; weights may be on the `meta` device.
        source: as for `FinishedModel`.
        own_widths: whether an allocation will give each block its own number of neurons or key/value groups.
        tokenizer: its tokenizer, if it is known.
    """

    model: Any
    source: Path | None = None
    own_widths: bool = False
    tokenizer: Any = None


class Exporter(Protocol):
    """Writes models in one format.

    It may have a method `check(planned: PlannedModel) -> None`, which raises what `export` would raise hours later; an
    attribute `loads`, the name of its only file, one that compressx can load: a run then measures its perplexity; and a
    method `tensor_bytes(planned: PlannedModel) -> Mapping[str, int]`, the bytes of the dense model in this format by
    the names of its parameters, and of all else under the empty name: for budgets of bytes.
    """

    def export(self, model: FinishedModel, folder: Path) -> str | None:
        """Write a model into `folder`, which is new and empty, and nowhere else; may return a line about it."""


@dataclass(frozen=True)
class ExporterSpec:
    """How a plugin offers an exporter to recipes.

    Attributes:
        name: what a recipe writes after `format:`, and the folder below `exports` that is written.
        summary: one line for people.
        options: pydantic model of the recipe's `options:`; unknown options are refused whatever its own config says.
        build: makes the exporter from validated options.
        dense: whether it writes what a run has in `model` in any case: weights with their zeros, as transformers loads
            them.
        own_widths: whether each block can have its own number of neurons or key/value groups.
    """

    name: str
    summary: str
    options: type[BaseModel]
    build: Callable[[Any], Exporter]
    dense: bool = False
    own_widths: bool = False
