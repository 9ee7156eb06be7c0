"""The evaluator `token_perplexity`: in fixed windows, the one that SparseGPT and Wanda report.

`word_perplexity` and `byte_perplexity` of lm-evaluation-harness are other metrics, per whitespace-separated word and
per byte.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field, StrictInt, model_validator
from torch import Tensor
from torch.nn import functional

from compressx.api.evaluator import At, EvaluatedModel, EvaluatorSpec, Figures
from compressx.api.hooks import hookimpl
from compressx.data.documents import documents
from compressx.data.windows import beginning, evaluation_windows, fingerprint, token_ids
from compressx.models.access import Access
from compressx.models.architecture import positions_of
from compressx.models.blockwise import evaluation_mode
from compressx.models.generate import check_ids
from compressx.recipe.sources import Bos, DatasetField, DatasetSource
from compressx.recipe.validation import Strict, exactly_one, refuse_if
from compressx.runtime.errors import CalibrationError, RecipeError

_LOGITS_IN_FLOAT32 = 2**24
"""Logits converted to float32 at a time: 64 MiB, a few hundred positions of a large vocabulary."""

_LARGEST_EXPONENT = math.log(sys.float_info.max)


class TokenPerplexity(Strict):
    """exp of the mean negative log-likelihood per token over fixed, non-overlapping windows."""

    dataset: DatasetField | None = Field(None, description="text to measure on; this or datasets")
    datasets: dict[str, DatasetField] | None = Field(
        None,
        min_length=1,
        description="several texts, each measured by itself, by their names in the report",
        examples=[{"prose": "wikitext", "code": {"text": "code.txt"}}],
    )
    sequence_length: StrictInt = Field(2048, ge=2, description="tokens in a window")
    samples: StrictInt | None = Field(
        None, ge=1, description="number of windows of each text, from the first; all when absent"
    )
    bos: Bos = Field("auto", description="begin each window with the tokenizer's BOS token; auto: for Gemma only")
    batch_size: StrictInt = Field(4, ge=1, description="windows per forward pass")

    @model_validator(mode="after")
    def _one_or_several(self) -> TokenPerplexity:
        exactly_one(dict(self), "dataset", "datasets")
        unnamed = "a text has no name; expected the one that the report shows"
        refuse_if("" in (self.datasets or ()), unnamed, "datasets")
        return self

    @property
    def texts(self) -> dict[str, DatasetSource]:
        """The texts by name; the name of a single one is empty."""
        return self.datasets or ({} if self.dataset is None else {"": self.dataset})


def token_perplexity(
    access: Access, windows: Tensor, *, batch_size: int = 4, progress: Callable[[int, int], None] | None = None
) -> float:
    """Compute exp of the mean negative log-likelihood per token, as reported by SparseGPT (arXiv 2301.00774) and Wanda.

    Windows are independent. The first token of each is not predicted: T tokens give T - 1 predictions.

    Args:
        access: a transformers causal language model; its training mode is restored afterwards.
        windows: int64 [windows, T].
        batch_size: windows per forward pass; affects speed and memory, not the result.
        progress: called with the number of windows done and their total.

    Returns:
        The perplexity. Likelihoods are at least float32 and summed in float64.
    """
    total = 0.0
    batches = torch.split(windows, batch_size)
    with torch.no_grad(), evaluation_mode(access.model):
        for number, logits in enumerate(access.logits(batches)):  # [B, T, vocabulary]
            start, batch = number * batch_size, batches[number].to(logits.device)
            for index, (scores, ids) in enumerate(zip(logits, batch, strict=True), start=start):
                loss = _negative_log_likelihood(scores[:-1], ids[1:])
                mean = loss / (len(ids) - 1)
                if not mean < _LARGEST_EXPONENT:
                    raise CalibrationError(
                        f"evaluation window {index} of {len(windows)}: the mean negative log-likelihood is {mean}, "
                        f"not a finite perplexity; the model's weights are broken, or {logits.dtype} overflows"
                    )
                total += loss
            if progress is not None:
                progress(min(start + batch_size, len(windows)), len(windows))
    return math.exp(total / (windows.numel() - len(windows)))


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Sum the negative log-likelihood of targets [n] under logits [n, vocabulary], converting a few rows at a time."""
    rows = max(1, _LOGITS_IN_FLOAT32 // logits.shape[-1])
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for start in range(0, len(targets), rows):
        chunk, expected = logits[start : start + rows].to(dtype), targets[start : start + rows]
        total += functional.cross_entropy(chunk, expected, reduction="none").sum(dtype=torch.float64)
    return float(total)


@dataclass(frozen=True)
class PerplexityEvaluator:
    """Measures each text by itself."""

    options: TokenPerplexity

    def check(self, model: Any | None, tokenizer: Any | None, at: At) -> None:  # noqa: ARG002 - text is read later
        length, positions = self.options.sequence_length, sys.maxsize if model is None else positions_of(model)
        with at("sequence_length"):
            if length > positions:
                raise RecipeError(
                    f"sequence_length {length} is longer than the model's {positions} positions; set it to {positions} "
                    "or less"
                )

    def read(self, model: Any, tokenizer: Any) -> dict[str, Tensor]:
        """Return the windows of each text, int64 [windows, T], by its name, "" for a single one."""
        windows, wanted = {}, self.options
        bos = beginning(tokenizer, wanted.bos, model)
        positions = positions_of(model)
        for name, source in wanted.texts.items():
            ids = token_ids(documents(source, "evaluation"), tokenizer)
            windows[name] = evaluation_windows(ids, wanted.samples, wanted.sequence_length, bos=bos, limit=positions)
            check_ids(model, windows[name], tokenizer, f"the text {name}".strip())
        return windows

    def fingerprint(self, text: Mapping[str, Tensor]) -> list[str]:
        return [fingerprint(windows) for windows in text.values()]

    def evaluate(self, model: EvaluatedModel) -> Figures:
        """Return the perplexity; of several texts, under the name of each."""
        found: dict[str, float | Mapping[str, float]] = {}
        before, total = 0, sum(map(len, model.text.values()))
        for name, ids in model.text.items():
            value = token_perplexity(
                model.access, ids, batch_size=self.options.batch_size,
                progress=lambda done, _, before=before: model.progress(before + done, total),  # type: ignore[misc]
            )  # fmt: skip
            found |= {name: {"token_perplexity": value}} if name else {"token_perplexity": value}
            before += len(ids)
        return found


@hookimpl
def compressx_evaluators() -> list[EvaluatorSpec]:
    """Offer the evaluator to recipes."""
    return [
        EvaluatorSpec(
            "token_perplexity", "perplexity in fixed windows", TokenPerplexity, PerplexityEvaluator,
            figures=lambda options: options.datasets or ["token_perplexity"],
        )
    ]  # fmt: skip
