"""`prune`: prune a model that is in memory, without writing files."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.record import RunReport
from compressx.data.documents import Document, checked_documents
from compressx.data.windows import sequences_of
from compressx.evaluation.evaluators import with_evaluators
from compressx.masks.adapters import has_adapters
from compressx.masks.maskset import MaskSet
from compressx.models.access import InMemory
from compressx.models.architecture import refuse_prepared
from compressx.models.blockwise import evaluation_mode
from compressx.models.generate import check_ids
from compressx.pipeline.run import report_of
from compressx.pipeline.sizes import memory_advised
from compressx.pipeline.stages import prepare, walk
from compressx.plugins.manager import Plugins, load_plugins
from compressx.recipe.schema import recipe_in_memory
from compressx.recipe.sources import Draw
from compressx.runtime.errors import ArtifactError, CalibrationError, CompressxError, UnsupportedModelError
from compressx.runtime.modes import deterministic, reuse_freed_memory, torchs_own_modes
from compressx.runtime.timing import forget_peaks
from compressx.stages.log import run_log
from compressx.stages.state import Progress, RunState
from compressx.stages.store import Store

_DENSE_STAGES = ("load", "calibrate", "evaluate dense", "allocate")
"""The stages that leave the model's weights as they were."""


@dataclass(frozen=True, eq=False)
class PrunedModel:
    """What `prune` returns.

    Attributes:
        model: the pruned model, with zeros; its config has the attribute `compressx`.
        masks: of its pruned linears.
        report: as a run writes it to `report.json`.
    """

    model: Any
    masks: MaskSet
    report: RunReport

    def __repr__(self) -> str:
        """Return one line, for notebooks."""
        return f"PrunedModel({type(self.model).__name__}, {self.report!r})"


@reuse_freed_memory()
@torchs_own_modes()
def prune(
    model: Any,
    tokenizer: Any,
    recipe: Path | str | Mapping[str, Any],
    *,
    calibration: Tensor | Sequence[Document] | None = None,
    copy: bool = False,
    plugins: Plugins | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> PrunedModel:
    """Prune a model in memory, on its device and in its dtype; equal to a `run` on the same weights, to the bit.

    No files are written, except temporary ones if `calibration.memory_limit` asks for them. Modes, `requires_grad` and
    dtypes are kept.

    Args:
        model: a transformers causal language model, all on one device.
        tokenizer: its tokenizer; None if no text has to be read.
        recipe: a path or a mapping, without `model`, `output` and `track`.
        calibration: text in place of `calibration.dataset`: documents, or token ids, int64 [samples, tokens], which are
            used as they are. The other keys of `calibration` are optional then.
        copy: prune a copy, and leave the model as it is.
        plugins: what `load_plugins` returned; discovered when absent. `compressx_run_finished` is not called.
        overrides: `a.b=VALUE`, as for `--set`.
        progress: see `stages.state.Progress`.

    Raises:
        CompressxError: an error that the user can fix. After an error without `copy` the model is as it was, or the
            message says that blocks are already pruned; for other exceptions, the logger `compressx` says so.
    """
    with run_log(first=True) as log:
        _check(model, tokenizer)
        name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        path = Path(recipe) if isinstance(recipe, str | Path) else recipe
        plugins = plugins or load_plugins()
        loaded = with_evaluators(recipe_in_memory(path, name, _decided(calibration), overrides), plugins)
        state = RunState(loaded, plugins, InMemory(model).device, log=log, progress=progress)
        state.skeleton, state.tokenizer = model, _NoTokenizer() if tokenizer is None else tokenizer
        log.header(state.device)
        forget_peaks()
        # Compiled modules call no hooks. Where torch's compiler is not imported, which takes seconds, there are none.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        with eager, TemporaryDirectory(prefix="compressx-") as folder:
            state.store = Store(Path(folder))
            work = deepcopy(model) if copy else model
            with evaluation_mode(model), evaluation_mode(work):
                prepare(state)
                _take_text(state, calibration)
                changes_named = contextlib.nullcontext() if copy else _changes_named(state)
                fixed = deterministic(loaded.recipe.deterministic, state.device)
                with changes_named, fixed, memory_advised(state):
                    return _pruned(state, model, work)


def _pruned(state: RunState, model: Any, work: Any) -> PrunedModel:
    """Go through the stages of a run, with `work`: the dense model or a copy of it."""
    dense = deepcopy(model) if state.needs_dense and work is model else model
    state.open, state.dense = lambda: InMemory(work), lambda _: InMemory(dense)
    walk(state)
    masks = state.store.masks()
    if not masks.of_difference and not masks.verify(work):
        raise ArtifactError("weights that masks drop are not zero after pruning; look for hooks that write to them")
    report = report_of(state)
    state.log.finished(report)
    return PrunedModel(work, masks, report)


@contextlib.contextmanager
def _changes_named(state: RunState) -> Iterator[None]:
    """Say after an exception that the model is no longer as it was, unless it is."""
    try:
        yield
    except BaseException as error:
        if state.timing.stage in _DENSE_STAGES:
            raise
        changed = (
            f"the model is no longer as it was: {len(state.store.finished)} of {state.plan.pieces} blocks are pruned, "
            "and one more may be in part; load it again, or prune a copy (copy=True)"
        )
        if isinstance(error, CompressxError):
            raise type(error)(f"{error}; {changed}") from error
        state.log.write(logging.ERROR, changed)
        raise


def _decided(calibration: Tensor | Sequence[Document] | None) -> Mapping[str, Any] | None:
    """Return the keys of the recipe's `calibration` that given text decides."""
    if calibration is None:
        return None
    if not isinstance(calibration, Tensor):
        return {"dataset": "given/text"}
    if calibration.dim() != 2 or calibration.is_floating_point() or calibration.dtype == torch.bool:
        raise CalibrationError(
            f"calibration is {calibration.dtype} {[*calibration.shape]}, expected token ids, int64 [samples, tokens], "
            "or a list of documents"
        )
    sequences, length = calibration.shape
    drawn = Draw().model_dump(exclude={"dataset", "datasets"})
    return {"dataset": "given/text", **drawn, "samples": sequences, "sequence_length": length, "bos": False}


def _take_text(state: RunState, calibration: Tensor | Sequence[Document] | None) -> None:
    """Take the caller's text in place of the calibration dataset."""
    settings = state.recipe.calibration
    if isinstance(calibration, Tensor):
        check_ids(state.skeleton, sequences := calibration.long().cpu(), None, "calibration")
        state.calibration = sequences
    elif calibration is not None and settings is not None:
        documents = checked_documents(calibration, "calibration")
        state.calibration = sequences_of(documents, settings.samples, settings, state.tokenizer, state.skeleton)


def _check(model: Any, tokenizer: Any) -> None:
    """Refuse what is no dense transformers language model on one device, or no tokenizer."""
    from transformers import PreTrainedModel

    kind, load = type(model).__name__, "load one by AutoModelForCausalLM.from_pretrained"
    if not isinstance(model, PreTrainedModel):
        unwrap = "unwrap it first (PEFT: model.merge_and_unload(); torch.compile: model._orig_mod; DDP: model.module)"
        raise UnsupportedModelError(
            f"prune takes a transformers causal language model, got {kind}; "
            f"{unwrap if isinstance(model, nn.Module) else load}"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    has = ""
    if has_adapters(model):  # get_peft_model puts them into the model that it is given, too
        has = "PEFT adapters; merge them into its weights, or load it without them"
    elif model.get_output_embeddings() is None:
        has = f"no head to predict tokens; {load}"
    elif getattr(model.config, "quantization_config", None) is not None:
        has = "quantized weights; prune the full-precision model, then quantize"
    elif len(devices) != 1 or "meta" in devices:
        has = (
            f"weights on {' and '.join(devices)}, expected one device; load it without device_map, or write a recipe "
            "with model.streaming: true and call compressx.run"
        )
    if has:
        raise UnsupportedModelError(f"{kind} has {has}")
    refuse_prepared(model, "pruned")
    if tokenizer is not None and not callable(tokenizer):
        raise CalibrationError(f"tokenizer is {tokenizer!r}; expected what AutoTokenizer.from_pretrained returns")


class _NoTokenizer:
    """In place of a tokenizer that is None: any use is an error."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise CalibrationError("tokenizer is None, but the recipe has text to read; pass the model's tokenizer")

    def __getattr__(self, name: str) -> Any:
        return self()
