"""What a recipe may say of fine-tuning, and what is refused before weights are loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.compressx.saved import save_tiny

from compressx.pipeline.run import plan
from compressx.recipe.schema import load_recipe
from compressx.recipe.sections import Finetune
from compressx.runtime.errors import CompressxError

CALIBRATION = "calibration: {dataset: {text: text.txt}, samples: 4, sequence_length: 32}\n"


def written(finetune: str, *, streaming: str = "auto", calibration: str = CALIBRATION) -> Path:
    path = Path("recipe.yaml")
    path.write_text(f"""\
model: {{path: model, streaming: {streaming}}}
prune: [{{targets: ["*"], pruner: magnitude, sparsity: 0.5}}]
finetune: {finetune}
{calibration}output: out
""")
    return path


def test_everything_has_a_default_and_numbers_may_have_an_exponent(project: Path) -> None:
    assert load_recipe(written("{}")).recipe.finetune == Finetune()
    assert load_recipe(written("null")).recipe.finetune is None
    given = load_recipe(written("{learning_rate: 1e-4, steps: 7}")).recipe.finetune
    assert given == Finetune(learning_rate=0.0001, steps=7)


@pytest.mark.parametrize(
    ("finetune", "more", "message"),
    [("{steps: 3}", {"streaming": "true"}, r"3:1: fine-tuning needs all weights in memory, and model\.streaming is "
      r"true at recipe\.yaml:1:22, which keeps them on disk; set it to false, or remove finetune"),
     ("{steps: 3}", {"calibration": ""}, "3:1: no text to train on: the recipe has neither calibration nor"),
     ("{dataset: {text: missing.txt}, sequence_length: 16}", {}, r"3:\d+: .*missing\.txt"),
     ("{dataset: {text: text.txt}}", {}, r"3:\d+: sequence_length 2048 is longer than the model's 128 positions")],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_while_the_recipe_is_planned(finetune, more, message, project) -> None:
    save_tiny(project / "model", "llama")
    with pytest.raises(CompressxError) as refused:
        plan(written(finetune, **more))
    assert re.match(rf"recipe\.yaml:{message}", str(refused.value))


def test_what_is_nearly_refused_is_planned(project: Path) -> None:
    save_tiny(project / "model", "llama")
    plan(written("{steps: 3}", streaming="false"))
    plan(written("null", streaming="true"))
    plan(written("{dataset: {text: text.txt}, samples: 2, sequence_length: 16}", calibration=""))
