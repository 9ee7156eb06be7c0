"""A real model, pruned to 2:4, in the hands of those who get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressx import load_plugins, run
from compressx.evaluation.saved import source_of
from compressx.masks.inspect import inspect_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pruned(smollm2_short_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "out"
    recipe = {
        "model": {"path": str(smollm2_short_folder), "dtype": "bfloat16"},
        "calibration": {"dataset": "python-docs", "samples": 4, "sequence_length": 128},
        "prune": [{"targets": ["*"], "pruner": "wanda", "pattern": "2:4"}],
        "output": str(folder),
    }
    run(recipe, plugins=load_plugins())
    return folder


def test_the_folder_answers_a_prompt_through_transformers_pipeline(pruned):
    from transformers import pipeline

    ask = pipeline("text-generation", model=str(pruned / "model"), device="cpu")
    told = ask("The capital of France is", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert told.startswith("The capital of France is")
    assert len(told) > len("The capital of France is") + 4


def test_adapters_of_a_recipe_lower_its_perplexity_and_keep_the_zeros(smollm2_short_folder, tmp_path):
    pytest.importorskip("peft")
    text = {"dataset": "python-docs", "sequence_length": 64}
    report = run(
        {
            "model": {"path": str(smollm2_short_folder)},
            "calibration": {**text, "samples": 8},
            "prune": [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.6}],
            "finetune": {
                **text,
                "samples": 32,
                "steps": 16,
                "batch_size": 2,
                "learning_rate": 2e-3,
                "lora": {"rank": 16},
            },
            "evaluate": {"token_perplexity": {**text, "samples": 8}},
            "output": str(tmp_path / "out"),
        },
        plugins=load_plugins(),
    )
    pruned, finetuned = (report.evaluation[name]["token_perplexity"] for name in ("pruned", "finetuned"))
    assert finetuned < 0.8 * pruned
    found = inspect_model(source_of(str(tmp_path / "out")))
    assert sum(x.off_mask or 0 for x in found.linears) == 0
    assert report.sparsity == pytest.approx(0.6, abs=1e-3)
