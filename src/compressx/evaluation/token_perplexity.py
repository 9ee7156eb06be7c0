"""The evaluators `token_perplexity`, in fixed windows as SparseGPT and Wanda report it, and `fidelity`, which compares.

`word_perplexity` and `byte_perplexity` of lm-evaluation-harness are other metrics, per whitespace-separated word and
per byte.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import Field, StrictInt, model_validator
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressx.api.evaluator import At, EvaluatedModel, EvaluatorSpec, Figures
from compressx.api.hooks import hookimpl
from compressx.data.documents import documents
from compressx.data.windows import beginning, evaluation_windows, fingerprint, token_ids
from compressx.evaluation.fidelity import FIGURES, compare, fidelity
from compressx.models.access import Access
from compressx.models.architecture import positions_of
from compressx.models.blockwise import evaluation_mode
from compressx.models.generate import check_ids
from compressx.recipe.sources import Bos, DatasetField, DatasetSource
from compressx.recipe.validation import Strict, exactly_one, refuse_if
from compressx.runtime.errors import CalibrationError, RecipeError

_LOGITS_IN_FLOAT32 = 2**21
"""Logits converted to float32 at a time: 8 MiB. Arrays of more than 32 MiB get new pages: twice the time."""

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
    return _perplexity(measure_tokens(access, windows, batch_size=batch_size, progress=progress))


def measure_tokens(
    access: Access, windows: Tensor, dense: Access | None = None, *, batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:  # fmt: skip
    """Return each token's negative log-likelihood, float64 [1, windows, T - 1] on the CPU; other arguments as above.

    Beside a dense model, which runs batch by batch as well, what `compare` returns: [4, windows, T - 1].
    """
    found: list[Tensor] = []
    batches = torch.split(windows, batch_size)
    models = [access] if dense is None else [access, dense]
    with torch.no_grad(), evaluation_mode(access.model), evaluation_mode(models[-1].model):
        # of each model [B, T, vocabulary]
        for batch, *logits in zip(batches, *(each.logits(batches) for each in models), strict=True):
            for ids, *scores in zip(batch.to(logits[0].device), *logits, strict=True):
                tokens = _tokens(ids[1:], [x[:-1] for x in scores]).cpu()
                _refuse_infinite(tokens, f"evaluation window {len(found)} of {len(windows)}", logits[0].dtype)
                found.append(tokens)
            if progress is not None:
                progress(len(found), len(windows))
    return torch.stack(found, dim=1)


def _tokens(targets: Tensor, logits: Sequence[Tensor]) -> Tensor:
    """Measure targets [n] under logits [n, vocabulary] of one model or two, converting a few rows at a time."""
    rows = max(1, _LOGITS_IN_FLOAT32 // logits[0].shape[-1])
    found = []
    for start in range(0, len(targets), rows):
        chunk = targets[start : start + rows]
        scores = [x[start : start + rows].to(torch.promote_types(x.dtype, torch.float32)) for x in logits]
        if len(scores) > 1:
            found.append(compare(chunk, *scores))
        else:
            found.append(cross_entropy(scores[0], chunk, reduction="none")[None].double())
    return torch.cat(found, dim=1)


def _refuse_infinite(tokens: Tensor, where: str, dtype: torch.dtype) -> None:
    """Refuse a window [figures, T - 1] of which a mean is not finite, or too large for exp."""
    loss = "negative log-likelihood"
    for name, mean in zip((loss, f"{loss} by the dense model", "divergence"), tokens.mean(1).tolist(), strict=False):
        if not mean < _LARGEST_EXPONENT:
            raise CalibrationError(
                f"{where}: the mean {name} is {mean}, not a finite perplexity; the model's weights are broken, or "
                f"{dtype} overflows"
            )


def _perplexity(tokens: Tensor) -> float:
    return math.exp(float(tokens[0].mean()))


@dataclass(frozen=True)
class PerplexityEvaluator:
    """Measures each text by itself, and `compares` it with the dense model's predictions if asked to."""

    options: TokenPerplexity
    compares: bool = False

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
        """Return the perplexity, and what compares; of several texts, under the name of each."""
        found: dict[str, float | Mapping[str, float]] = {}
        before, total = 0, sum(map(len, model.text.values()))
        dense = model.dense() if self.compares and model.dense is not None else None
        for name, ids in model.text.items():
            tokens = measure_tokens(
                model.access, ids, dense, batch_size=self.options.batch_size,
                progress=lambda done, _, before=before: model.progress(before + done, total),  # type: ignore[misc]
            )  # fmt: skip
            values = {"token_perplexity": _perplexity(tokens), **(fidelity(tokens) if self.compares else {})}
            found |= {name: values} if name else values
            before += len(ids)
        return found


@hookimpl
def compressx_evaluators() -> list[EvaluatorSpec]:
    """Offer the evaluators to recipes."""
    alone, what = "token_perplexity", "perplexity in fixed windows"
    return [
        EvaluatorSpec(
            alone, what, TokenPerplexity, PerplexityEvaluator, figures=lambda options: options.datasets or [alone]
        ),
        EvaluatorSpec(
            "fidelity", f"{what}, and how far predictions are from the dense model's", TokenPerplexity,
            partial(PerplexityEvaluator, compares=True),
            figures=lambda options: options.datasets or [alone, *FIGURES], compares=True,
        ),
    ]  # fmt: skip
