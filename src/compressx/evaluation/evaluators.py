"""A recipe's `evaluate` section: its evaluators found, checked, made ready with their text, and run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from pydantic import BaseModel, TypeAdapter, ValidationError

from compressx.api.evaluator import EvaluatedModel, Evaluator, EvaluatorSpec, Figures, ReadingEvaluator
from compressx.models.access import Access, config_fingerprint
from compressx.models.blockwise import evaluation_mode
from compressx.plugins.kinds import EVALUATOR
from compressx.plugins.manager import Plugins
from compressx.prompts.selection import SelectorSettings
from compressx.recipe.document import PlacedValue, Step
from compressx.recipe.schema import LoadedRecipe
from compressx.recipe.sources import datasets_in
from compressx.recipe.validation import validate_options
from compressx.runtime.cache import cached
from compressx.runtime.code import code_versions
from compressx.runtime.errors import Mistakes, PluginError, RecipeError, blamed_on, one_line

Options: TypeAlias = Mapping[str, BaseModel]
"""The validated options of each evaluator, by its name, in the order of the recipe."""

_FIGURES = dict[str, int | float | dict[str, int | float | str | list[dict[str, int | float]]]]


def options_of(document: PlacedValue, plugins: Plugins) -> dict[str, BaseModel]:
    """Return the options of each evaluator in the `evaluate` section of a document."""
    section = document.value.get("evaluate") if isinstance(document.value, Mapping) else None
    mistakes, found = Mistakes(), dict[str, BaseModel]()
    for name, options in section.items() if isinstance(section, Mapping) else ():  # the schema reports others
        with mistakes.collected():
            with document.at("evaluate", name):
                spec = plugins.find(EVALUATOR, name)
            if options is not None:
                where = functools.partial(document.where, "evaluate", name)
                found[name] = validate_options(spec.options, options, where)
    for place, dataset in datasets_in(found, ("evaluate",)):
        if dataset.generate is not None:
            mistakes.add(RecipeError(
                f"{document.where(*place)}: generate only goes with calibration and finetune: a model's own text does "
                "not measure it; name a dataset"
            ))  # fmt: skip
    mistakes.raise_all()
    return found


def with_evaluators(loaded: LoadedRecipe, plugins: Plugins) -> LoadedRecipe:
    """Return a recipe whose `evaluate` section is validated."""
    if loaded.recipe.evaluate is None:
        return loaded
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"evaluate": options_of(loaded, plugins)}))


def _built(spec: EvaluatorSpec, options: BaseModel) -> Evaluator:
    with blamed_on(f"build of evaluator {spec.name!r} failed"):
        return spec.build(options)


def check_evaluators(
    settings: Options, plugins: Plugins, model: Any | None, tokenizer: Any | None, mistakes: Mistakes,
    document: PlacedValue | None = None,
) -> None:  # fmt: skip
    """Let the evaluators refuse what they cannot measure, before text is read; collect what they say.

    The model has no weights; it and the tokenizer may be None. Without the document with the `evaluate`
    section, messages have no places.
    """
    owners: dict[str, str] = {}
    for name, options in settings.items():
        at = functools.partial(_collected, mistakes, document, name)
        with at():
            spec = plugins.find(EVALUATOR, name)
            with blamed_on(f"figures of evaluator {name!r} failed"):
                figures = [*spec.figures(options)]
            for figure in figures:
                if figure in owners:
                    raise RecipeError(
                        f"{owners[figure]} and {name} both name what they measure {figure!r}; choose another name, or "
                        "leave one out"
                    )
                owners[figure] = name
            evaluator = _built(spec, options)
            if isinstance(evaluator, ReadingEvaluator):
                with blamed_on(f"check of evaluator {name!r} failed"):
                    evaluator.check(model, tokenizer, at)


@contextmanager
def _collected(mistakes: Mistakes, document: PlacedValue | None, name: str, *loc: Step) -> Iterator[None]:
    """Collect an error, with the place of an evaluator's option if there is a document."""
    with mistakes.collected(), nullcontext() if document is None else document.at("evaluate", name, *loc):
        yield


@dataclass(frozen=True, eq=False)
class ReadyEvaluator:
    """An evaluator with its text.

    Attributes:
        name: in the recipe.
        options: validated.
        evaluator: built with them.
        text: what it read; None for one that reads none.
        code: digest of the code of its plugin.
    """

    name: str
    options: BaseModel
    evaluator: Evaluator
    text: Any
    code: str | None

    def fingerprint(self) -> Any:
        """Return what decides the figures beside options, model and code; None if they must not be cached."""
        if not isinstance(self.evaluator, ReadingEvaluator):
            return None
        with blamed_on(f"fingerprint of evaluator {self.name!r} failed"):
            return self.evaluator.fingerprint(self.text)

    def evaluate(self, model: EvaluatedModel) -> Figures:
        """Measure a model."""
        with blamed_on(f"evaluator {self.name!r}"), evaluation_mode(model.access.model), torch.no_grad():
            figures = self.evaluator.evaluate(replace(model, text=self.text))
        try:
            return TypeAdapter(_FIGURES).validate_python(figures)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise PluginError(
                f"evaluator {self.name!r} returned {one_line(repr(wrong['input'])):.80} under "
                f"{', '.join(map(str, wrong['loc'][:1])) or 'no name'}; expected figures by name: numbers, or mappings "
                "of numbers and texts"
            ) from None


def read_evaluators(settings: Options, plugins: Plugins, tokenizer: Any, model: Any) -> tuple[ReadyEvaluator, ...]:
    """Build evaluators and let them read their text; needs no weights."""
    found = []
    for name, options in settings.items():
        evaluator, text = _built(plugins.find(EVALUATOR, name), options), None
        if isinstance(evaluator, ReadingEvaluator):
            with blamed_on(f"read of evaluator {name!r} failed"):
                text = evaluator.read(model, tokenizer)
        found.append(ReadyEvaluator(name, options, evaluator, text, plugins.code_of(EVALUATOR, name)))
    return tuple(found)


def run_evaluators(
    access: Access, tokenizer: Any, evaluators: Sequence[ReadyEvaluator], *, selecting: SelectorSettings | None = None,
    progress: Callable[[int, int], None] | None = None, fingerprint: str | None = None,
    dense: Callable[[], Access] | None = None,
) -> Figures:  # fmt: skip
    """Measure a model by every evaluator of a recipe, and return the figures by name; nothing of it is changed.

    With the `fingerprint` of the model's weights, figures of the same model, text, code and library versions are taken
    from the cache. `progress` is called with an evaluator's steps and their total. `dense` opens the dense model.
    """
    # At the first prompt, since choosing blocks takes a run of the whole model.
    selection = None if selecting is None else functools.cache(functools.partial(selecting.prepare, access, tokenizer))
    model = EvaluatedModel(access, tokenizer, None, selection, progress or (lambda _done, _total: None), dense)
    found: dict[str, Any] = {}
    for evaluator in evaluators:
        key = None if fingerprint is None else _key(evaluator, access, tokenizer, selecting, fingerprint)
        measure = functools.partial(evaluator.evaluate, model)
        figures = measure() if key is None else cached(key, measure, "evaluations", _FIGURES)
        if twice := found.keys() & figures.keys():
            raise PluginError(
                f"evaluator {evaluator.name!r} returned {min(twice)!r}, which is measured already; leave one out"
            )
        found |= figures
    return found


def _key(
    evaluator: ReadyEvaluator, access: Access, tokenizer: Any, selecting: SelectorSettings | None, fingerprint: str
) -> dict[str, Any] | None:
    """Return all that decides the figures of an evaluator; None if they must not be cached."""
    if (text := evaluator.fingerprint()) is None:
        return None
    return {
        "evaluator": evaluator.name,
        "settings": evaluator.options.model_dump(mode="json", by_alias=True),
        "code": evaluator.code,
        "selecting": None if selecting is None else selecting.key(),
        "text": text,
        "model": fingerprint,
        "config": config_fingerprint(access.model),
        "tokenizer": hashlib.sha256(_tokenizing(tokenizer).encode()).hexdigest(),
        "device": access.device.type,
        "versions": code_versions("lm_eval"),
    }


def _tokenizing(tokenizer: Any) -> str:
    """Describe how a tokenizer splits text and writes chats: vocabulary, normalization, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    adds = [getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token", "model_max_length")]
    return repr((whole, tokenizer.special_tokens_map, adds, getattr(tokenizer, "chat_template", None)))
