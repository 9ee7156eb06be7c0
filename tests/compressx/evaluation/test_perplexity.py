"""Token perplexity against a slow reference, and what a whole evaluation returns and caches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.evaluation.measuring import evaluators as settings
from tests.compressx.evaluation.measuring import measure, plugins, read

import compressx
from compressx.evaluation.evaluators import run_evaluators
from compressx.evaluation.token_perplexity import token_perplexity
from compressx.models.access import InMemory
from compressx.plugins.manager import Plugins
from compressx.prompts.selection import SelectorSettings
from compressx.runtime.errors import CalibrationError
from compressx.testing import tiny_model, tiny_tokens


def reference(model: Any, windows: torch.Tensor) -> float:
    """Compute the perplexity window by window and token by token, in float64."""
    model = model.double()
    losses = []
    for window in windows:
        with torch.no_grad():
            likelihoods = model(window[None]).logits[0].log_softmax(-1)
        losses += [-likelihoods[i, window[i + 1]].item() for i in range(len(window) - 1)]
    return math.exp(sum(losses) / len(losses))


class TestTokenPerplexity:
    @pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
    def test_it_is_that_of_a_slow_reference(self, architecture: str) -> None:
        model, windows = tiny_model(architecture), tiny_tokens(sequences=5, length=24)
        assert token_perplexity(InMemory(model), windows) == pytest.approx(reference(model, windows), rel=1e-5)
        exact = token_perplexity(InMemory(model), windows)  # `reference` has made it a float64 model
        assert exact == pytest.approx(reference(model, windows), rel=1e-12)

    def test_a_bfloat16_model_is_measured_in_float32(self) -> None:
        model, windows = tiny_model("llama", dtype=torch.bfloat16), tiny_tokens(sequences=2)
        with torch.no_grad():
            logits = model(windows).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), windows[:, 1:].flatten())
        assert token_perplexity(InMemory(model), windows) == pytest.approx(loss.exp().item(), rel=1e-5)

    @pytest.mark.parametrize(("batch_size", "logits"), [(3, 1 << 20), (100, 1), (8, 128 * 7)])
    def test_neither_the_batch_size_nor_the_logits_held_in_float32_change_it(self, batch_size, logits, monkeypatch):
        model, windows = tiny_model("llama"), tiny_tokens()
        whole = token_perplexity(InMemory(model), windows)
        monkeypatch.setattr("compressx.evaluation.token_perplexity._LOGITS_IN_FLOAT32", logits)
        assert token_perplexity(InMemory(model), windows, batch_size=batch_size) == pytest.approx(whole, rel=1e-6)

    def test_every_module_gets_its_training_mode_back(self) -> None:
        model = tiny_model("opt")
        model.config.dropout = 0.5
        for layer in model.model.decoder.layers:
            layer.dropout = 0.5
        expected = token_perplexity(InMemory(model), tiny_tokens())
        model.train()
        model.model.decoder.layers[1].eval()
        before = [m.training for m in model.modules()]
        assert token_perplexity(InMemory(model), tiny_tokens()) == expected  # no dropout: in evaluation mode meanwhile
        assert [m.training for m in model.modules()] == before
        with pytest.raises(IndexError):
            token_perplexity(InMemory(model), torch.full((1, 4), 1000))
        assert [m.training for m in model.modules()] == before, "after an error, too"

    def test_the_first_window_that_is_not_finite_or_too_unlikely_for_exp_is_named(self) -> None:
        model, windows = tiny_model("llama"), tiny_tokens(sequences=6).clamp(min=4)
        windows[4, 3] = 3
        model.model.embed_tokens.weight.data[3] = float("nan")
        with pytest.raises(CalibrationError, match="window 4 of 6: the mean negative log-likelihood is nan"):
            token_perplexity(InMemory(model), windows)
        model.lm_head.weight.data.mul_(1e5)
        with pytest.raises(CalibrationError, match="window 0 of 6"):
            token_perplexity(InMemory(model), windows)


@pytest.fixture
def text(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of 120 characters, one of them blanks only, and a cache of its own."""
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
    (project / "a.txt").write_text("the quick brown fox jumps over the lazy dog " * 2 + "and runs away at last.")
    (project / "b.txt").write_text("   \n")
    return project


TOKENS = {"dataset": {"text": "*.txt"}, "sequence_length": 16}
TASKS = {"lm_eval": {"tasks": ["wikitext"]}}


class TestEvaluate:
    def test_the_first_windows_of_a_text_that_are_not_blank_are_measured(self, text: Path, tokenizer: Any) -> None:
        model = tiny_model("llama")
        ids = torch.tensor(list((text / "a.txt").read_bytes()))
        measured = measure(InMemory(model), tokenizer, settings(token_perplexity={**TOKENS, "samples": 3}))
        expected = token_perplexity(InMemory(model), ids[:48].view(3, 16))
        assert measured == {"token_perplexity": pytest.approx(expected, rel=1e-6)}

    def test_of_several_texts_each_is_measured_under_its_name(self, text: Path, tokenizer: Any) -> None:
        (text / "c.txt").write_text("pack my box with five dozen liquor jugs " * 3)
        alone = [{"dataset": {"text": name}, "sequence_length": 16} for name in ("a.txt", "c.txt")]
        figures = [measure(InMemory(tiny_model("llama")), tokenizer, settings(token_perplexity=x)) for x in alone]
        both = {"datasets": {"fox": alone[0]["dataset"], "box": alone[1]["dataset"]}, "sequence_length": 16}
        told: list[tuple[int, int]] = []
        asked = settings(token_perplexity=both)
        ready = read(asked, tokenizer, tiny_model("llama"))
        found = run_evaluators(InMemory(tiny_model("llama")), tokenizer, ready, progress=lambda *x: told.append(x))
        assert found == {"fox": figures[0], "box": figures[1]}
        assert told[-1] == (sum(map(len, ready[0].text.values())),) * 2
        assert [done for done, _ in told] == sorted(done for done, _ in told)


class TestEvaluateCached:
    @pytest.fixture
    def model(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A model that counts how often it runs, tasks of the harness included, which cost no time here."""
        model = tiny_model("llama")
        model.runs = 0

        def count(*_: Any) -> None:
            model.runs += 1

        def tasks(*_: Any) -> dict[str, Any]:
            count()
            return {"docs": {"word_perplexity": 3.0}}

        model.register_forward_pre_hook(count)
        monkeypatch.setattr("compressx.evaluation.lm_eval.run_tasks", tasks)
        return model

    def test_the_same_evaluation_runs_the_model_once(self, text: Path, tokenizer: Any, model: Any) -> None:
        asked = settings(token_perplexity=TOKENS, **TASKS)
        first = measure(InMemory(model), tokenizer, asked, "dense")
        runs = model.runs
        assert runs > 0
        assert (
            measure(InMemory(model), tokenizer, asked, "dense") == first == measure(InMemory(model), tokenizer, asked)
        )
        assert model.runs == 2 * runs  # only `evaluate` ran it again

    def test_whatever_decides_the_result_decides_the_key(self, text, tokenizer, model, monkeypatch):
        from tokenizers import normalizers

        def runs(asked: Any, fingerprint: str = "dense") -> int:
            before = model.runs
            measure(InMemory(model), tokenizer, asked, fingerprint)
            return int(model.runs > before)

        asked = settings(token_perplexity=TOKENS)
        assert (runs(asked), runs(asked)) == (1, 0)
        assert runs(asked, "other weights")
        for eps in (1e-6, 1e-3):
            model.config.rms_norm_eps = eps
            assert runs(asked) == (eps == 1e-3), "the config of the model counts"
        assert runs(settings(token_perplexity={**TOKENS, "sequence_length": 8}))
        with_tasks = settings(**TASKS)
        assert (runs(with_tasks), runs(with_tasks)) == (1, 0)
        (text / "a.txt").write_text((text / "a.txt").read_text().replace("fox", "cat"))
        assert runs(asked)
        tokenizer.add_special_tokens({"pad_token": "<s>"})
        assert (runs(with_tasks), runs(with_tasks)) == (1, 0)
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        assert (runs(with_tasks), runs(with_tasks)) == (1, 0)
        tokenizer.chat_template = "{{ messages }}"
        assert (runs(with_tasks), runs(with_tasks)) == (1, 0)
        (text / "edited.py").write_text("edited")
        monkeypatch.setattr("compressx.__path__", [*compressx.__path__, str(text)])  # its code counts, not its version
        assert (runs(with_tasks), runs(with_tasks)) == (1, 0)
        monkeypatch.setattr("compressx.runtime.code.__version__", "another")
        assert (runs(with_tasks), runs(with_tasks)) == (1, 0)
        assert (runs(asked), runs(asked)) == (1, 0)
        tokenizer.model_max_length = 15
        assert runs(with_tasks)
        monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 99")
        assert runs(asked)

    def test_how_prompts_are_shortened_decides_the_key(self, text, tokenizer, model, monkeypatch) -> None:
        ready = read(settings(token_perplexity=TOKENS), tokenizer, model)

        def runs(*given: Any) -> list[bool]:
            found = []
            for _ in range(2):
                before = model.runs
                selecting = SelectorSettings.from_python(*given, plugins()) if given else None
                run_evaluators(InMemory(model), tokenizer, ready, selecting=selecting, fingerprint="dense")
                found.append(model.runs > before)
            return found

        shortened = [
            ("recent", 8, {}, {}),
            ("recent", 9, {}, {}),
            ("recent", 8, {}, {"first": 3}),
            ("random", 8, {}, {}),
        ]
        assert [runs(*given) for given in ((), *shortened)] == [[True, False]] * 5
        monkeypatch.setattr(Plugins, "code_of", lambda *_: "other code")
        assert runs(*shortened[0]) == [True, False]

    def test_a_damaged_cache_is_measured_anew(self, text: Path, tokenizer: Any, model: Any) -> None:
        asked = settings(token_perplexity=TOKENS)
        first = measure(InMemory(model), tokenizer, asked, "dense")
        (path,) = (text / "cache" / "evaluations").iterdir()
        path.write_text("{")
        assert measure(InMemory(model), tokenizer, asked, "dense") == first
        assert path.read_text() != "{"

    def test_a_task_file_is_always_measured_since_it_may_read_whatever_it_likes(self, text, tokenizer, model) -> None:
        asked = settings(lm_eval={"tasks": ["mine.yaml"], "trust_task_code": True})
        first = measure(InMemory(model), tokenizer, asked, "dense")
        runs = model.runs
        assert measure(InMemory(model), tokenizer, asked, "dense") == first
        assert model.runs == 2 * runs
