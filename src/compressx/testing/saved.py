"""What evaluators and exporters promise, on a tiny model that is saved with its tokenizer; each check raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pluggy import PluginManager
from pydantic import BaseModel

from compressx.api.exporter import FinishedModel
from compressx.evaluation.evaluators import read_evaluators, run_evaluators
from compressx.masks.file import MaskEntry, weight_sha256
from compressx.masks.maskset import MaskSet
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.plugins.kinds import EVALUATOR
from compressx.plugins.manager import Plugins
from compressx.runtime.errors import CompressxError, PluginError, blamed_on
from compressx.runtime.quiet import quiet_libraries
from compressx.testing.models import save_tiny_model, tiny_model
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


def _measure(subject: SavedSubject, found: FinishedModel) -> None:
    plugins = Plugins(PluginManager("compressx"), (), {EVALUATOR.key: {subject.spec.name: subject.spec}})
    evaluators = read_evaluators({subject.spec.name: subject.options}, plugins, found.tokenizer, found.access.model)
    for dense in (None, lambda: InMemory(tiny_model(subject.architecture))) if subject.spec.compares else (None,):
        figures = run_evaluators(found.access, found.tokenizer, evaluators, dense=dense)
        expect(bool(figures), "evaluate returned no figure")


def _export(subject: SavedSubject, found: FinishedModel) -> None:
    folder: Path = found.folder.parent / "exports" / subject.spec.name
    folder.mkdir(parents=True)
    with blamed_on(f"exporter {subject.spec.name!r}"):
        subject.spec.build(subject.options).export(found, folder)
    expect(any(path.is_file() for path in folder.rglob("*")), "export wrote no file into its folder")


def _used(use: Callable[[SavedSubject, FinishedModel], None], subject: SavedSubject) -> None:
    """Measure or write a model; one that the plugin says it cannot is refused."""
    with refusals(CompressxError, but=PluginError), _finished(subject) as found:
        use(subject, found)


def _untouched(use: Callable[[SavedSubject, FinishedModel], None], subject: SavedSubject) -> None:
    with _finished(subject) as found:
        before = Snapshot(found.access.model)
        use(subject, found)
        before.expect_same()


EVALUATOR_CHECKS: Mapping[str, Callable[[SavedSubject], None]] = {
    "measures a model": partial(_used, _measure),
    "leaves the model as it is": partial(_untouched, _measure),
}
EXPORTER_CHECKS: Mapping[str, Callable[[SavedSubject], None]] = {
    "writes a model": partial(_used, _export),
    "leaves the model as it is": partial(_untouched, _export),
}
