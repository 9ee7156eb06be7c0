"""The evaluator `sample`: what the dense and the pruned model write after the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field, StrictBool, StrictInt
from torch import Tensor

from compressx.api.evaluator import At, EvaluatedModel, EvaluatorSpec, Figures
from compressx.api.hooks import hookimpl
from compressx.data.documents import rendered_one
from compressx.data.windows import fingerprint
from compressx.models.blockwise import evaluation_mode
from compressx.models.generate import check_ids, check_room, greedy, readable
from compressx.recipe.validation import Strict
from compressx.runtime.errors import CalibrationError


class Sample(Strict):
    """What each model writes after the same prompt, the likeliest token each time."""

    prompt: str = Field(min_length=1, examples=["The three laws of motion are"])
    tokens: StrictInt = Field(64, ge=1, description="written at most; fewer where the model ends its text")
    apply_chat_template: StrictBool = Field(False, description="give the prompt as a user's message")


def prompt_ids(settings: Sample, tokenizer: Any) -> Tensor:
    """Return the prompt's token ids, int64 [1, tokens], as the tokenizer begins a text or a chat."""
    if settings.apply_chat_template:
        if not tokenizer.chat_template:
            raise CalibrationError(
                "evaluate.sample: apply_chat_template is true, and the tokenizer has no chat template; set it to false"
            )
        said = [{"role": "user", "content": settings.prompt}]
        text = rendered_one(said, tokenizer, "evaluate.sample", answered=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(settings.prompt)["input_ids"]
    if not ids:
        raise CalibrationError(f"evaluate.sample: the prompt {settings.prompt!r} has no token; give another")
    return torch.tensor([ids])


@dataclass(frozen=True)
class SampleEvaluator:
    """Lets a model write after the prompt."""

    options: Sample

    def check(self, model: Any | None, tokenizer: Any | None, at: At) -> None:  # noqa: ARG002 - of the whole section
        if tokenizer is not None:
            ids = prompt_ids(self.options, tokenizer)
            check_ids(model, ids, tokenizer, "evaluate.sample: the prompt")
            check_room(model, ids.shape[1], self.options.tokens, "evaluate.sample")

    def read(self, model: Any, tokenizer: Any) -> Tensor:  # noqa: ARG002 - `check` has looked at the model
        return prompt_ids(self.options, tokenizer)

    def fingerprint(self, text: Tensor) -> str:
        return fingerprint(text)

    def evaluate(self, model: EvaluatedModel) -> Figures:
        with model.access.whole() as whole, evaluation_mode(whole):
            written = greedy(whole, model.tokenizer, model.text, self.options.tokens)[0]
        return {"sample": {"prompt": self.options.prompt, "text": readable(model.tokenizer, written)}}


@hookimpl
def compressx_evaluators() -> list[EvaluatorSpec]:
    """Offer the evaluator to recipes."""
    return [
        EvaluatorSpec(
            "sample", "a text to read, after the same prompt", Sample, SampleEvaluator, figures=lambda _: ["sample"]
        )
    ]
