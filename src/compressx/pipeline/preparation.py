"""The checks of a recipe before weights are loaded, and reading its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.allocation.units import check_allocation
from compressx.data.documents import UnreachableError
from compressx.data.windows import Generated, read_calibration
from compressx.evaluation.evaluators import (
    Options,
    ReadyEvaluator,
    check_evaluators,
    options_of,
    read_evaluators,
    with_evaluators,
)
from compressx.models.architecture import refuse_prepared, survey, text_config
from compressx.models.checkpoint import Checkpoint
from compressx.models.generate import check_ids
from compressx.pipeline.checks import (
    FoundModel,
    check_datasets,
    check_parts,
    check_shares,
    check_space,
    check_teacher,
    check_tokenizer,
    is_finished,
    refuse_overwriting,
)
from compressx.pipeline.room import refuse_large_finetuning
from compressx.pipeline.texts import window_mistakes
from compressx.planning.make import check_rules, make_plan
from compressx.planning.plan import Plan
from compressx.plugins.kinds import TOKEN_SELECTOR
from compressx.plugins.manager import Plugins
from compressx.prompts.prepare import Selecting
from compressx.recipe.document import Placed, Step, from_python
from compressx.recipe.parts import parts_of, valid_parts
from compressx.recipe.schema import LoadedRecipe, read_recipe, recipe_from_source
from compressx.recipe.sources import Calibration, ModelSource, datasets_in
from compressx.runtime.errors import CompressxError, Mistakes, RecipeError, UnsupportedModelError
from compressx.training.finetune import training_windows


@dataclass(frozen=True)
class Prepared:
    """A checked recipe: the model's checkpoint, skeleton and tokenizer, and the plan for its linears."""

    checkpoint: Checkpoint
    skeleton: Any
    tokenizer: Any
    plan: Plan


def loaded_recipe(
    recipe: LoadedRecipe | Path | str | Mapping[str, Any], overrides: Sequence[str], plugins: Plugins
) -> LoadedRecipe:
    """Load a recipe from a path or mapping; return a loaded one as it is.

    Raises:
        CompressxError: an invalid recipe, with everything else that is wrong with its valid parts.
    """
    if isinstance(recipe, LoadedRecipe):
        source = recipe.source
    else:
        source = (
            from_python(dict(recipe), "<dict>") if isinstance(recipe, Mapping) else read_recipe(Path(recipe), overrides)
        )
    if overrides and not isinstance(recipe, Path | str):
        raise RecipeError("overrides need a recipe given as a path")
    try:
        return with_evaluators(recipe if isinstance(recipe, LoadedRecipe) else recipe_from_source(source), plugins)
    except CompressxError as error:
        mistakes, parts, evaluate = Mistakes(error), valid_parts(source), {}
        with mistakes.collected():
            evaluate = options_of(parts, plugins)
        parts = replace(parts, datasets={**parts.datasets, **dict(datasets_in(evaluate, ("evaluate",)))})
        found = check_parts(parts, mistakes, replace=True)
        _check_evaluators(evaluate, plugins, found, parts, mistakes)
        check_rules(parts, plugins, None if found is None else survey(found.skeleton), mistakes)
        mistakes.raise_all()
        raise


def prepare(
    loaded: LoadedRecipe, plugins: Plugins, processes: int = 1, device: torch.device | None = None,
    replace: bool = False,
) -> Prepared:  # fmt: skip
    """Check a recipe as far as possible without loading weights, and plan it.

    With a device, its memory has to hold fine-tuning. To `replace` allows whatever an earlier run's folder holds.

    Raises:
        CompressxError: everything that is wrong, a line for each mistake.
    """
    recipe, parts, mistakes = loaded.recipe, parts_of(loaded), Mistakes()
    found = check_parts(parts, mistakes, replace=replace)
    with mistakes.collected(), loaded.at("output"):
        is_finished(loaded, replace=replace)
    _check_settings(loaded, processes, mistakes)
    _check_evaluators(recipe.evaluate or {}, plugins, found, loaded, mistakes)
    planned = None
    if found is None:
        check_rules(parts, plugins, None, mistakes)
    else:
        with mistakes.collected(), loaded.at("output"):
            refuse_overwriting(recipe, found.checkpoint)
        with mistakes.collected():
            planned = _planned(loaded, plugins, found.skeleton, found.tokenizer, mistakes)
            check_shares(loaded, planned, processes)
            with loaded.at("output"):
                check_space(loaded, found, planned)
            if device is not None:
                refuse_large_finetuning(loaded, planned, found.skeleton, found.dtype, device)
    mistakes.raise_all()
    assert found is not None  # noqa: S101 - otherwise there is a mistake
    assert planned is not None  # noqa: S101 - likewise
    return Prepared(found.checkpoint, found.skeleton, found.tokenizer, planned)


def plan_in_memory(loaded: LoadedRecipe, plugins: Plugins, model: Any, tokenizer: Any) -> Plan:
    """Do as `prepare` for a model that is in memory; there is no output folder to check."""
    parts, mistakes, planned = parts_of(loaded), Mistakes(), None
    check_tokenizer(parts, model, tokenizer, check_datasets(parts, mistakes), mistakes)
    _check_settings(loaded, 1, mistakes)
    check_evaluators(loaded.recipe.evaluate or {}, plugins, model, tokenizer, mistakes, loaded)
    with mistakes.collected():
        planned = _planned(loaded, plugins, model, tokenizer, mistakes)
        refuse_large_finetuning(loaded, planned, model, model.dtype, model.device, present=True)
    mistakes.raise_all()
    assert planned is not None  # noqa: S101 - otherwise there is a mistake
    return planned


def _check_evaluators(
    settings: Options, plugins: Plugins, found: FoundModel | None, placed: Placed, mistakes: Mistakes
) -> None:
    """Check the `evaluate` section, with as much of the model as was found."""
    model, tokenizer = (None, None) if found is None else (found.skeleton, found.tokenizer)
    check_evaluators(settings, plugins, model, tokenizer, mistakes, placed)


def _check_settings(loaded: LoadedRecipe, processes: int, mistakes: Mistakes) -> None:
    """Check what depends neither on the model nor on files."""
    recipe = loaded.recipe
    for check in (refuse_nothing_held_out, *([refuse_uneven_steps] if processes > 1 else [])):
        with mistakes.collected():
            check(loaded, processes)
    if recipe.model.streaming is True:
        with mistakes.collected():
            refuse_streamed(loaded)
    mistakes.add(*window_mistakes(loaded))


def _planned(loaded: LoadedRecipe, plugins: Plugins, skeleton: Any, tokenizer: Any, mistakes: Mistakes) -> Plan:
    """Plan the pruning of a model, with or without weights."""
    if (select := loaded.recipe.select_tokens) is not None:
        with mistakes.collected():
            with loaded.at("select_tokens", "selector"):
                plugins.find(TOKEN_SELECTOR, select.selector)
            Selecting(select, plugins).check(skeleton, tokenizer, partial(loaded.where, "select_tokens", "options"))
    mistakes.add(*_finetune_mistakes(loaded, skeleton))
    tuning = loaded.recipe.finetune
    if tuning is not None and isinstance(tuning.teacher, ModelSource):
        text = tuning.draw or loaded.recipe.calibration
        with mistakes.collected(), loaded.at("finetune", "teacher"):
            check_teacher(tuning.teacher, None if text is None else text.sequence_length, skeleton)
    refuse_prepared(skeleton, "pruned")
    planned = make_plan(loaded, plugins, skeleton)
    with loaded.at("allocation", "target"):
        check_allocation(planned)
    return planned


@dataclass(frozen=True, eq=False)
class RunTexts:
    """All text of a run, as token ids.

    Attributes:
        calibration: [windows, tokens], or None if the plan needs none.
        training: text to fine-tune on [windows, tokens], or None.
        evaluation: the evaluators with their text; none if the recipe evaluates nothing.
    """

    calibration: Tensor | None
    training: Tensor | None
    evaluation: Sequence[ReadyEvaluator]


def read_all(
    loaded: LoadedRecipe, plugins: Plugins, planned: Plan, model: Any, tokenizer: Any, generated: Generated, *,
    evaluated: bool = True, calibration: Tensor | None = None,
) -> RunTexts:  # fmt: skip
    """Read every text of a recipe, and check that there is enough of it and that the model knows its tokens.

    Args:
        loaded: the recipe.
        plugins: that offer its evaluators.
        planned: its plan.
        model: the model, with or without weights.
        tokenizer: its tokenizer.
        generated: as for `read_calibration`.
        evaluated: whether to read evaluation text.
        calibration: the calibration windows, if the caller has them; otherwise they are read if the plan needs them.

    Raises:
        CalibrationError: text that cannot be read, is too short, or has tokens that the model does not know.
    """
    recipe, mistakes = loaded.recipe, Mistakes()
    training, evaluation = None, tuple[ReadyEvaluator, ...]()
    if recipe.evaluate is not None and evaluated:
        with mistakes.collected(UnreachableError), loaded.at("evaluate"):
            evaluation = read_evaluators(recipe.evaluate, plugins, tokenizer, model)
    if any(dataset.generate is not None for dataset in recipe.datasets().values()):
        mistakes.raise_all()  # what the model generates can take hours
    with mistakes.collected(UnreachableError), loaded.at("calibration"):
        if calibration is None and recipe.calibration is not None and planned.needs_calibration:
            calibration = read_calibration(recipe.calibration.draw, tokenizer, generated)
        if calibration is not None:
            check_ids(model, calibration, tokenizer, "the text")
    if not mistakes or (recipe.finetune is not None and recipe.finetune.draw is not None):
        with mistakes.collected(UnreachableError), loaded.at("finetune"):
            training = training_windows(recipe, tokenizer, calibration, generated)
            if training is not None:
                check_ids(model, training, tokenizer, "the text")
    mistakes.raise_all()
    return RunTexts(calibration, training, evaluation)


def calibration_batches(settings: Calibration | None, windows: Tensor | None) -> Sequence[Tensor]:
    """Split calibration windows [windows, tokens] into batches; none without windows."""
    return () if settings is None or windows is None else torch.split(windows, settings.batch_size)


def _finetune_mistakes(loaded: LoadedRecipe, skeleton: Any) -> Iterator[CompressxError]:
    """Yield an error for fine-tuning without text or PEFT, and for one that the model does not support."""
    recipe = loaded.recipe
    settings = recipe.finetune
    if settings is None:
        return
    draw = settings.draw
    if draw is None and recipe.calibration is None:
        yield RecipeError(
            f"{loaded.where('finetune')}: no text to train on: the recipe has neither calibration nor "
            "finetune.dataset; add one, such as finetune.dataset: wikitext"
        )
    if settings.lora is not None and find_spec("peft") is None:
        yield RecipeError(
            f"{loaded.where('finetune', 'lora')}: lora needs PEFT, which is not installed; pip install peft, "
            "or remove lora to train the weights themselves"
        )
    if settings.gradient_checkpointing and not skeleton.supports_gradient_checkpointing:
        yield UnsupportedModelError(
            f"{loaded.where('finetune')}: {type(skeleton).__name__} does not support gradient checkpointing; set "
            "finetune.gradient_checkpointing: false, which takes more memory"
        )
    positions = getattr(text_config(skeleton), "max_position_embeddings", None)
    if draw is not None and positions is not None and draw.sequence_length > positions:
        yield RecipeError(
            f"{loaded.where('finetune', 'sequence_length')}: sequence_length {draw.sequence_length} is longer than the "
            f"model's {positions} positions; set it to {positions} or less"
        )


def refuse_streamed(loaded: LoadedRecipe) -> None:
    """Refuse to fine-tune, or generate text with, a model whose weights are streamed from disk.

    Raises:
        RecipeError: the recipe has a `finetune` section, or a dataset that the model generates.
    """
    needs: list[tuple[tuple[Step, ...], str]] = [(("finetune",), "fine-tuning")] if loaded.recipe.finetune else []
    needs += [((*at, "generate"), "generating text") for at, x in loaded.recipe.datasets().items() if x.generate]
    for place, what in needs:
        given = loaded.recipe.model.streaming
        why = "which finds the model too large for the free memory" if given == "auto" else "which keeps them on disk"
        raise RecipeError(
            f"{loaded.where(*place)}: {what} needs all weights in memory, and model.streaming is {str(given).lower()} "
            f"at {loaded.where('model', 'streaming')}, {why}; set it to false, or remove {place[-1]}"
        )


def refuse_nothing_held_out(loaded: LoadedRecipe, processes: int) -> None:
    """Refuse block reconstruction that would have to evaluate on its training text.

    Raises:
        RecipeError: a process would get one calibration batch or less.
    """
    calibration, settings = loaded.recipe.calibration, loaded.recipe.reconstruct_block
    if calibration is None or settings is None or calibration.samples // processes > calibration.batch_size:
        return
    each = f" for each of {processes} processes" if processes > 1 else ""
    raise RecipeError(
        f"{loaded.where('reconstruct_block')}: no batch is left to hold out: {calibration.samples} calibration windows "
        f"are one batch of {calibration.batch_size}{each}; expected calibration.samples of "
        f"{(calibration.batch_size + 1) * processes} or more, or a smaller calibration.batch_size"
    )


def refuse_uneven_steps(loaded: LoadedRecipe, processes: int) -> None:
    """Refuse a block reconstruction batch size that does not divide evenly among the processes.

    Steps would otherwise be larger, and fewer.

    Raises:
        RecipeError: a step is not a whole number of calibration batches on each process.
    """
    calibration, settings = loaded.recipe.calibration, loaded.recipe.reconstruct_block
    if calibration is None or settings is None or settings.batch_size % (calibration.batch_size * processes) == 0:
        return
    smaller, rest = divmod(settings.batch_size, processes)
    raise RecipeError(
        f"{loaded.where('reconstruct_block', 'batch_size')}: a step of {settings.batch_size} windows cannot be shared "
        f"by {processes} processes in calibration batches of {calibration.batch_size}; expected a multiple of "
        f"{calibration.batch_size * processes}" + ("" if rest else f", or calibration.batch_size: {smaller}")
    )
