"""`compressx init --smaller` and `--faster`: recipes that reach a goal, and what `compressx plan` says of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from tests.compressx.cli.commands import printed, refused
from tests.compressx.gguf_files import tiny_of, write_gguf, write_like
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from compressx.api.exporter import PlannedModel
from compressx.models.gguf_export import GgufExporter, GgufOptions
from compressx.recipe.document import dump_yaml
from compressx.testing.models import tiny_tokenizer

WIDTHS = {
    "llama": "intermediate_size", "qwen2": "intermediate_size", "gemma3": "intermediate_size", "gpt2": "n_inner",
    "falcon": "ffn_hidden_size", "mixtral": "num_local_experts", "bloom": "n_layer",
}  # fmt: skip
"""What a config calls what is removed, neurons where the model is no mixture and its config can say so."""


def parameters(folder: Path, **changed: Any) -> int:
    config = AutoConfig.from_pretrained(folder, **changed)
    with torch.device("meta"):
        return sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())


def planned(*options: str) -> dict[str, Any]:
    """Let `init` write a recipe for a goal, and plan it."""
    Path("r.yaml").unlink(missing_ok=True)
    printed("init", *options, "--output", "r.yaml")
    found: dict[str, Any] = json.loads(printed("plan", "r.yaml", "--json"))
    return found


@pytest.mark.parametrize("architecture", WIDTHS)
def test_the_recipe_for_a_smaller_model_removes_the_least_that_is_enough(models, architecture):
    folder = models(architecture)
    found = planned(str(folder), "--smaller", "15%", "--for", "transformers")
    dense, kept = found["model"]["parameters"]
    assert dense == parameters(folder)
    (pattern,) = {x["pattern"] for x in found["linears"]}
    count, whole, unit = re.fullmatch(r"(\d+) of (\d+) (.*)", pattern).groups()
    step = 32 if unit == "neurons" else 1
    assert kept == parameters(folder, **{WIDTHS[architecture]: int(count)})
    assert kept <= 0.85 * dense < parameters(folder, **{WIDTHS[architecture]: min(int(count) + step, int(whole))})
    assert found["model"]["bytes"]["safetensors"] == [4 * dense, 4 * kept]
    assert "# --smaller 15% --for transformers: of " in Path("r.yaml").read_text()


def trained_tokenizer() -> Any:
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    made.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog " * 9],
        BpeTrainer(vocab_size=270, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=ByteLevel.alphabet()),
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def like(architecture: str) -> tuple[Any, Path]:
    model = tiny_of(architecture, vocab_size=288)
    more = {"rope.dimension_count": 16} if architecture == "llama" else {}
    return model, write_like(Path(f"{architecture}.gguf"), model, architecture, more, trained_tokenizer())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gpt2"])
def test_the_recipe_for_a_smaller_file_asks_for_its_bytes_where_blocks_may_differ_and_else_for_one_width(architecture):
    model, path = like(architecture)
    found = planned(str(path), "--smaller", "0.15")
    dense, kept = found["model"]["bytes"]["Q8_0"]
    of_tensors = 0
    for name, x in model.named_parameters():
        rows = x.numel() if x.dim() == 1 or "wpe" in name else 0
        of_tensors += 4 * rows + (x.numel() - rows) // 32 * 34
    beside = dense - of_tensors
    arrays = sum(t.n_bytes for t in GGUFReader(path).tensors)
    assert beside == path.stat().st_size - arrays + 4096
    step = 32 * (2 if architecture == "gpt2" else 3) * 64 * 34 // 32 + 128
    text = Path("r.yaml").read_text()
    if architecture in {"llama", "qwen2"}:
        assert f"target: {{bytes: {int(0.85 * dense)}}}" in text
    else:
        assert "shrink: true" in text
        step *= 3  # of all blocks
    assert 0.85 * dense - step <= kept <= 0.85 * dense


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3moe", "bloom"])
def test_a_plan_counts_the_bytes_that_the_exporter_does(architecture, models):
    model = tiny_of(architecture)
    model.save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    path = write_like(Path("like.gguf"), model, architecture)
    rule = {"targets": ["*"], "pruner": "depth", "pattern": "blocks", "sparsity": 0.34}
    text = {"dataset": {"text": str(models("llama").with_name("text.txt"))}, "samples": 8, "sequence_length": 16}
    export = [{"format": "gguf", "options": {"like": str(path)}}]
    recipe = {
        "model": "./model",
        "calibration": text,
        "prune": [rule],
        "shrink": True,
        "export": export,
        "output": "out",
    }
    Path("r.yaml").write_text(dump_yaml(recipe))
    found = json.loads(printed("plan", "r.yaml", "--json"))["model"]["bytes"]
    for kind in ("Q8_0", "Q4_0", "F16"):
        planned_model = PlannedModel(model, tokenizer=AutoTokenizer.from_pretrained("model"))
        sized = GgufExporter(GgufOptions(type=kind, like=path)).tensor_bytes(planned_model)
        block = sum(size for name, size in sized.items() if re.search(r"\.(layers|h)\.1\.", name))
        assert found[kind] == [sum(sized.values()), sum(sized.values()) - block]


def test_the_recipe_for_a_faster_model_removes_the_fewest_blocks(models):
    folder = models("llama")
    found = planned(str(folder), "--faster", "1.2x", "--for", "transformers")
    read, left = found["model"]["decode_bytes"]["safetensors"]
    table = 4 * 128 * 64
    assert read == 4 * parameters(folder) - table + 4 * 64, "one row of an embedding that is no output matrix"
    assert found["blocks"]["count"] == 1
    assert left == 4 * parameters(folder, num_hidden_layers=2) - table + 4 * 64
    assert read / left >= 1.2
    tied = planned(str(models("llama-tied")), "--faster", "1.2x", "--for", "transformers")["model"]
    assert tied["decode_bytes"] == tied["bytes"]
    mixture = planned(str(models("mixtral")), "--smaller", "15%", "--for", "transformers")["model"]["decode_bytes"]
    router = 3 * 64 * 4
    assert mixture["safetensors"][0] - mixture["safetensors"][1] == router, "a token reads two experts as before"


def test_a_plan_says_what_is_kept_and_nothing_where_no_units_are_removed(models):
    planned(str(models("llama")), "--faster", "1.2x", "--for", "transformers")
    shown = printed("plan", "r.yaml")
    assert re.search(r"of 0\.1 M parameters 0\.1 M are kept, \d\d\.\d\d%", shown)
    assert re.search(r"Q8_0 +0\.\d +0\.\d +0\.\d +0\.\d", shown)
    zeros = "prune=[{targets: ['*'], pruner: magnitude, sparsity: 0.5}]"
    given = ["--set", zeros, "--set", "shrink=false", "--set", "finetune=null"]
    assert "are kept" not in printed("plan", "r.yaml", *given)
    assert "model" not in json.loads(printed("plan", "r.yaml", "--json", *given))
    heads = "prune=[{targets: ['*'], pruner: magnitude, pattern: kv-groups, sparsity: 0.5}]"
    olmo = ["--set", f"model={models('olmo2')}", "--set", heads, *given[2:]]
    assert "model" not in json.loads(printed("plan", "r.yaml", "--json", *olmo)), "no smaller model has them"


TEXT = "{text: text.txt}"
QUICK = [
    f"calibration={{dataset: {TEXT}, samples: 4, sequence_length: 16}}",
    f"finetune={{steps: 1, dataset: {TEXT}, samples: 4, sequence_length: 16, held_out: 0}}",
    f"evaluate={{token_perplexity: {{dataset: {TEXT}, sequence_length: 16, samples: 2}}}}", "output=out",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("goal", [["--smaller", "15%"], ["--faster", "1.3x"]], ids=" ".join)
def test_the_file_of_a_run_has_the_promised_size(goal):
    write_gguf(Path("dense.gguf"), scale=0.15)
    Path("text.txt").write_text("a b c d e f g ab cd . " * 60)
    found = planned("dense.gguf", *goal)["model"]
    sets = [x for value in QUICK for x in ("--set", value)]
    command = [sys.executable, "-m", "compressx", "run", "r.yaml", *sets]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(Path("out/report.json").read_text())["exports"]
    dense, kept = found["bytes"]["Q8_0"]
    step = 32 * 3 * 64 * 34 // 32 if goal[0] == "--smaller" else 0
    assert kept - step - 4096 - 32 * 40 <= file["bytes"] <= kept
    assert goal[0] == "--faster" or file["bytes"] <= 0.85 * dense
    assert file["bytes"] == Path("out/exports/gguf/model.gguf").stat().st_size


@pytest.mark.parametrize(
    ("options", "told"),
    [(["--smaller", "25"], "--smaller 25: expected a share between 0 and 1, such as 25% or 0.25"),
     (["--smaller", "0%"], "--smaller 0%: expected a share"), (["--smaller", "100%"], "100%: expected a share"),
     (["--smaller", "25 %"], "25 %: expected a share"), (["--smaller", "nan"], "nan: expected a share"),
     (["--faster", "0.9x"], "--faster 0.9x: expected a factor above 1, such as 1.2x"),
     (["--faster", "1.2"], "--faster 1.2: expected a factor above 1, such as 1.2x"),
     (["--faster", "0x"], "0x: expected a factor"), (["--faster", "1x"], "1x: expected a factor"),
     (["--smaller", "90%", "--for", "transformers"], r"at most \d+\.\d%, with half of the neurons removed: embeddings"),
     (["--faster", "9x", "--for", "transformers"], r"at most \d\.\d\dx, with half of the blocks removed: embeddings"),
     (["--smaller", "25%", "--for", "lama.cpp"], "'lama.cpp' is not one of 'llama.cpp', 'transformers'"),
     (["--smaller", "25%", "--faster", "1.2x"], "--smaller, --faster and --pruner exclude one another"),
     (["--smaller", "25%", "--pruner", "wanda"], "--smaller, --faster and --pruner exclude one another"),
     (["--for", "llama.cpp"], "--for says what --smaller or --faster is for")],
)  # fmt: skip
def test_a_goal_that_cannot_be_had_is_refused_in_one_line(models, options, told):
    message = refused("init", str(models("llama")), *options)
    assert re.search(told, message)
    assert message.splitlines()[-1].lower().startswith("error: ")
    assert message.startswith(("error: ", "Usage: "))


def test_blocks_of_several_kinds_are_not_removed_for_llama_cpp():
    _, path = like("lfm2")
    assert "llama.cpp tells by a block's number which attention it has" in refused(
        "init", str(path), "--faster", "1.2x"
    )
    assert planned(str(path), "--faster", "1.2x", "--for", "transformers")["blocks"]["count"] == 1


def test_transformers_builds_all_blocks_of_a_llama_alike_whatever_its_config_says_of_each(models):
    """When this fails, models with widths of their own can be written for transformers, too."""
    config = AutoConfig.from_pretrained(models("llama"), allow_global_per_layer_attribute_access=True,
                                        per_layer_config={1: {"intermediate_size": 64}})  # fmt: skip
    assert config.per_layer_config[1].intermediate_size == 64
    found = AutoModelForCausalLM.from_config(config).model.layers
    assert [x.mlp.up_proj.out_features for x in found] == [96, 96, 96]
