"""Evaluation: token perplexity in fixed windows, tasks of lm-evaluation-harness, and a sample of text.

The perplexities are different metrics: `token_perplexity` is the one that SparseGPT and Wanda report;
`word_perplexity` and `byte_perplexity` are the harness's, per whitespace-separated word and per byte.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from compressx.data.documents import documents, texts
from compressx.data.windows import beginning, evaluation_windows, fingerprint, token_ids
from compressx.evaluation.harness import run_tasks
from compressx.evaluation.needle import grid, needle_figures
from compressx.evaluation.sample import continuation, prompt_ids
from compressx.evaluation.tasks import ROLLING_METRICS, check_tasks, is_file
from compressx.models.access import Access, config_fingerprint
from compressx.models.architecture import text_config
from compressx.models.blockwise import evaluation_mode
from compressx.models.generate import check_ids
from compressx.prompts.frame import text_ids
from compressx.prompts.prepare import Selecting
from compressx.recipe.measuring import Evaluate, RollingTask
from compressx.runtime.cache import cached
from compressx.runtime.code import code_versions
from compressx.runtime.errors import CalibrationError

Progress: TypeAlias = Callable[[int, int], None]
Figures: TypeAlias = dict[str, float | Mapping[str, Any]]
"""Metrics by name: `token_perplexity`, or where several texts are measured a dict for each such as
`{"prose": {"token_perplexity": 12.5}}`, and for each harness task or group a dict such as
`{"arc_easy": {"acc": 0.61, "acc_stderr": 0.01}}`. If exactly one task has them, `word_perplexity`, `byte_perplexity`
and `bits_per_byte` also appear at the top level. `needle` is what `needle_figures` returns, `sample` the `prompt` and
the `text` that the model wrote."""

_LOGITS_IN_FLOAT32 = 2**24
"""Logits converted to float32 at a time: 64 MiB, a few hundred positions of a large vocabulary."""

_LARGEST_EXPONENT = math.log(sys.float_info.max)


def token_perplexity(
    access: Access, windows: Tensor, *, batch_size: int = 4, progress: Progress | None = None
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

    Raises:
        CalibrationError: a window whose likelihood is not finite, or so low that exp overflows.
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


@dataclass(frozen=True, eq=False)
class Texts:
    """The text of an evaluation.

    Attributes:
        windows: for token perplexity, int64 [windows, T] of each text by name, "" for a single one.
        rolling: documents of each rolling task, by name.
        prompt: of the sample, int64 [1, tokens]; None when there is none.
        hay: in which needles are hidden, int64 [tokens]; None when there are none.
    """

    windows: Mapping[str, Tensor]
    rolling: Mapping[str, Sequence[str]]
    prompt: Tensor | None = None
    hay: Tensor | None = None

    def fingerprint(self) -> list[str]:
        """Return a hash of each text."""
        tokens = [*self.windows.values(), *(x for x in (self.prompt, self.hay) if x is not None)]
        return [*map(fingerprint, tokens), *(_sha256(json.dumps([name, *read])) for name, read in self.rolling.items())]


def read_texts(settings: Evaluate, tokenizer: Any, model: Any) -> Texts:
    """Read the text of an evaluation; needs no weights.

    Raises:
        CalibrationError: text that cannot be read, is too short for the windows, or has tokens that the model lacks.
    """
    windows = {}
    if (wanted := settings.token_perplexity) is not None:
        bos = beginning(tokenizer, wanted.bos)
        positions = getattr(text_config(model), "max_position_embeddings", None)
        for name, source in wanted.texts.items():
            ids = token_ids(documents(source, "evaluation"), tokenizer)
            windows[name] = evaluation_windows(
                ids, wanted.samples, wanted.sequence_length, bos=bos, max_positions=positions
            )
            check_ids(model, windows[name], tokenizer, f"the text {name}".strip())
    tasks = settings.lm_eval.tasks if settings.lm_eval is not None else []
    # The harness counts one word in a document without words.
    rolling = {
        t.name: [d for d in texts(t.dataset, "evaluation") if d.strip()] for t in tasks if isinstance(t, RollingTask)
    }
    for name, read in rolling.items():
        check_ids(model, token_ids(read, tokenizer), tokenizer, f"the text of task {name}")
    sample = settings.sample
    hay = None
    if settings.needle is not None:
        hay = text_ids(tokenizer, "\n\n".join(texts(settings.needle.dataset, "evaluation")))
        for asked in grid(tokenizer, hay, settings.needle):
            check_ids(model, asked.prompt.ids, tokenizer, "needle: the prompt")
    return Texts(windows, rolling, None if sample is None else prompt_ids(sample, tokenizer), hay)


def evaluate(
    access: Access, tokenizer: Any, settings: Evaluate, texts: Texts, *, selecting: Selecting | None = None,
    progress: Progress | None = None,
) -> Figures:  # fmt: skip
    """Compute every metric of a recipe's `evaluate` section.

    Args:
        access: a transformers causal language model.
        tokenizer: its tokenizer; neither is changed.
        settings: the recipe's `evaluate` section.
        texts: the result of `read_texts` for these settings.
        selecting: how prompts are shortened, for needles and for tasks that generate text.
        progress: called with the windows of token perplexity done and their total; harness tasks are not counted.

    Returns:
        The metrics by name, see `Figures`.

    Raises:
        RecipeError: an unknown task.
        CalibrationError: a metric that is not finite, or a harness dataset that cannot be fetched.
    """
    figures: Figures = {}
    if settings.lm_eval is not None:
        check_tasks(settings.lm_eval)  # before any work
    if (wanted := settings.token_perplexity) is not None:
        for name, value in _perplexities(access, texts.windows, wanted.batch_size, progress).items():
            figures |= {name: {"token_perplexity": value}} if name else {"token_perplexity": value}
    # At the first prompt, since choosing blocks takes a run of the whole model.
    selection = None if selecting is None else functools.cache(functools.partial(selecting.prepare, access, tokenizer))
    if settings.needle is not None and texts.hay is not None:
        with evaluation_mode(access.model):
            figures["needle"] = needle_figures(
                access, tokenizer, texts.hay, settings.needle, selection and selection(), progress
            )
    if settings.lm_eval is not None:
        with access.whole() as model, evaluation_mode(model):
            tasks = run_tasks(model, tokenizer, settings.lm_eval, texts.rolling, selection)
        figures |= {name: {**_nested(figures, name), **metrics} for name, metrics in tasks.items()}
        rolling = [metrics for metrics in tasks.values() if "word_perplexity" in metrics]
        if len(rolling) == 1:
            figures |= {name: rolling[0][name] for name in ROLLING_METRICS if name in rolling[0]}
    if settings.sample is not None and texts.prompt is not None:
        with access.whole() as model, evaluation_mode(model):
            text = continuation(model, tokenizer, texts.prompt, settings.sample.tokens)
        figures["sample"] = {"prompt": settings.sample.prompt, "text": text}
    return figures


def _nested(figures: Figures, name: str) -> Mapping[str, float | str]:
    """Return the metrics of a text or task of that name; none if there is none."""
    found = figures.get(name, {})
    return found if isinstance(found, Mapping) else {}


def _perplexities(
    access: Access, windows: Mapping[str, Tensor], batch_size: int, progress: Progress | None
) -> dict[str, float]:
    """Return the token perplexity of each text; progress is that of all of them."""
    found: dict[str, float] = {}
    before, total = 0, sum(map(len, windows.values()))

    def passed(done: int, _of_text: int) -> None:
        if progress is not None:
            progress(before + done, total)

    for name, ids in windows.items():
        found[name] = token_perplexity(access, ids, batch_size=batch_size, progress=passed)
        before += len(ids)
    return found


def evaluate_cached(
    access: Access, tokenizer: Any, settings: Evaluate, texts: Texts, model_fingerprint: str, *,
    selecting: Selecting | None = None, progress: Progress | None = None,
) -> Figures:  # fmt: skip
    """Do as `evaluate`, or return the cached metrics of the same model, text, code and library versions.

    Tasks given as a YAML file are never cached, since such a task may read other files.
    """
    if any(isinstance(t, str) and is_file(t) for t in (settings.lm_eval.tasks if settings.lm_eval else ())):
        return evaluate(access, tokenizer, settings, texts, selecting=selecting, progress=progress)
    key = {
        "settings": settings.model_dump(mode="json", by_alias=True),
        "selecting": None if selecting is None else selecting.key(),
        "text": texts.fingerprint(),
        "model": model_fingerprint,
        "config": config_fingerprint(access.model),
        "tokenizer": _sha256(_tokenizing(tokenizer)),
        "device": access.device.type,
        "versions": code_versions("lm_eval"),
    }
    return cached(
        key, lambda: evaluate(access, tokenizer, settings, texts, selecting=selecting, progress=progress),
        "evaluations", dict[str, float | dict[str, float | str | list[dict[str, float]]]],
    )  # fmt: skip


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Sum the negative log-likelihood of targets [n] under logits [n, vocabulary], converting a few rows at a time."""
    rows = max(1, _LOGITS_IN_FLOAT32 // logits.shape[-1])
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for start in range(0, len(targets), rows):
        chunk, expected = logits[start : start + rows].to(dtype), targets[start : start + rows]
        total += functional.cross_entropy(chunk, expected, reduction="none").sum(dtype=torch.float64)
    return float(total)


def _tokenizing(tokenizer: Any) -> str:
    """Describe how a tokenizer splits text and writes chats: vocabulary, normalization, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    adds = [getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token", "model_max_length")]
    return repr((whole, tokenizer.special_tokens_map, adds, getattr(tokenizer, "chat_template", None)))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
