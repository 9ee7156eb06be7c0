"""What a recipe may say of fine-tuning, and what is refused before weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.compressx.saved import save_tiny

from compressx.pipeline.run import plan
from compressx.recipe.schema import load_recipe
from compressx.recipe.sections import Finetune
from compressx.runtime.errors import CalibrationError, RecipeError

RECIPE = """\
model: {path: model, streaming: STREAMING}
calibration: {dataset: {text: text.txt}, samples: 4, sequence_length: 32}
prune:
  - {targets: ["*"], pruner: magnitude, sparsity: 0.5}
finetune: FINETUNE
output: out
"""


def written(finetune: str, *, streaming: str = "auto", calibrated: bool = True) -> Path:
    path = Path("recipe.yaml")
    text = RECIPE.replace("FINETUNE", finetune).replace("STREAMING", streaming)
    lines = [x for x in text.splitlines(keepends=True) if calibrated or not x.startswith("calibration")]
    path.write_text("".join(lines))
    return path


@pytest.fixture
def _saved(project: Path) -> None:
    save_tiny(project / "model", "llama")


def test_everything_has_a_default_and_numbers_may_have_an_exponent(project: Path) -> None:
    assert load_recipe(written("{}")).recipe.finetune == Finetune()
    assert load_recipe(written("null")).recipe.finetune is None
    given = load_recipe(written("{learning_rate: 1e-4, steps: 7}")).recipe.finetune
    assert given == Finetune(learning_rate=0.0001, steps=7)


@pytest.mark.parametrize(
    ("finetune", "message"),
    [
        ("{teacher: dens}", r"recipe\.yaml:5:12: finetune\.teacher is 'dens'; did you mean 'dense'\? "
                            "expected 'dense' or 'none'"),
        ("{teacher: {pth: x}}", r"unknown key 'pth' in finetune\.teacher; did you mean 'path'\?"),
        ("{teacher: {path: x, id: y}}", r"finetune\.teacher: give exactly one of id, path, package; got id and path"),
        ("{teecher: none}", r"recipe\.yaml:5:12: unknown key 'teecher' in finetune; did you mean 'teacher'\?"),
        ("{minutes: 2, steps: 8}", r"minutes takes the place of steps; remove one of them"),
        ("{samples: 8}", r"recipe\.yaml:5:12: finetune: samples only goes with dataset; calibration has its own"),
        ("{samples: 8, sequence_length: 4}", "samples and sequence_length only goes? with dataset"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_with_its_place(project: Path, finetune: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(written(finetune))


@pytest.mark.usefixtures("_saved")
def test_a_streamed_model_is_refused_while_the_recipe_is_planned() -> None:
    with pytest.raises(
        RecipeError,
        match=r"recipe\.yaml:5:1: fine-tuning needs all weights in memory, and model\.streaming is true at "
        r"recipe\.yaml:1:22, which keeps them on disk; set it to false, or remove finetune",
    ):
        plan(written("{steps: 3}", streaming="true"))
    plan(written("{steps: 3}", streaming="false"))
    plan(written("null", streaming="true"))


@pytest.mark.usefixtures("_saved")
def test_no_text_to_train_on_is_an_error_while_the_recipe_is_planned() -> None:
    with pytest.raises(
        RecipeError, match=r"recipe\.yaml:4:1: no text to train on: the recipe has neither calibration nor"
    ):
        plan(written("{steps: 3}", calibrated=False))
    plan(written("{steps: 3, dataset: {text: text.txt}, samples: 2, sequence_length: 16}", calibrated=False))


@pytest.mark.usefixtures("_saved")
def test_text_and_windows_of_its_own_are_checked_while_the_recipe_is_planned() -> None:
    with pytest.raises(CalibrationError, match=r"recipe\.yaml:5:\d+: .*missing\.txt"):
        plan(written("{dataset: {text: missing.txt}, sequence_length: 16}"))
    with pytest.raises(RecipeError, match=r"5:\d+: sequence_length 129 is longer than the model's 128 positions"):
        plan(written("{dataset: {text: text.txt}, sequence_length: 129}"))
    with pytest.raises(RecipeError, match=r"5:\d+: sequence_length 2048 is longer than the model's 128 positions"):
        plan(written("{dataset: {text: text.txt}}"))
