"""The first stage: text is read, the model is open_model_of, and what decides the result is recorded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, get_args

import torch
from pydantic import conint, conlist
from torch import Tensor

from compressx.api.record import Arithmetic
from compressx.blocks.difference import inputs_of
from compressx.data.documents import UnreachableError, check_dataset, require_template
from compressx.data.windows import Generated, beginning, fingerprint, full_windows, prompt_ids, read_calibration
from compressx.evaluation.evaluators import read_evaluators
from compressx.models.access import Access, config_fingerprint, weights_fingerprint
from compressx.models.architecture import architecture_of, text_config
from compressx.models.arithmetic import run_arithmetic
from compressx.models.blockwise import check_calls
from compressx.models.generate import check_ids, check_room, end_tokens, first_token, sample_texts
from compressx.models.streaming import StreamedModel, open_model
from compressx.planning.plan import Plan
from compressx.recipe.document import Step
from compressx.recipe.schema import LoadedRecipe, Recipe
from compressx.recipe.sources import ComputeDtype, Draw, Generate
from compressx.runtime.code import code_versions
from compressx.runtime.errors import Mistakes, RecipeError
from compressx.stages.state import RunState, Stage
from compressx.stages.store import Journal, recorded_arithmetic


class Inputs(Stage):
    """Read every text, open the model, choose the arithmetic, and open the journal."""

    everywhere = True

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse datasets that cannot be read, and sequences that cannot be drawn."""
        loaded = state.loaded
        for place, dataset in state.recipe.datasets().items():
            with mistakes.collected(), loaded.at(*place):
                if check_dataset(dataset) and state.tokenizer is not None:
                    require_template(state.tokenizer)
                if dataset.generate and dataset.generate.prompts is None and state.tokenizer is not None:
                    first_token(state.tokenizer, state.skeleton)
        mistakes.add(*_draw_mistakes(loaded))
        if state.recipe.model.streaming is True:
            with mistakes.collected():
                _refuse_streamed(loaded)
            if state.recipe.evaluate is not None and plan is not None and not plan.needs_calibration:
                with mistakes.collected(), loaded.at("evaluate"):  # which runs one block after the other
                    check_calls(state.skeleton, architecture_of(state.skeleton))

    def run(self, state: RunState) -> None:
        """Read and open; the weights come last, or when text is to be generated with them."""
        state.report_progress("calibrate", 0, 1)
        read_all(state, partial(_generated, state), evaluated=state.first)
        state.report_progress("load", 1, 2)
        state.access = state.open()
        choose_arithmetic(state)
        if state.folder is None:
            return
        state.inputs = state.by_first(partial(_inputs, state))
        state.store = Journal(state.folder, state.inputs, state.ranks, state.timing)


def open_model_of(state: RunState) -> Access:
    """Open the model of the recipe, and name what nothing reads of its files."""
    assert state.checkpoint is not None  # noqa: S101 - found by the checks
    with state.loaded.at("model"):
        access = open_model(state.checkpoint, state.recipe.model.streaming, state.device)
    if isinstance(access, StreamedModel):
        _refuse_streamed(state.loaded)
    if unread := access.model.unread:
        state.log.write(
            logging.WARNING, f"nothing reads {', '.join(unread[:3])} of the checkpoint"
            + (f", nor {len(unread) - 3} others" if unread[3:] else "") + "; report.json names all",
        )  # fmt: skip
    for key, count in getattr(access.model, "emptied", {}).items():
        state.note(
            f"model: its config has {key} {count}; the result has 0, since blocks that predict further are left out"
        )
    return access


def read_all(state: RunState, generated: Generated, *, evaluated: bool = True) -> None:
    """Read every text of a recipe that the state has not yet, and check its amount and that the model knows its tokens.

    Args:
        state: receives the text.
        generated: as for `read_calibration`.
        evaluated: whether to read evaluation text.
    """
    loaded, recipe, model, tokenizer, mistakes = state.loaded, state.recipe, state.skeleton, state.tokenizer, Mistakes()
    if recipe.evaluate is not None and evaluated:
        with mistakes.collected(UnreachableError), loaded.at("evaluate"):
            state.evaluators = read_evaluators(recipe.evaluate, state.plugins, tokenizer, model)
    if any(dataset.generate is not None for dataset in recipe.datasets().values()):
        mistakes.raise_all()  # what the model generates can take hours
    with mistakes.collected(UnreachableError), loaded.at("calibration"):
        text = recipe.calibration
        if state.calibration is None and text is not None and state.plan.needs_calibration:
            state.calibration = read_calibration(text, tokenizer, generated, model)
        if state.calibration is not None:
            check_ids(model, state.calibration, tokenizer, "the text")
    tuning = recipe.finetune
    with mistakes.collected(UnreachableError), loaded.at("finetune"):
        if tuning is not None and (tuning.draw is not None or not mistakes):
            state.training = state.calibration if tuning.draw is None else None
            if state.training is None:
                state.training = read_calibration(
                    tuning.draw or recipe.draws()["calibration"], tokenizer, generated, model
                )
            check_ids(model, state.training, tokenizer, "the text")
    mistakes.raise_all()


def _generated(state: RunState, settings: Generate, draw: Draw) -> Tensor:
    """Return the dense model's own text, int64 [samples, length]: written by the first process, and cached on disk."""
    tokenizer, length, needed = state.tokenizer, draw.sequence_length, settings.samples * draw.sequence_length
    if settings.prompts is None:
        bos, prompts, tokens = None, [[first_token(tokenizer, state.skeleton)]] * settings.samples, length - 1
    else:
        bos, tokens = beginning(tokenizer, draw.bos, state.skeleton), settings.tokens or 256
        prompts = prompt_ids(settings, tokenizer, needed // 8 + 1)  # each has 8 tokens or more with its answer
        check_room(state.skeleton, max(map(len, prompts)), tokens, "generate.prompts")
        check_ids(state.skeleton, torch.tensor([*chain(*prompts)]), tokenizer, "a prompt")
    access = state.open()
    ends = [] if settings.prompts is None else end_tokens(access.model, tokenizer)

    def compute() -> list[list[int]]:
        ids = sample_texts(
            access.model, prompts, tokens, needed + 1, settings, ends=ends,  # one of them may be BOS
            progress=lambda i, n: state.report_progress("calibrate", i, n, "tokens generated"),
        )  # fmt: skip
        written: list[list[int]] = full_windows(ids, settings.samples, length, bos, "generate").tolist()
        return written[: settings.samples]

    def cached() -> list[list[int]]:
        token = conint(ge=0, lt=text_config(access.model).vocab_size)
        kind = conlist(conlist(token, min_length=length, max_length=length), min_length=settings.samples)
        key = {
            "settings": settings.model_dump(mode="json"),
            "length": length,
            "prompts": fingerprint(torch.tensor([x for prompt in prompts for x in (len(prompt), *prompt)])),
            "bos": bos,
            "ends": ends,
            "model": weights_fingerprint(access) if state.checkpoint is not None else "",
            "config": config_fingerprint(access.model),
            "device": access.device.type,
            "versions": code_versions(),
        }
        return state.cached(key, compute, "generated", kind)

    return torch.tensor(state.by_first(cached))


def choose_arithmetic(state: RunState) -> None:
    """Choose the dtype of matmuls, which the recipe names from then on."""
    recipe = state.recipe
    if not state.plan.needs_calibration and recipe.finetune is None:
        return
    training = recipe.reconstruct_block is not None or recipe.finetune is not None
    chosen = None if state.folder is None else recorded_arithmetic(state.folder)
    if recipe.compute_dtype != "auto" or chosen is None:
        chosen = run_arithmetic(recipe.compute_dtype, state.access.model.dtype, state.device, training=training)
    state.arithmetic = chosen = state.by_first(partial(lambda x: x, chosen), Arithmetic)  # rates differ
    state.note(f"compute_dtype: {chosen}")
    named = {"compute_dtype": chosen.dtype} if chosen.dtype in get_args(ComputeDtype) else {}
    state.loaded = dataclasses.replace(state.loaded, recipe=recipe.model_copy(update=named))


def _inputs(state: RunState) -> dict[str, Any]:
    """Return everything that determines the pruned blocks, by names that appear in error messages."""
    plan, access, sequences = state.plan, state.access, state.calibration
    used = {spec.name for rule in plan.rules for spec, _ in rule.pruners}
    recipe = state.recipe.model_dump(mode="json", exclude_none=True)
    plugins = [p for p in state.plugins.records if p.status == "loaded" and used & {*p.offers["pruners"]}]
    return {
        "model": weights_fingerprint(access),
        "model config": config_fingerprint(access.model),
        **inputs_of(state),
        "prune": recipe["prune"],
        "ignore": recipe.get("ignore"),
        "compute_dtype": state.arithmetic and state.arithmetic.dtype,
        "arithmetic": state.arithmetic and dataclasses.asdict(state.arithmetic),
        "allocation": recipe.get("allocation"),
        "reconstruct_block": recipe.get("reconstruct_block"),
        "calibration tokens": None if sequences is None else fingerprint(sequences),
        "calibration batch_size": None if sequences is None else recipe["calibration"]["batch_size"],
        "plugins": {p.name: f"{p.version or 'no version'}, code {p.code()}" for p in plugins},
        "versions": code_versions(),
        "device": access.device.type,
        "deterministic": recipe["deterministic"],
        "processes": state.processes,
    }


def _draw_mistakes(loaded: LoadedRecipe) -> Iterator[RecipeError]:
    """Yield an error for each dataset without a sequence, and for fewer generated ones than are drawn from them."""
    for name, draw in loaded.recipe.draws().items():
        places = [place for place in loaded.recipe.datasets() if place[0] == name]
        for place, (source, weight), share in zip(places, draw.sources, draw.shares, strict=True):
            if share == 0:
                yield RecipeError(
                    f"{loaded.where(*place)}: weight {weight:g} gives this dataset 0 of {draw.samples} sequences; "
                    f"raise its weight or {name}.samples, or remove it"
                )
            if source.generate is not None and source.generate.samples < share:
                yield RecipeError(
                    f"{loaded.where(*place, 'generate')}: {share} sequences are drawn from {source.generate.samples} "
                    f"generated sequences; expected generate.samples of {share} or more"
                )


def needing_all_weights(recipe: Recipe) -> Iterator[tuple[tuple[Step, ...], str]]:
    """Yield what needs all weights in memory at the same time: its place in the recipe, and what it does."""
    if recipe.finetune is not None:
        yield ("finetune",), "fine-tuning"
    if recipe.base_keeps:
        yield ("base_keeps",), "taking weights from another model"
    for place, dataset in recipe.datasets().items():
        if dataset.generate is not None:
            yield (*place, "generate"), "generating text"


def _refuse_streamed(loaded: LoadedRecipe) -> None:
    """Refuse what needs all weights in memory of a model whose weights are streamed from disk."""
    for place, what in needing_all_weights(loaded.recipe):
        given = loaded.recipe.model.streaming
        why = "which finds the model too large for the free memory" if given == "auto" else "which keeps them on disk"
        raise RecipeError(
            f"{loaded.where(*place)}: {what} needs all weights in memory, and model.streaming is {str(given).lower()} "
            f"at {loaded.where('model', 'streaming')}, {why}; set it to false, or remove {place[-1]}"
        )
