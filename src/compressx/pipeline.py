"""The stages of a run, in order: recipe, plan, text, model, dense evaluation, pruning, pruned evaluation, output."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from compressx import attention_aware, figures
from compressx._version import __version__
from compressx.access import Access, InMemory, weights_fingerprint
from compressx.architecture import text_config
from compressx.calibration import calibration_windows, check_dataset, documents, fingerprint, token_ids
from compressx.errors import ArtifactError, CompressxError, RecipeError
from compressx.evaluate import evaluate, evaluate_cached
from compressx.export import check_output, output_folder
from compressx.harness import check_tasks
from compressx.hidden import InFiles, Keep, in_memory
from compressx.journal import Allocated, FinishedBlock, Journal
from compressx.masks import MaskSet
from compressx.models import Checkpoint, find_checkpoint, load_model, load_skeleton, load_tokenizer
from compressx.planning import Plan, make_plan
from compressx.plugins import Plugins, load_plugins
from compressx.recipe import Calibration, LoadedRecipe, RollingTask, load_recipe, recipe_from_dict
from compressx.report import AllocationReport, RunReport, total_sparsity
from compressx.sources import Streaming
from compressx.streaming import StreamedModel, is_larger_than_memory, open_streamed
from compressx.walk import Finished, prune_model

Stage: TypeAlias = Literal["load", "calibrate", "evaluate dense", "allocate", "prune", "evaluate pruned", "save"]
Progress: TypeAlias = Callable[[Stage, int, int], None]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]

_VERSIONS_OF = ("torch", "transformers", "lm_eval", "datasets", "safetensors")


def plan(
    recipe: LoadedRecipe | Path | str | Mapping[str, Any],
    *,
    plugins: Plugins | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Check a recipe and decide what happens to every linear, without loading weights or text.

    Args:
        recipe: a path, a mapping, or what `load_recipe` returned.
        plugins: what `load_plugins` returned; discovered anew when absent.
        overrides: `a.b=VALUE`, as `--set` takes them; only with a path.

    Raises:
        CompressxError: anything that is wrong with the recipe, the plugins or the model.
    """
    return _prepare(_loaded(recipe, overrides), plugins or load_plugins()).plan


def run(
    recipe: LoadedRecipe | Path | str | Mapping[str, Any],
    *,
    plugins: Plugins | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    device: Device = "auto",
    resume: bool = False,
    restart: bool = False,
) -> RunReport:
    """Prune a model as a recipe says and write the output folder.

    Args:
        recipe: a path, a mapping, or what `load_recipe` returned.
        plugins: what `load_plugins` returned; discovered anew when absent.
        overrides: `a.b=VALUE`, as `--set` takes them; only with a path.
        progress: called with the stage, how much of it is done, and how much there is.
        device: where the model runs; `auto` is CUDA when there is some.
        resume: go on after the last finished block of an interrupted run of the same recipe, if there was one.
        restart: begin anew where an interrupted run has left finished blocks.

    Returns:
        The report that was also written.

    Raises:
        CompressxError: anything that the user can mend. The output folder is then as it was before; finished blocks are
            kept beside it for `resume`.
    """
    clock = _Clock()
    tell: Progress = progress or (lambda _stage, _done, _total: None)
    loaded = _loaded(recipe, overrides)
    plugins = plugins or load_plugins()
    with clock.stage("load"):
        tell("load", 0, 1)
        prepared = _prepare(loaded, plugins)
        tokenizer = load_tokenizer(prepared.checkpoint)
    with clock.stage("calibrate"), _at(loaded, "calibration"):
        tell("calibrate", 0, 1)
        batches = _calibration_batches(loaded.recipe.calibration, tokenizer, prepared.plan)
    with clock.stage("load"), _at(loaded, "model"):
        access = _open(prepared.checkpoint, loaded.recipe.model.streaming, _device(device))
    with output_folder(loaded.recipe.output, resume=resume, restart=restart) as folder:
        journal = Journal(folder, _fingerprint(loaded, access, batches, plugins))
        settings = loaded.recipe.evaluate
        evaluation: dict[str, Any] = {}
        if settings is not None:
            with clock.stage("evaluate"), _at(loaded, "evaluate"):
                evaluation["dense"] = evaluate_cached(
                    access,
                    tokenizer,
                    settings,
                    journal.fingerprint["model"],
                    progress=lambda i, n: tell("evaluate dense", i, n),
                )
        with clock.stage("allocate"), _at(loaded, "allocation"):
            final, allocation = _allocate(access, prepared.plan, batches, tell, journal)
        with clock.stage("prune"):
            keep = _keep(loaded.recipe.calibration, access, batches, journal.blocks / "hidden")
            finished = _prune(access, final, batches, plugins, tell, journal, keep)
        reports = [block.report for block in finished]
        masks = {name: mask for block in finished for name, mask in block.masks.items()}
        layers = tuple(layer for report in reports for layer in report.layers)
        tell("save", 0, 1)
        with clock.stage("save"):
            for name in ("plots", "model"):  # an interrupted run may have begun them
                shutil.rmtree(folder / name, ignore_errors=True)
            drawn = figures.draw(reports, [m for block in finished for m in block.matrices], folder / "plots")
            access.save(tokenizer, journal.blocks, folder / "model")
            MaskSet(masks).save(folder / "masks.safetensors")
        if settings is not None:
            with clock.stage("evaluate"):
                if isinstance(access, StreamedModel):
                    access = open_streamed(Checkpoint(str(folder / "model")), access.device)
                evaluation["pruned"] = evaluate(
                    access, tokenizer, settings, progress=lambda i, n: tell("evaluate pruned", i, n)
                )
        report = RunReport(
            compressx=__version__,
            model=loaded.recipe.model.model_dump(mode="json", exclude_none=True),
            sparsity=total_sparsity(layers),
            layers=layers,
            skipped=tuple({"name": n, "reason": r} for n, r in final.skipped.items()),
            evaluation=evaluation,
            seconds=clock.seconds(),
            peak_memory_bytes=peak_memory_bytes(),
            plugins=tuple(
                {"name": p.name, "version": p.version, "source": p.source, "module": p.module}
                for p in plugins.records
                if p.status == "loaded"
            ),
            versions={"python": platform.python_version(), **{n: metadata.version(n) for n in _VERSIONS_OF}},
            figures=drawn,
            allocation=allocation,
        )
        (folder / "recipe.yaml").write_text(loaded.to_yaml(), encoding="utf-8")
        (folder / "plan.json").write_text(json.dumps(final.to_dict(), indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(report.to_markdown(), encoding="utf-8")
        (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    plugins.manager.hook.compressx_run_finished(report=report, output=loaded.recipe.output)
    return report


@dataclass(frozen=True)
class _Prepared:
    checkpoint: Checkpoint
    plan: Plan


def _loaded(recipe: LoadedRecipe | Path | str | Mapping[str, Any], overrides: Sequence[str]) -> LoadedRecipe:
    if isinstance(recipe, Path | str):
        return load_recipe(Path(recipe), overrides)
    if overrides:
        raise RecipeError("overrides only go with the path of a recipe")
    return recipe if isinstance(recipe, LoadedRecipe) else recipe_from_dict(dict(recipe))


def _prepare(loaded: LoadedRecipe, plugins: Plugins) -> _Prepared:
    """Find every mistake that can be found before weights are loaded."""
    recipe = loaded.recipe
    with _at(loaded, "output"):
        check_output(recipe.output)
    with _at(loaded, "model"):
        checkpoint = find_checkpoint(recipe.model)
        skeleton = load_skeleton(checkpoint)
    output = recipe.output.expanduser().resolve()
    if (checkpoint_path := Path(checkpoint.location)).exists() and checkpoint_path.resolve().is_relative_to(output):
        raise ArtifactError(
            f"{loaded.where('output')}: output {recipe.output} would replace the model that it is made from; "
            "name another folder"
        )
    if recipe.calibration is not None:
        with _at(loaded, "calibration", "dataset"):
            check_dataset(recipe.calibration.dataset)
    if recipe.evaluate is not None and recipe.evaluate.token_perplexity is not None:
        with _at(loaded, "evaluate", "token_perplexity", "dataset"):
            check_dataset(recipe.evaluate.token_perplexity.dataset)
    planned = make_plan(loaded, plugins, skeleton)
    if recipe.evaluate is not None and recipe.evaluate.lm_eval is not None:
        for i, task in enumerate(recipe.evaluate.lm_eval.tasks):
            if isinstance(task, RollingTask):
                with _at(loaded, "evaluate", "lm_eval", "tasks", i, "dataset"):
                    check_dataset(task.dataset)
        with _at(loaded, "evaluate", "lm_eval", "tasks"):
            check_tasks(recipe.evaluate.lm_eval)
    return _Prepared(checkpoint, planned)


@contextlib.contextmanager
def _at(loaded: LoadedRecipe, *location: str | int) -> Iterator[None]:
    """Put the place in the recipe before an error's message."""
    try:
        yield
    except CompressxError as error:
        raise type(error)(f"{loaded.where(*location)}: {error}") from error


def _calibration_batches(settings: Calibration | None, tokenizer: Any, planned: Plan) -> Sequence[torch.Tensor]:
    if settings is None or not planned.needs_calibration:
        return ()
    ids = token_ids(documents(settings.dataset, "calibration"), tokenizer)
    windows = calibration_windows(ids, settings.samples, settings.sequence_length, settings.seed)
    return torch.split(windows, settings.batch_size)


def _open(checkpoint: Checkpoint, streaming: Streaming, device: torch.device) -> Access:
    """Load a model, or leave it on disk if the recipe or its size says so."""
    if streaming is True or (streaming == "auto" and is_larger_than_memory(checkpoint, device)):
        return open_streamed(checkpoint, device)
    return InMemory(load_model(checkpoint).to(device))


def _fingerprint(
    loaded: LoadedRecipe, access: Access, batches: Sequence[torch.Tensor], plugins: Plugins
) -> dict[str, Any]:
    """Return what decides the result of a run, by names that a user knows."""
    recipe = loaded.recipe.model_dump(mode="json", exclude_none=True)
    return {
        "model": weights_fingerprint(access),
        "prune": recipe["prune"],
        "allocation": recipe.get("allocation"),
        "calibration tokens": [fingerprint(batch) for batch in batches],
        "plugins": {p.name: p.version for p in plugins.records if p.status == "loaded"},
        "versions": {"compressx": __version__, **{n: metadata.version(n) for n in ("torch", "transformers", "numpy")}},
        "device": access.device.type,
    }


def _allocate(
    access: Access, planned: Plan, batches: Sequence[torch.Tensor], tell: Progress, journal: Journal
) -> tuple[Plan, AllocationReport | None]:
    """Give every linear its sparsity, where the recipe leaves that open."""
    if planned.allocation is None:
        return planned, None
    if journal.allocated is None:
        final, report = attention_aware.allocate(
            access, planned, planned.allocation, batches, lambda i, n: tell("allocate", i, n)
        )
        journal.allocate(Allocated({x.name: x.pattern for x in final.linears}, report))
        return final, report
    return planned.allocated(journal.allocated.patterns), journal.allocated.report


def _keep(settings: Calibration | None, access: Access, batches: Sequence[torch.Tensor], folder: Path) -> Keep:
    """Keep hidden states in files when they are larger than the recipe's limit."""
    width = text_config(access.model).hidden_size * access.model.dtype.itemsize
    size = width * sum(batch.numel() for batch in batches)
    limit = None if settings is None else settings.memory_limit
    return InFiles(folder) if limit is not None and size > limit else in_memory


def _prune(
    access: Access, planned: Plan, batches: Sequence[torch.Tensor], plugins: Plugins, tell: Progress, journal: Journal,
    keep: Keep,
) -> list[FinishedBlock]:  # fmt: skip
    """Prune what an interrupted run has not finished, and record every block."""
    finished: list[FinishedBlock] = []
    reached = None
    if journal.finished:
        finished, states = journal.restore(access, keep)
        reached = Finished(journal.finished[-1], states)
    total = len({x.block for x in planned.linears})
    tell("prune", len(finished), total)
    for block in prune_model(access, planned, batches, reached, keep):
        finished.append(FinishedBlock(block.report, block.masks, figures.matrices(block.images)))
        journal.add(access, finished[-1], block.states)
        tell("prune", len(finished), total)
        plugins.manager.hook.compressx_block_pruned(report=block.report)
    return finished


def _device(wanted: Device) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def peak_memory_bytes() -> int:
    """Return the process's highest resident memory so far, plus that of the accelerator."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    accelerator = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + accelerator


@dataclass
class _Clock:
    """Adds up the seconds of each stage."""

    started: float = field(default_factory=time.perf_counter)
    spent: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        stages = {name: self.spent.get(name, 0.0) for name in ("load", "calibrate", "allocate", "prune", "evaluate")}
        return stages | {"total": time.perf_counter() - self.started}
