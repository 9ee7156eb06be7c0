"""Evaluate saved models, and apply saved masks to another checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compressx.api.evaluator import Figures
from compressx.api.exporter import FinishedModel, PlannedModel
from compressx.data.documents import check_dataset
from compressx.evaluation.evaluators import (
    Options,
    check_evaluators,
    options_of,
    read_evaluators,
    run_evaluators,
)
from compressx.masks.maskset import MaskSet
from compressx.models.access import Access, Device, device_for
from compressx.models.architecture import architecture_of, find_blocks
from compressx.models.checkpoint import find_checkpoint, keep_settings, local_folder
from compressx.models.export import SETTINGS, left_out, output_folder
from compressx.models.loading import load_model, load_skeleton, load_tokenizer, vocabularies_differ
from compressx.models.packed_folder import needs_base
from compressx.models.shards import OUTSIDE, save_model
from compressx.models.streaming import open_model
from compressx.plugins.kinds import EVALUATOR, EXPORTER
from compressx.plugins.manager import Plugins
from compressx.prompts.selection import SelectorSettings
from compressx.recipe.document import PlacedValue, from_python, override, steps_of
from compressx.recipe.schema import load_recipe
from compressx.recipe.sections import SelectTokens
from compressx.recipe.sources import ModelField, ModelSource, datasets_in
from compressx.recipe.validation import Strict, validate_options, validated
from compressx.runtime.errors import ArtifactError, Mistakes, RecipeError, blamed_on, one_line, suggestion
from compressx.runtime.files import BLOCKS, os_errors_named
from compressx.runtime.finite import refuse_damage
from compressx.runtime.modes import reuse_freed_memory

_SOURCE: TypeAdapter[ModelSource] = TypeAdapter(ModelField)
_DEFAULT: Mapping[str, Any] = {"dataset": "wikitext", "sequence_length": 2048}


class _EvaluateOptions(Strict):
    evaluate: dict[str, Any]
    select_tokens: SelectTokens | None = None


def source_of(
    model: str, *, dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False,
    base: str | None = None,
) -> ModelSource:  # fmt: skip
    """Parse a model argument: an output folder, a model folder, a GGUF file or a hub id."""
    source = _SOURCE.validate_python(model)
    if revision is not None and source.id is None:
        raise RecipeError(f"--revision {revision}: {model} is a path, and only hub models have revisions")
    if base is not None and source.path is None:
        raise RecipeError(f"--base {base}: {model} is no folder here, and only packed folders have a base")
    told = {"dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code, "base": base}
    return source.model_copy(update=told)


def evaluate_section(
    recipe: Path | None, overrides: Sequence[str], plugins: Plugins, *, default: str | None = "token_perplexity"
) -> tuple[Options, SelectTokens | None]:
    """Return what to measure, a recipe's `evaluate` section or the `default` on WikiText-2, and `select_tokens`.

    Overrides are `evaluate.KEY=VALUE` or `select_tokens.KEY=VALUE`, as for `--set`; without a default they alone say
    what is measured where there is no recipe.
    """
    for key in (assignment.partition("=")[0] for assignment in overrides):
        if (first := steps_of(key)[0]) not in (read := _EvaluateOptions.model_fields):
            told = f"{suggestion(first, read)}it reads evaluate.KEY and select_tokens.KEY"
            raise RecipeError(f"--set {one_line(key):.80}: eval does not read it; {told}, and measures MODEL")
    if recipe is not None:
        loaded = load_recipe(recipe, overrides)
        document: PlacedValue = loaded
        selecting = loaded.recipe.select_tokens
        if loaded.recipe.evaluate is None:
            raise RecipeError(f"{recipe}: no evaluate section; add one, or omit --recipe")
    else:
        document = from_python({"evaluate": {default: dict(_DEFAULT)} if default else {}}, "--set")
        for assignment in overrides:
            document = override(document, assignment)
        selecting = validated(_EvaluateOptions, document.value, document.where).select_tokens
    settings, offered = options_of(document, plugins), plugins.offers[EVALUATOR.key]
    if not settings:
        raise RecipeError(f"{recipe or '--set'}: evaluate is empty; give it {', '.join(offered)}, or several of them")
    if recipe is None and selecting is not None and not any(offered[name].prompts for name in settings):
        told = " or ".join(f"evaluate.{name}" for name, spec in offered.items() if spec.prompts)
        raise RecipeError(f"--set select_tokens: nothing that is measured reads a prompt; give {told}")
    for place, dataset in datasets_in(settings, ("evaluate",)):
        with document.at(*place):
            check_dataset(dataset)
    mistakes = Mistakes()
    check_evaluators(settings, plugins, None, None, mistakes, document)
    mistakes.raise_all()
    return settings, selecting


@reuse_freed_memory()
def evaluate_saved(
    source: ModelSource,
    settings: Options,
    plugins: Plugins,
    *,
    masks: Path | None = None,
    against: ModelSource | None = None,
    selecting: SelectorSettings | None = None,
    device: Device = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Figures]:
    """Return figures of a model, `pruned`, and of the one that it is measured `against`, `dense`.

    Masks are applied first if given; the model is then loaded completely into memory.
    """
    where = device_for(device)
    loaded = None if masks is None else MaskSet.load(masks)
    source, base = _of_masks(source, loaded)
    checkpoint = find_checkpoint(source)
    tokenizer = load_tokenizer(checkpoint)
    skeleton = load_skeleton(checkpoint)
    if selecting is not None:
        selecting.check(skeleton, tokenizer)
    others = [] if against is None else [find_checkpoint(against)]
    mistakes = Mistakes()
    check_evaluators(settings, plugins, skeleton, tokenizer, mistakes)
    for other in others:
        dense_skeleton = load_skeleton(other)
        if wrong := vocabularies_differ(other, dense_skeleton, skeleton, tokenizer):
            mistakes.add(RecipeError(f"--against: the dense model has {wrong}"))
        check_evaluators(settings, plugins, dense_skeleton, tokenizer, mistakes)
    mistakes.raise_all()
    ready = read_evaluators(settings, plugins, tokenizer, skeleton)
    measure = partial(run_evaluators, tokenizer=tokenizer, evaluators=ready, selecting=selecting, progress=progress)
    dense = next((open_model(other, "auto", where) for other in others), None)
    found = {} if dense is None else {"dense": measure(dense)}
    access: Access = open_model(checkpoint, False if loaded is not None else source.streaming, where)
    if loaded is not None:
        loaded.apply(access.model, base=base)
    return found | {"pruned": measure(access, dense=None if dense is None else lambda: dense)}


def _of_masks(source: ModelSource, masks: MaskSet | None) -> tuple[ModelSource, Any]:
    """Return the source, and the base that masks of a difference need, loaded; the model itself may need it, too."""
    if source.base is None or masks is None or not masks.of_difference:
        return source, None
    base = load_model(find_checkpoint(source_of(source.base, dtype=source.dtype)))
    packed = source.path is not None and needs_base(source.path)
    return (source if packed else source.model_copy(update={"base": None})), base


def _new(output: Path) -> Path:
    """Return where to write; refuse what is there."""
    if (output := output.expanduser()).exists():
        raise ArtifactError(f"output {output} exists; name a new one")
    return output


def export_saved(
    source: ModelSource, name: str, options: Mapping[str, Any], output: Path, plugins: Plugins
) -> tuple[int, str | None]:
    """Write a saved model in another format: a folder, or a file where the format has only one.

    Returns:
        The bytes that were written, and what the exporter says of them.
    """
    spec = plugins.find(EXPORTER, name)
    given = validate_options(spec.options, options, lambda *loc: f"--set {'.'.join(map(str, loc))}".rstrip())
    output = _new(output)
    checkpoint = find_checkpoint(source)
    tokenizer = load_tokenizer(checkpoint)
    with blamed_on(f"exporter {name!r}"):
        exporter: Any = spec.build(given)
        file: str | None = getattr(exporter, "loads", None)
        single = checkpoint.file
        if single is not None and file is None:
            raise ArtifactError(f"{single} is a GGUF file, and {name} is made of a folder of safetensors")
        if hasattr(exporter, "check"):
            exporter.check(PlannedModel(load_skeleton(checkpoint), single, tokenizer=tokenizer))
        folder = Path(checkpoint.location)
        if single is None:
            folder = local_folder(checkpoint)
            local_folder(checkpoint, SETTINGS)  # of the hub, into the same folder
        masks = None if source.path is None else source.path.expanduser() / "masks.safetensors"
        held = MaskSet({}) if masks is None or not masks.is_file() else MaskSet.load(masks)
        access = open_model(checkpoint, source.streaming, device_for("cpu"))
        left: list[str] = []
        with output_folder(output, part=f"made/{file or ''}") as building:
            (building / "made").mkdir()
            if file is None and source.dtype != "auto":  # then the exporter reads a folder of that dtype
                folder = building / "dense"
                for fqn in (OUTSIDE, *find_blocks(access.model)):
                    with access.materialise(fqn) as module:
                        refuse_damage(module, fqn)
                access.save(tokenizer, building / BLOCKS, folder)
                _, left = keep_settings(checkpoint, folder, card=True)
            told = exporter.export(FinishedModel(folder, access, tokenizer, held, None, single), building / "made")
            told = told or left_out(left)
    return sum(path.stat().st_size for path in (output, *output.rglob("*")) if path.is_file()), told


def single_file_of(recipe: Path) -> Path:
    """Return the GGUF file that a recipe prunes; it is downloaded if need be."""
    checkpoint = find_checkpoint(load_recipe(recipe).recipe.model)
    if checkpoint.file is None:
        raise ArtifactError(f"{recipe}: its model {checkpoint.location} is no GGUF file; give one after --like")
    return checkpoint.file


def apply_masks(masks: Path, source: ModelSource, output: Path, *, original: bool = False) -> str:
    """Apply saved masks to a model of the same shapes, such as a fine-tuned one, and save it to a new folder.

    The folder gets `model/` (including the tokenizer) and `masks.safetensors`, as after a run. With `original`, the
    weights have to be the ones that were pruned, byte for byte. What that changed is returned in a sentence.
    """
    output = _new(output)
    loaded = MaskSet.load(masks)
    source, base = _of_masks(source, loaded)
    checkpoint = find_checkpoint(source)
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint)
    changed = sum(loaded.deviations(model, base=base).values())
    loaded.apply(model, original=original, base=base)
    with output_folder(output) as folder:
        save_model(model, tokenizer, folder / "model")
        keep_settings(checkpoint, folder / "model")
        with os_errors_named("copy", masks):
            shutil.copyfile(masks, folder / "masks.safetensors")
    on = f"masks on {len(loaded)} of {len({*architecture_of(model).linears, *loaded})} linears"
    became = "zero" if base is None else "the base's"
    return f"{on}: {changed} weights became {became}; written to {output}"
