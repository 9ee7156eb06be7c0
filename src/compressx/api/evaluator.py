"""What an evaluator sees and returns: the contract between the host and plugins that measure models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from pydantic import BaseModel


Figures: TypeAlias = Mapping[str, float | Mapping[str, float | str | list[dict[str, float]]]]
"""What is measured, by name, as in `report.json`: a number, or a mapping of numbers, texts and tables."""
At: TypeAlias = Callable[..., AbstractContextManager[None]]
"""`with at("tasks", 0):` collects a `CompressxError` with the place of this value among the options, and goes on."""


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """A model to measure, in evaluation mode; nothing of it may be changed.

    Attributes:
        access: `logits(batches)` yields those of batches of token ids, also of a model streamed from disk;
            `with access.whole() as model:` is the transformers model, callable on any input.
        tokenizer: its tokenizer.
        text: what `ReadingEvaluator.read` returned; None for other evaluators.
        selection: returns what shortens prompts as the recipe's `select_tokens` says, which takes a run of the model at
            the first call; None without that section.
        progress: called with the steps done and their total.
        dense: opens the dense model, an access as above, which is freed once nothing holds it; None where the dense
            model itself is measured, and unless `EvaluatorSpec.compares` is set.
    """

    access: Any
    tokenizer: Any
    text: Any = None
    selection: Callable[[], Any] | None = None
    progress: Callable[[int, int], None] = lambda _done, _total: None
    dense: Callable[[], Any] | None = None


class Evaluator(Protocol):
    """Measures models: the dense one, the pruned one, the fine-tuned one."""

    def evaluate(self, model: EvaluatedModel) -> Figures:
        """Measure a model.

        Returns:
            Figures under names of their own, such as `{"mine": {"accuracy": 0.6}}`.
        """


@runtime_checkable
class ReadingEvaluator(Evaluator, Protocol):
    """An evaluator that reads text before weights are loaded, so that mistakes are known early."""

    def check(self, model: Any | None, tokenizer: Any | None, at: At) -> None:
        """Refuse options that cannot be measured, before any text is read.

        Args:
            model: without weights; None if it could not be found.
            tokenizer: likewise.
            at: adds the place of an option to an error.
        """

    def read(self, model: Any, tokenizer: Any) -> Any:
        """Return the text to measure on, for a model with or without weights."""

    def fingerprint(self, text: Any) -> Any:
        """Return what decides the figures beside options, model and code, as JSON; None if they must not be cached."""


@dataclass(frozen=True)
class EvaluatorSpec:
    """How a plugin offers an evaluator to recipes and to `compressx eval`.

    Attributes:
        name: the key in a recipe's `evaluate` section.
        summary: one line for people.
        options: pydantic model of what is below that key; unknown options are refused whatever its own config says.
        build: makes the evaluator from validated options.
        prompts: whether it calls `EvaluatedModel.selection`.
        compares: whether it calls `EvaluatedModel.dense`; the dense model is then kept, or opened again after pruning.
        figures: from validated options, names that `evaluate` returns; two evaluators of a recipe may not share one.
    """

    name: str
    summary: str
    options: type[BaseModel]
    build: Callable[[Any], Evaluator]
    prompts: bool = False
    figures: Callable[[Any], Iterable[str]] = lambda _: ()
    compares: bool = False
