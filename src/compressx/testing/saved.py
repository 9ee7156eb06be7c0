"""What evaluators and exporters promise, on a tiny model that is saved with its tokenizer; each check raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from pydantic import BaseModel

from compressx.api.evaluator import EvaluatedModel, Figures
from compressx.api.exporter import FinishedModel
from compressx.evaluation.evaluators import ready
from compressx.masks.file import MaskEntry, weight_sha256
from compressx.masks.maskset import MaskSet
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.runtime.errors import CompressxError, PluginError, blamed_on
from compressx.runtime.quiet import quiet_libraries
from compressx.testing.models import save_tiny_model
from compressx.testing.subject import expect, refusals
from compressx.testing.untouched import Snapshot


@dataclass(frozen=True)
class SavedSubject:
    """An evaluator or exporter, with its options and the name of a tiny model."""

    spec: Any
    options: BaseModel
    architecture: str


@contextmanager
def _finished(subject: SavedSubject) -> Iterator[FinishedModel]:
    """Yield a new tiny model, half of whose weights are zero, in the folder `model` of an empty folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with TemporaryDirectory(prefix="compressx-") as place, quiet_libraries():
        folder = save_tiny_model(Path(place) / "model", subject.architecture)
        access = InMemory(AutoModelForCausalLM.from_pretrained(folder).eval())
        masks = MaskSet({
            name: MaskEntry(linear.weight > 0, "50% layer", "random", weight_sha256(linear.weight))
            for name, linear in architecture_of(access.model).linears.items()
        })  # fmt: skip
        masks.apply(access.model)
        access.model.save_pretrained(folder)
        yield FinishedModel(folder, access, AutoTokenizer.from_pretrained(folder), masks)


def _figures(subject: SavedSubject, found: FinishedModel) -> Figures:
    evaluator = ready(subject.spec, subject.options, found.tokenizer, found.access.model)
    return evaluator.evaluate(EvaluatedModel(found.access, found.tokenizer))


def can_measure(subject: SavedSubject) -> None:
    """Measure a model; one that it says it cannot measure is refused."""
    with refusals(CompressxError, but=PluginError), _finished(subject) as found:
        figures = _figures(subject, found)
    expect(bool(figures), "evaluate returned no figure")


def _export(subject: SavedSubject, found: FinishedModel) -> Path:
    folder: Path = found.folder.parent / "exports" / subject.spec.name
    folder.mkdir(parents=True)
    with blamed_on(f"exporter {subject.spec.name!r}"):
        subject.spec.build(subject.options).export(found, folder)
    return folder


def can_write(subject: SavedSubject) -> None:
    """Write a model; one that it says it cannot write is refused."""
    with refusals(CompressxError, but=PluginError), _finished(subject) as found:
        folder = _export(subject, found)
        expect(any(path.is_file() for path in folder.rglob("*")), "export wrote no file into its folder")


Use: TypeAlias = Callable[[SavedSubject, FinishedModel], object]


def _model(use: Use, subject: SavedSubject) -> None:
    with _finished(subject) as found:
        before = Snapshot(found.access.model)
        use(subject, found)
        before.expect_same()


EVALUATOR_CHECKS: Mapping[str, Callable[[SavedSubject], None]] = {
    "leaves the model as it is": partial(_model, _figures),
}
EXPORTER_CHECKS: Mapping[str, Callable[[SavedSubject], None]] = {
    "leaves the model as it is": partial(_model, _export),
}
