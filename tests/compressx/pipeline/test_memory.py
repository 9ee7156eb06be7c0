"""`compressx.prune`: a model in memory, against a run on the folder that the same model was loaded from."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.pipeline.runs import MAGNITUDE, recipe, same, weights
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as torch_prune

import compressx
from compressx.data.windows import read_calibration
from compressx.masks.callback import MaskCallback
from compressx.masks.maskset import MaskSet
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_model, load_tokenizer
from compressx.models.shards import save_model
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import load_plugins
from compressx.recipe.sources import DatasetSource, Draw, ModelSource
from compressx.runtime.errors import ArtifactError, CalibrationError, RecipeError, UnsupportedModelError

SEVERAL = (
    {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune"},
    {"targets": ["*"], "pruner": "sparsegpt"},
)
WINDOWS = {"calibration": {"samples": 8, "sequence_length": 32}}
SECTIONS: dict[str, Any] = {
    "allocation": {"method": "attention-aware", "target": 0.5, "sparsities": [0.4, 0.6], "samples": 4},
    "reconstruct_block": {"passes": 1},
    "finetune": {"steps": 2, "batch_size": 2},
}


def loaded(folder: Path) -> tuple[Any, Any]:
    """Return a model and its tokenizer, as a caller has them."""
    checkpoint = find_checkpoint(ModelSource(path=folder))
    return load_model(checkpoint), load_tokenizer(checkpoint)


def in_memory(asked: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in asked.items() if key not in ("model", "output")}


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def untimed(report: Any) -> Any:
    """Return a part of a report without what differs from run to run, and the model's place and files."""
    left_out = {"exports", "seconds", "peak_memory_bytes", "peak_gpu_memory_bytes"}
    left_out |= {"model", "date", "command", "hardware"}
    if dataclasses.is_dataclass(report):
        return {k: untimed(v) for k, v in vars(report).items() if k not in left_out}
    return tuple(map(untimed, report)) if isinstance(report, tuple) else report


@pytest.fixture
def wanda(model: Path) -> dict[str, Any]:
    return in_memory(recipe(model))


@pytest.fixture
def pair(model: Path) -> tuple[Any, Any]:
    return loaded(model)


@pytest.mark.slow
@pytest.mark.parametrize("copy", [False, True])
def test_a_model_in_memory_ends_as_a_run_of_the_same_recipe_to_the_bit(copy, models):
    folder = models("llama-tied")
    asked = recipe(folder, *SEVERAL, evaluated=True, **SECTIONS)
    written = run(asked)
    model, tokenizer = loaded(folder)
    dense = tensors(model)
    pruned = compressx.prune(model, tokenizer, in_memory(asked), copy=copy)
    assert same(tensors(pruned.model), weights("out/model"))
    masks = MaskSet.load("out/masks.safetensors")
    assert [*pruned.masks] == [*masks]
    assert all(torch.equal(pruned.masks[name].keep, masks[name].keep) for name in masks)
    assert pruned.masks["model.layers.0.mlp.up_proj"].sha256 == masks["model.layers.0.mlp.up_proj"].sha256
    assert untimed(pruned.report) == untimed(written)
    assert set(pruned.report.evaluation) == {"dense", "pruned", "finetuned"}
    assert (pruned.model is model) == (not copy)
    assert same(tensors(model), dense) == copy, "a copy leaves the dense weights as they are"


def test_modes_gradients_and_the_folder_are_left_as_they_were_and_a_copy_has_the_same(pair, wanda):
    before = [*Path().iterdir()]
    dense, tokenizer = pair
    dense.train().requires_grad_(False)
    dense.model.layers[1].eval()
    modes = [module.training for module in dense.modules()]
    wanda["calibration"]["memory_limit"] = 1000
    for copy in (True, False):
        pruned = compressx.prune(dense, tokenizer, wanda, copy=copy)
        assert [module.training for module in pruned.model.modules()] == modes
        assert (pruned.model is dense) == (not copy)
    assert not any(p.requires_grad for p in dense.parameters())
    assert pruned.report.sparsity == pruned.masks.sparsity() == 0.5
    assert pruned.masks.verify(dense)
    assert dense.config.compressx["sparsity"] == 0.5
    assert [*Path().iterdir()] == before


def test_text_that_the_caller_has_stands_for_the_recipes(model, pair, wanda):
    def pruned(asked: dict[str, Any], tokenizer: Any = pair[1], **text: Any) -> dict[str, torch.Tensor]:
        return tensors(compressx.prune(pair[0], tokenizer, asked, copy=True, **text).model)

    text = model.with_name("text.txt").read_text()
    source = DatasetSource(text=str(model.with_name("text.txt")))
    windows = read_calibration(Draw(dataset=source, samples=8, sequence_length=32), pair[1])
    expected = pruned(wanda)
    assert same(pruned({"prune": wanda["prune"]}, None, calibration=windows), expected)
    del wanda["calibration"]["dataset"]
    assert same(pruned(wanda, calibration=[text]), expected)
    assert not same(pruned(wanda, calibration=[text[::-1]]), expected)
    asked = recipe(model)
    asked["calibration"]["dataset"] = {"generate": {"samples": 8}}
    run(asked)
    assert same(pruned(in_memory(asked)), weights("out/model")), "what the model writes itself is that of a run"


@pytest.mark.parametrize("error", [CalibrationError("no luck"), KeyboardInterrupt()], ids=["known", "ctrl-c"])
def test_a_failure_half_way_says_that_the_model_is_changed_unless_it_is_a_copy(error, pair, wanda, caplog):
    class Failing:
        @compressx.hookimpl
        def compressx_block_pruned(self, report: compressx.BlockReport) -> None:
            if report.index == 1:
                raise error

    dense, tokenizer = pair
    before, plugins = tensors(dense), load_plugins()
    plugins.manager.register(Failing())
    with pytest.raises(CalibrationError, match="calibration needs 10000 sequences of 32 tokens") as raised:
        compressx.prune(dense, tokenizer, wanda | {"calibration": {**wanda["calibration"], "samples": 10_000}})
    assert "no longer" not in str(raised.value), "before the first block"
    with pytest.raises(type(error)):
        compressx.prune(dense, tokenizer, wanda, plugins=plugins, copy=True)
    assert same(tensors(dense), before)
    assert not caplog.messages
    with caplog.at_level(logging.ERROR, "compressx"), pytest.raises(type(error)) as raised:
        compressx.prune(dense, tokenizer, wanda, plugins=plugins)
    assert not same(tensors(dense), before)
    assert "the model is no longer as it was: 2 of 3 blocks are pruned" in f"{raised.value}{caplog.text}"


@pytest.mark.parametrize(
    ("changed", "calibration", "message"),
    [
        ({"model": "any/model"}, None, "<dict>:model: model: the model is the one that is passed to prune"),
        ({"output": "out"}, None, "<dict>:output: output: a model in memory is pruned without writing files"),
        ({}, ["w1"], "<dict>:calibration.dataset: calibration.dataset: the argument calibration decides it"),
        ({"calibration": {"datasets": ["c4"]}}, ["w1"], "calibration.datasets: the argument calibration decides it"),
        ({"calibration": {"samples": 8}}, torch.ones(2, 8, dtype=torch.int64), "calibration.samples: the argument"),
        ({"calibration": {}}, torch.ones(2, 256, dtype=torch.int64), "sequence_length 256 is longer than the model's"),
        ({"calibration": {}}, torch.full((2, 8), 128), "calibration has the token id 128, and Llama"),
        ({"calibration": {}}, torch.ones(8), r"calibration is torch.float32 \[8\], expected token ids, int64"),
        (WINDOWS, [], r"calibration has no documents; expected texts, or chats as lists of \{role, content"),
        (WINDOWS, [{"text": "w1"}], r"calibration\[0\] is dict, expected text or a list of"),
        (WINDOWS, ["w1", [1, 2]], r"calibration\[1\]: message 0 is int, expected \{role, content"),
        ({"sparcity": 0.5}, None, "unknown key 'sparcity'"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_for_a_model_in_memory_is_refused(changed, calibration, message, pair, wanda):
    with pytest.raises((RecipeError, CalibrationError), match=message):
        compressx.prune(*pair, wanda | changed, calibration=calibration)


def test_a_teacher_in_the_current_folder_serves_a_model_in_memory_which_overwrites_nothing(model, pair, wanda):
    shutil.copytree(model, "teacher")
    tuned = compressx.prune(*pair, wanda | {"finetune": {"steps": 1, "teacher": {"path": "teacher"}}})
    assert tuned.report.finetune.teacher == "teacher"


def test_what_a_notebook_shows_of_a_plan_and_of_a_pruned_model_is_one_line(model, pair, wanda):
    assert repr(compressx.plan(recipe(model))) == "Plan(21 linears: 21 by wanda; 2 left alone)"
    pruned = compressx.prune(*pair, wanda | {"evaluate": {"token_perplexity": text_of(model)}})
    assert re.fullmatch(
        r"PrunedModel\(LlamaForCausalLM, RunReport\(50\.0% of the weights in 21 linears are zero; "
        r"token_perplexity dense [\d.]+; token_perplexity pruned [\d.]+\)\)",
        repr(pruned),
    )


def text_of(model: Path) -> dict[str, Any]:
    """Return the settings of an evaluation on a few tokens."""
    return {"dataset": {"text": str(model.with_name("text.txt"))}, "samples": 2, "sequence_length": 16}


def test_what_is_no_dense_model_on_one_device_or_no_tokenizer_is_told_what_to_pass(model, pair, wanda):
    from peft import LoraConfig, get_peft_model

    dense, tokenizer = pair
    with torch.device("meta"):
        empty = type(dense)(dense.config)
    for given, reader, told in (
        (torch.nn.Linear(2, 2), tokenizer, "got Linear; unwrap it first"),
        (empty, tokenizer, "has weights on meta, expected one device"),
        (str(model), tokenizer, "got str; load one by AutoModelForCausalLM"),
        (dense.model, tokenizer, "LlamaModel has no head to predict tokens; load"),
        (dense, str(model), r"tokenizer is '.*'; expected what AutoTokenizer"),
        (dense, None, "tokenizer is None, but the recipe has text to read"),
    ):
        with pytest.raises(UnsupportedModelError if reader is tokenizer else CalibrationError, match=told):
            compressx.prune(given, reader, wanda)
    adapted = get_peft_model(dense, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for given, told in (
        (adapted, r"got PeftModelForCausalLM; .*merge_and_unload"),
        (dense, "LlamaForCausalLM has PEFT adapters; merge them"),  # PEFT put them into the model that it was given
    ):
        with pytest.raises(UnsupportedModelError, match=told):
            compressx.prune(given, tokenizer, wanda)


def test_a_head_is_found_where_the_base_model_has_another_name_than_the_class_says(pair, wanda, monkeypatch):
    dense, tokenizer = pair
    monkeypatch.setattr(type(dense), "base_model_prefix", "language_model")  # as of Llama 4
    assert dense.base_model is dense
    assert compressx.prune(dense, tokenizer, wanda).report.sparsity == pytest.approx(0.5, abs=1e-3)


# --- weights that something else computes, and blocks that are compiled


def of_blocks(model: Any) -> list[torch.nn.Linear]:
    return [x for name, x in model.named_modules() if isinstance(x, torch.nn.Linear) and "layers" in name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: torch_prune.l1_unstructured(x, "weight", 0.3),
         r'L1Unstructured \(model.layers.0.self_attn.q_proj and 20 more\); call torch.nn.utils.prune.remove\(module'),
        (parametrizations.weight_norm, r"_WeightNorm \(model.layers.0.self_attn.q_proj and 20 more\); call .*remove_p"),
        (parametrizations.spectral_norm, r"_SpectralNorm \(model.layers.0.self_attn.q_proj and 20 more\)"),
    ],
    ids=["torch's pruning", "weight norm", "spectral norm"],
)  # fmt: skip
def test_a_model_whose_weights_are_computed_for_each_forward_pass_is_refused_and_keeps_them(
    change, says, pair, wanda
) -> None:
    dense, tokenizer = pair
    masks = compressx.prune(dense, tokenizer, wanda, copy=True).masks
    for linear in of_blocks(dense):
        change(linear)
    before = tensors(dense)
    for action, use in [
        ("pruned", lambda: compressx.prune(dense, tokenizer, wanda)), ("masked", lambda: masks.apply(dense)),
        ("masked", lambda: masks.to_torch_ao(dense)), ("masked", lambda: masks.by_parameter(dense)),
        ("compared with masks", lambda: masks.verify(dense)), ("saved", lambda: save_model(dense, None, Path("saved"))),
        ("masked", lambda: MaskCallback(masks).on_train_begin(model=dense)),
    ]:  # fmt: skip
        with pytest.raises(ArtifactError, match=f"cannot be {action} while its weights are parametrized by {says}"):
            use()
    assert same(tensors(dense), before)
    assert not Path("saved").exists()


@pytest.mark.parametrize(
    ("evaluated", "told"),
    [(False, r"0.self_attn.q_proj: 2048 weights that its mask drops are not zero"),
     (True, "weights that masks drop are not zero after pruning; look for hooks that")],
)  # fmt: skip
def test_weights_that_a_hook_of_the_callers_writes_again_are_not_reported_as_zero(
    evaluated, told, model, pair, wanda
) -> None:
    linear = of_blocks(pair[0])[0]
    dense = linear.weight.detach().clone()

    def write(module: torch.nn.Linear, _: Any) -> None:
        module.weight.data.copy_(dense)

    linear.register_forward_pre_hook(write)
    measured = {"prune": [MAGNITUDE], "evaluate": {"token_perplexity": text_of(model)}}  # runs the hook first
    with pytest.raises(ArtifactError, match=told):
        compressx.prune(*pair, measured if evaluated else wanda)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_whose_zeros_are_not_written_ends_before_it_reports_them(streaming, model, monkeypatch):
    monkeypatch.setattr("compressx.blocks.prune.write", lambda linear, result: None)
    asked = recipe(model, model={"path": str(model), "streaming": streaming})
    with pytest.raises(ArtifactError, match=r"model.layers.0.\S+: \d+ weights that its mask drops are not zero after"):
        run(asked)
    assert not Path("out").exists()


@pytest.mark.slow  # imports the compiler
@torch.no_grad()
def test_compiled_blocks_are_pruned_as_they_are_uncompiled(model, pair, wanda):
    (dense, tokenizer), (other, _), ids = pair, loaded(model), torch.arange(16)[None]
    compressx.prune(dense, tokenizer, wanda)
    for block in other.model.layers:
        block.compile(backend="eager")
    other.model.layers[1].mlp.compile(backend="eager")
    other(ids)
    compressx.prune(other, tokenizer, wanda)
    assert same(tensors(other), tensors(dense))
    assert all(block._compiled_call_impl is not None for block in other.model.layers), "as before"
    torch.testing.assert_close(other(ids).logits, dense(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("regions", [False, True])
def test_blocks_in_a_wrapper_of_the_compiler_are_refused_by_name_before_anything_is_run(regions, pair, wanda):
    from accelerate.utils import compile_regions

    given, tokenizer = pair
    if regions:
        given = compile_regions(given, backend="eager")
    else:
        given.model.layers[1] = torch.compile(given.model.layers[1], backend="eager")
    name = "model.embed_tokens and 6 more" if regions else "model.layers.1"
    says = rf"wrapped in OptimizedModule \({name}\); pass its `_orig_mod`, or load the model without the wrapper, first"
    with pytest.raises(ArtifactError, match=says):
        compressx.prune(given, tokenizer, wanda)


def test_a_run_of_a_model_whose_own_code_computes_its_weights_is_refused_before_they_are_loaded(model, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    made = LlamaMLP.__init__

    def normed(self: Any, config: Any) -> None:
        made(self, config)
        parametrizations.weight_norm(self.up_proj)

    monkeypatch.setattr(LlamaMLP, "__init__", normed)
    says = r"cannot be pruned while its weights are parametrized by _WeightNorm \(model.layers.0.mlp.up_proj and 2"
    with pytest.raises(ArtifactError, match=says):
        plan(recipe(model))
