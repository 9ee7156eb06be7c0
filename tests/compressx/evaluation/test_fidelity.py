"""The figures that compare a model with the dense one, against slow references in float64."""

from __future__ import annotations

import math
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.compressx.evaluation.measuring import evaluators as settings
from tests.compressx.evaluation.measuring import read
from torch import Tensor

from compressx.evaluation.evaluators import run_evaluators
from compressx.evaluation.fidelity import compare, fidelity
from compressx.evaluation.token_perplexity import measure_tokens, token_perplexity
from compressx.models.access import InMemory
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import load_model
from compressx.models.streaming import open_streamed
from compressx.runtime.errors import CalibrationError
from compressx.testing import save_tiny_model, tiny_model, tiny_tokens


def changed(model: Any, by: float = 0.3) -> Any:
    """Return a copy with noise on every weight."""
    other, draw = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(by * weight.std() * torch.randn(weight.shape, generator=draw))
    return other


def reference(targets: Tensor, pruned: Tensor, dense: Tensor) -> list[tuple[float, float, float, bool]]:
    """Compare token by token in float64, by the sums of the definitions; what both say is impossible adds nothing."""
    found = []
    for target, y, x in zip(targets.tolist(), pruned.double().numpy(), dense.double().numpy(), strict=True):
        log_p = x - x.max() - math.log(math.fsum(np.exp(x - x.max())))
        log_q = y - y.max() - math.log(math.fsum(np.exp(y - y.max())))
        some = np.exp(log_p) > 0
        divergence = math.fsum(np.exp(log_p[some]) * (log_p[some] - log_q[some]))
        found.append((-log_q[target], -log_p[target], divergence, x.argmax() == y.argmax()))
    return found


def quantile(values: list[float], share: float) -> float:
    """Return what llama.cpp calls a percentile: between two sorted values, linearly."""
    place = share * (len(values) - 1)
    low, rest = int(place), place - int(place)
    ordered = sorted(values)
    return (1 - rest) * ordered[low] + rest * ordered[min(low + 1, len(values) - 1)]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_every_figure_is_that_of_a_slow_reference(architecture: str) -> None:
    dense = tiny_model(architecture)
    pruned, windows = changed(dense), tiny_tokens(sequences=5, length=128)
    with torch.no_grad():
        logits = [model(windows).logits[:, :-1].flatten(0, 1) for model in (pruned, dense)]
    expected = reference(windows[:, 1:].flatten(), *logits)
    tokens = measure_tokens(InMemory(pruned), windows, InMemory(dense), batch_size=3)
    torch.testing.assert_close(
        tokens.flatten(1), torch.tensor(expected, dtype=torch.float64).T, rtol=0, atol=1e-6
    )  # fmt: skip
    losses, of_dense, divergences, same = map(list, zip(*expected, strict=True))
    ratio = math.exp(np.mean(losses)) / math.exp(np.mean(of_dense))
    gains = [  # of each window; column i is the token at position i + 2
        x[:, 33 - 2 : 65 - 2].mean(1) - x[:, 97 - 2 : 129 - 2].mean(1)
        for x in (np.array(y).reshape(5, 127) for y in (losses, of_dense))
    ]
    found = fidelity(tokens)
    assert {name: value for name, value in found.items() if not name.endswith("stderr")} == pytest.approx({
        "perplexity_ratio": ratio, "kl_divergence": np.mean(divergences), "top1_agreement": np.mean(same),
        "kl_divergence_median": quantile(divergences, 0.5), "kl_divergence_99%": quantile(divergences, 0.99),
        "context_gain": gains[0].mean(), "context_gain_change": (gains[0] - gains[1]).mean(),
    }, rel=1e-6)  # fmt: skip
    assert found["kl_divergence"] > 0.01
    assert 0.05 < found["top1_agreement"] < 0.95
    assert math.exp(tokens[0].mean()) == pytest.approx(token_perplexity(InMemory(pruned), windows), rel=1e-6)


def drawn(vocabulary: int, *, apart: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    x = 3 * torch.randn(6, vocabulary)
    return torch.randint(0, vocabulary // 2, (6,)), x + apart * torch.randn(6, vocabulary), x


HARD: dict[str, tuple[int, float, Any]] = {
    "a large vocabulary": (262_144, 0.3, lambda z, _: z),
    "almost the same": (1000, 1e-3, lambda z, _: z),
    "far apart": (1000, 8.0, lambda z, _: z),
    "soft caps": (1000, 0.3, lambda z, _: 30 * (20 * z / 30).tanh()),
    "large offsets": (1000, 0.3, lambda z, offset: z.round() + offset),
}


@pytest.mark.parametrize("case", HARD)
def test_hard_logits_are_compared_to_a_millionth(case: str) -> None:
    vocabulary, apart, change = HARD[case]
    at, y, x = drawn(vocabulary, apart=apart)
    y, x = change(y, 4096), change(x, -8192)
    torch.testing.assert_close(
        compare(at, y, x), torch.tensor(reference(at, y, x), dtype=torch.float64).T, rtol=1e-6, atol=1e-6
    )  # fmt: skip


def test_masked_entries_of_a_padded_vocabulary_count_for_nothing() -> None:
    at, y, x = drawn(1000)
    whole = compare(at, y[:, :900], x[:, :900])
    for model in (x, y):
        model[:, 900:] = -math.inf
    torch.testing.assert_close(compare(at, y, x), whole, rtol=0, atol=1e-6)
    y[:, 950:] = -1e4  # masked by the dense model only
    torch.testing.assert_close(compare(at, y, x), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_no_distance_from_itself(dtype: torch.dtype) -> None:
    access = InMemory(tiny_model("llama", dtype=dtype))
    found = fidelity(measure_tokens(access, tiny_tokens(sequences=3, length=32), access))
    same = {"perplexity_ratio": 1.0, "kl_divergence": 0.0, "top1_agreement": 1.0,
            "kl_divergence_median": 0.0, "kl_divergence_99%": 0.0}  # fmt: skip
    assert found == same | {f"{name}_stderr": 0.0 for name in ("perplexity_ratio", "kl_divergence", "top1_agreement")}


def test_errors_are_those_that_drawing_windows_again_gives_and_one_window_has_none() -> None:
    """A window's tokens are alike here, so that an error over tokens would be far smaller."""
    draw = torch.Generator().manual_seed(0)
    windows = torch.randn(4, 60, 1, generator=draw, dtype=torch.float64)
    tokens = (3 + 0.5 * windows + 0.2 * torch.randn(4, 60, 99, generator=draw, dtype=torch.float64)).abs()
    tokens[3] = (tokens[3] > 3).double()
    found = fidelity(tokens)
    again = [fidelity(tokens[:, torch.randint(60, (60,), generator=draw)]) for _ in range(2000)]
    for name in ("perplexity_ratio", "kl_divergence", "top1_agreement"):
        assert found[f"{name}_stderr"] == pytest.approx(np.std([x[name] for x in again]), rel=0.15), name
    assert found["kl_divergence_stderr"] > 5 * tokens[2].std() / math.sqrt(tokens[2].numel())
    assert not [name for name in fidelity(tokens[:, :1]) if name.endswith("stderr")]


def test_windows_of_fewer_than_128_tokens_have_no_context_gain() -> None:
    losses = torch.arange(2, 129, dtype=torch.float64).expand(1, 3, 127)  # each is the position of its token
    assert fidelity(losses) == {"context_gain": (33 + 64) / 2 - (97 + 128) / 2}
    assert fidelity(losses[..., :-1]) == {}


def test_a_window_is_refused_in_which_one_model_is_not_finite_or_the_other_rules_out_what_it_says() -> None:
    dense, windows = tiny_model("llama"), tiny_tokens(sequences=3).clamp(min=4)
    broken = deepcopy(dense)
    broken.lm_head.weight.data[5] = math.nan
    for pruned, other, told in ((broken, dense, "likelihood is nan"), (dense, broken, "likelihood by the dense model")):
        with pytest.raises(CalibrationError, match=f"window 0 of 3: the mean negative log-{told}"):
            measure_tokens(InMemory(pruned), windows, InMemory(other))


def test_streamed_models_have_the_figures_of_models_in_memory(tmp_path: Path) -> None:
    places = []
    for name, by in (("dense", 0.0), ("pruned", 0.3)):
        folder = save_tiny_model(tmp_path / name, "llama")
        changed(load_model(Checkpoint(str(folder))), by).save_pretrained(folder)
        places.append(Checkpoint(str(folder)))
    windows = tiny_tokens(sequences=5, length=128)
    dense, pruned = (InMemory(load_model(place)) for place in places)
    expected = fidelity(measure_tokens(pruned, windows, dense, batch_size=2))
    dense, pruned = map(open_streamed, places)
    assert fidelity(measure_tokens(pruned, windows, dense, batch_size=2)) == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def texts(project: Path) -> dict[str, Any]:
    for name, words in (("fox", "the quick brown fox jumps over the lazy dog "), ("box", "pack my box with jugs ")):
        Path(f"{name}.txt").write_text(words * 20)
    return {"fox": {"text": "fox.txt"}, "box": {"text": "box.txt"}}


def test_of_several_texts_each_is_compared_under_its_name_and_the_dense_model_is_freed(texts, tokenizer) -> None:
    model = tiny_model("llama")
    opened: list[Any] = []

    def measure(section: dict[str, Any], **dense: Any) -> Any:
        asked = settings(fidelity=section | {"sequence_length": 128, "bos": False})
        return run_evaluators(InMemory(changed(model)), tokenizer, read(asked, tokenizer, model), **dense)

    def dense() -> InMemory:
        access = InMemory(deepcopy(model))
        opened.append(weakref.ref(access.model))
        return access

    found = measure({"datasets": texts}, dense=dense)
    assert found == {name: measure({"dataset": text}, dense=dense) for name, text in texts.items()}
    assert len(opened) == 3, "once for all texts of an evaluator"
    assert [held() for held in opened] == [None] * 3
    assert [*measure({"dataset": texts["fox"]})] == ["token_perplexity", "context_gain"], "as of the dense model"
