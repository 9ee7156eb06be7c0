"""Runs that drop neurons, heads, experts and blocks, with and without `shrink: true`: what they write and refuse."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from tests.compressx.architectures import KINDS
from tests.compressx.depths import THIRD
from tests.compressx.gguf_files import tiny_of, write_like
from tests.compressx.pipeline.runs import recipe, stopped_at, weights
from tests.compressx.pipeline.test_processes import alone_and_together
from tests.compressx.saved import save_tiny
from transformers import AutoModelForCausalLM

from compressx import prune
from compressx.api.exporter import PlannedModel
from compressx.evaluation.saved import apply_masks, evaluate_saved, evaluate_section, source_of
from compressx.masks.inspect import inspect_model
from compressx.masks.maskset import MaskSet
from compressx.models.architecture import find_blocks
from compressx.models.blockwise import skipped
from compressx.models.checkpoint import Checkpoint
from compressx.models.gguf_export import GgufExporter, GgufOptions
from compressx.models.gguf_header import GgufHeader
from compressx.models.loading import load_tokenizer
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import load_plugins
from compressx.report.compare import read_report
from compressx.runtime.errors import ArtifactError, RecipeError, UnsupportedModelError
from compressx.shrink import stage as shrinking
from compressx.testing import tiny_model, tiny_tokens

NEURONS = {"targets": ["*"], "pruner": "wanda", "pattern": "neurons", "sparsity": 0.25}
HEADS = {"targets": ["*"], "pruner": "wanda", "pattern": "kv-groups", "sparsity": 0.5}
EXPERTS = {"targets": ["*"], "pruner": "reap", "pattern": "experts", "sparsity": 0.5}
UP = {"targets": ["*.up_proj"], "pruner": "wanda", "sparsity": 0.5}
SHRINK: dict[str, Any] = {"shrink": True}


def logits(folder: str | Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(tiny_tokens(), use_cache=False).logits
    return found


def close(folder: str, other: str) -> None:
    torch.testing.assert_close(logits(folder), logits(other), rtol=1e-4, atol=2e-5)


def gone(folder: Path | str = "out") -> list[str]:
    """Return the blocks that an output's plan names as dropped."""
    dropped: list[str] = json.loads(Path(folder, "plan.json").read_text())["blocks"]["dropped"]
    return dropped


@pytest.fixture
def halved(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with two runs of the same rules: `masked`, with zeros, and `out`, shrunk; tests only read them."""
    monkeypatch.chdir(made)
    return made


@pytest.fixture(scope="module")
def made(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressx.report.figures.draw", lambda *_: ())
        run(recipe(models("llama"), NEURONS, HEADS, output=str(folder / "masked")))
        run(recipe(models("llama"), NEURONS, HEADS, evaluated=True, output=str(folder / "out"), **SHRINK))
    return folder


@pytest.mark.usefixtures("halved")
def test_the_smaller_model_computes_what_the_one_with_zeros_does_and_its_files_say_what_is_left(model, tmp_path):
    """It measures what the run did, and masks of the original do not fit it."""
    report = read_report(Path("out"))
    close("out/model", "masked/model")
    small = weights("out/model")
    assert small["model.layers.0.mlp.down_proj.weight"].shape == (64, 64)
    assert small["model.layers.0.self_attn.k_proj.weight"].shape == (16, 64)
    assert Path("out/masks.safetensors").read_bytes() == Path("masked/masks.safetensors").read_bytes()

    units = json.loads(Path("out/units.json").read_text())
    assert units["blocks"] == {"count": 3, "dropped": []}
    down = MaskSet.load("out/masks.safetensors")["model.layers.1.mlp.down_proj"].keep
    left = down[0].nonzero().flatten().tolist()
    assert units["units"]["model.layers.1.mlp"] == {"kind": "neurons", "count": 96, "kept": left}
    dense, cut = weights(model), "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(small[cut], dense[cut][:, left])

    counts = [sum(x.numel() for x in weights(folder).values()) for folder in (str(model), "out/model")]
    assert report.shrink["parameters"] == counts
    heads = {"num_attention_heads": [4, 2], "num_key_value_heads": [2, 1]}
    assert report.shrink["config"] == {"intermediate_size": [96, 64], **heads}
    assert report.shrink["difference"] < 1e-5
    assert json.loads(Path("out/report.json").read_text())["shrink"] == report.shrink
    assert f"dense {counts[0] / 1e6:.4g} M, num_attention_heads 4 -> 2" in Path("out/report.md").read_text()
    card = ModelCard.load("out/model/README.md")
    assert f"{counts[1]:,} parameters instead of {counts[0]:,} (num_attention_heads 2 instead of 4" in card.text
    assert card.data.tags == ["compressx", "pruned", "smaller"]
    assert "masks.safetensors" not in card.text

    settings, _ = evaluate_section(Path("out/recipe.yaml"), [], load_plugins())
    pruned = report.evaluation["pruned"]["token_perplexity"]
    found = evaluate_saved(source_of("out"), settings, load_plugins())["pruned"]["token_perplexity"]
    assert found == pytest.approx(pruned, rel=1e-6)
    assert pruned != report.evaluation["dense"]["token_perplexity"]

    masks, source = Path("out/masks.safetensors"), source_of("out")
    told = r"shrink has made the model smaller \(intermediate_size 64 of 96, .*\), and masks of the original do not fit"
    for use in (lambda: apply_masks(masks, source, tmp_path / "applied"), lambda: inspect_model(source, masks)):
        with pytest.raises(ArtifactError, match=told):
            use()
    inspected = inspect_model(source)
    assert (inspected.masks, inspected.sparsity) == (None, 0)


def test_what_a_killed_process_left_of_a_streamed_smaller_models_blocks_is_not_in_the_output(model, monkeypatch):
    @contextmanager
    def kept(prefix: str, dir: Path | None = None) -> Iterator[str]:  # noqa: A002 - as tempfile's
        yield mkdtemp(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", kept)
    run(recipe(model, NEURONS, **SHRINK) | {"model": {"path": str(model), "streaming": True}})
    assert not [path for path in Path("out").rglob("*layers.0*") if "model" not in path.parts]


def test_a_run_that_goes_on_without_shrink_has_no_description_of_a_smaller_model(model):
    stopped_at(recipe(model, NEURONS, evaluated=True, **SHRINK), "evaluate pruned", 0)
    run(recipe(model, NEURONS, evaluated=True), resume=True)
    assert not Path("out/units.json").exists()
    assert json.loads(Path("out/model/config.json").read_text())["intermediate_size"] == 96


def test_a_tied_model_in_bfloat16_stays_both(tmp_path):
    saved = save_tiny(tmp_path / "tied" / "model", "llama-tied", torch.bfloat16)
    report = run(recipe(saved, NEURONS, **SHRINK))
    run(recipe(saved, NEURONS, output="masked"))
    small = AutoModelForCausalLM.from_pretrained("out/model")
    assert small.dtype == torch.bfloat16
    assert small.lm_head.weight is small.model.embed_tokens.weight
    expected = logits("masked/model").float()
    assert float((logits("out/model").float() - expected).norm() / expected.norm()) < 0.02
    streamed = run(recipe(saved, NEURONS, output="streamed", model={"path": str(saved), "streaming": True}, **SHRINK))
    assert streamed.shrink["parameters"] == report.shrink["parameters"]
    assert report.shrink["parameters"][1] == sum(p.numel() for p in small.parameters())


def test_a_dropped_block_and_what_else_goes(model):
    run(recipe(model, THIRD, NEURONS, HEADS, output="masked"))
    report = run(recipe(model, THIRD, NEURONS, HEADS, **SHRINK))
    close("out/model", "masked/model")
    units = json.loads(Path("out/units.json").read_text())
    (dropped,) = units["blocks"]["dropped"]
    assert units["blocks"]["count"] == 3
    assert report.shrink["config"]["num_hidden_layers"] == [3, 2]
    assert len(units["units"]) == 4
    assert not any(name.startswith(f"{dropped}.") for name in units["units"])
    run(recipe(model, THIRD, output="third", **SHRINK))
    with pytest.raises(ArtifactError, match=r"there is a mask for 'model\.layers\.2\..*num_hidden_layers 2 of 3"):
        apply_masks(Path("third/masks.safetensors"), source_of("third"), Path("applied"))


def test_a_smaller_model_that_computes_something_else_is_not_written(model, monkeypatch):
    real = shrinking.smaller

    def wrong(*args: Any) -> Any:
        made = real(*args)
        for cuts in made.cuts.whole.values():  # other rows than those that are left
            cuts.update({dim: torch.arange(len(index)) for dim, index in cuts.items()})
        return made

    monkeypatch.setattr(shrinking, "smaller", wrong)
    with pytest.raises(UnsupportedModelError, match=r"shrink: the smaller LlamaForCausalLM does not compute what"):
        run(recipe(model, NEURONS, **SHRINK))
    assert not Path("out").exists()
    assert not [*Path().glob(".out.partial-*/model")]


OPEN: list[dict[str, Any]] = [{k: v for k, v in x.items() if k != "sparsity"} for x in (NEURONS, HEADS)]
THIRDS = {"allocation": {"method": "attention-aware", "target": 0.35, "samples": 8}}


def test_widths_of_their_own_are_masks_of_the_model_and_a_config_cannot_say_them(models, unloaded):
    source = models("llama-mha")
    with pytest.raises(RecipeError, match=r"shrink: a config of transformers has one width .* and export a format"):
        run(recipe(source, *OPEN, **THIRDS, **SHRINK))


def test_a_block_has_the_width_that_its_report_says(models):
    report = run(recipe(models("llama-mha"), *OPEN, **THIRDS))
    found, planned = weights("out/model"), json.loads(Path("out/plan.json").read_text())["linears"]
    told = {x["name"]: x["pattern"] for x in planned}
    left = {}
    for name, pattern in told.items():
        if name.endswith(("down_proj", "o_proj")):
            alive = int(found[f"{name}.weight"].ne(0).any(dim=0).sum())
            count, of = (96, "neurons") if "mlp" in name else (4, "kv-groups")
            left[name] = alive * count // found[f"{name}.weight"].shape[1]
            assert pattern == f"{left[name]} of {count} {of}"
    assert report.allocation is not None
    assert report.allocation.zeros == sum(int(found[f"{n}.weight"].eq(0).sum()) for n in told)
    page = Path("out/report.md").read_text()
    assert all(f"| {told[name]} |" in page for name in left)
    assert "`compressx export` gives each block its own" in Path("out/model/README.md").read_text()


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "mixtral"])
def test_a_budget_of_parameters_is_kept_and_not_undercut_by_more_than_a_step(models, architecture):
    neurons = {k: v for k, v in NEURONS.items() if k != "sparsity"} | {"multiple": 8}
    budget = {"method": "divergence", "target": {"parameters": 0.85}, "samples": 4, "sparsities": [0.3, 0.6]}
    report = run(recipe(models(architecture), neurons, allocation=budget)).allocation
    assert report is not None
    assert report.budget == {"parameters": 0.85}
    assert report.parameters is not None
    dense, left = report.parameters
    assert dense == sum(x.numel() for x in AutoModelForCausalLM.from_pretrained("out/model").parameters())
    dead = 0  # counted in what was written: a feature that nothing reads goes, and with it its rows and biases
    found = weights("out/model")
    for name, x in found.items():
        if name.endswith("bias") and f"{name[:-4]}weight" in found and (gone := found[f"{name[:-4]}weight"]).dim() == 2:
            side = 0 if architecture == "gpt2" else 1
            dead += int((gone == 0).all(dim=side).sum()) if len(x) > 64 else 0
    zeros = sum(unit.sparsity * unit.weights for unit in report.units)
    assert dense - left == round(zeros) + dead
    step = 8 * (3 if architecture != "gpt2" else 2) * 64 * (4 if architecture == "mixtral" else 1) + 8
    assert 0.85 * dense - step <= left <= 0.85 * dense
    assert f"Of {dense} parameters {left} are left" in Path("out/report.md").read_text()


def test_a_budget_of_bytes_is_kept_by_the_file_that_is_written(models):
    source = models("llama")
    model = AutoModelForCausalLM.from_pretrained(source)
    options = {"type": "Q8_0", "like": str(write_like(Path("like.gguf"), model, "llama"))}
    sizes = GgufExporter(GgufOptions.model_validate(options)).tensor_bytes(PlannedModel(model))
    most = int(0.85 * sum(sizes.values()))
    asked = {"method": "attention-aware", "target": {"bytes": most}, "samples": 4, "sparsities": [0.3, 0.6]}
    report = run(recipe(source, OPEN[0], allocation=asked, export=[{"format": "gguf", "options": options}]))
    (file,) = report.exports
    step = 32 * 3 * 64 * 34 / 32
    assert most - step - 4096 <= file["bytes"] <= most
    assert report.allocation is not None
    assert report.allocation.budget == {"bytes": most}
    assert f"; asked for: bytes {most} at most" in Path("out/report.md").read_text()


@pytest.mark.parametrize(("asked", "each", "bias"), [("parameters", 1, 1), ("bytes", 2, 4)])
def test_a_budget_counts_the_biases_that_go_with_rows(models, asked, each, bias):
    """One group of Qwen2's keys and values less is enough for its weights and the biases of its rows, and is taken."""
    source = models("qwen2")
    model = AutoModelForCausalLM.from_pretrained(source)
    group, biases = 4 * 32 * 64 - 2 * 16 * 64, 32 + 2 * 16  # of two queries, a key and a value, of 16 each
    whole = sum(x.numel() for x in model.parameters())
    export = {}
    if asked == "bytes":
        options = {"type": "F16", "like": str(write_like(Path("like.gguf"), model, "qwen2"))}
        export = {"export": [{"format": "gguf", "options": options}]}
        planned = PlannedModel(model, tokenizer=load_tokenizer(Checkpoint(str(source))))
        whole = sum(GgufExporter(GgufOptions.model_validate(options)).tensor_bytes(planned).values())
    left = whole - each * group - bias * biases + 1
    target = {"bytes": left} if asked == "bytes" else {"parameters": left / whole}
    rule = {"targets": ["*"], "pruner": "wanda", "pattern": "kv-groups"}
    found = plan(recipe(source, rule, allocation={"method": "divergence", "target": target}, **export))
    assert found.allocation.target * sum(x.weights for x in found.linears) == pytest.approx(group)


@pytest.mark.parametrize(
    ("rules", "target", "match"),
    [(OPEN, {"parameters": 0.1}, r"parameters: 0\.1 cannot be reached: the rules leave from 0\.\d+ to 1 of"),
     ([*OPEN, {"targets": ["lm_head"], "pruner": "wanda"}], {"parameters": 0.9}, "kv-groups, since zeros any"),
     (OPEN, {"parameters": 0.9, "bytes": 10000}, "give exactly one of parameters, bytes"),
     (OPEN, {"bytes": 10000}, "bytes are those of a file in which each .*; add export: .* such as gguf"),
     (OPEN, {"parameters": 1.2}, "expected less than 1: fraction of all parameters to keep")],
    ids=["out of reach", "weights too", "two", "no such file", "more than all"],
)  # fmt: skip
def test_a_budget_that_rules_cannot_keep_is_refused_before_weights_are_read(models, unloaded, rules, target, match):
    with pytest.raises(RecipeError, match=match):
        run(recipe(models("llama"), *rules, allocation={"method": "divergence", "target": target}))


SOME = {**NEURONS, "targets": ["model.layers.0.*"]}


@pytest.mark.parametrize(
    ("name", "rules", "match"),
    [
        ("gpt2", [HEADS], "the config of GPT2LMHeadModel cannot describe what is left: with num_attention"),
        ("olmo2", [HEADS], r"model\.layers\.0\.self_attn\.q_norm is a norm over the 64 features of"),
        ("bloom", [NEURONS], "BloomConfig has no number for its 256 neurons, so it cannot describe a"),
        ("llama", [SOME], r".*layers\.0\.mlp would have 64 of 96 and"),
        ("llama", [SOME, {**NEURONS, "sparsity": 0.5}], r".*64 of 96 .* 32;"),
        ("llama", [SOME, HEADS], r".*mlp 96; prune all .* shrink$"),
        ("llama", [], "no rule drops anything whole, .* pattern: neurons, kv-groups, experts or blocks, or remove"),
    ],
    ids=["no head_dim", "norm over heads", "no number", "some blocks", "two sparsities", "heads too", "none"],
)  # fmt: skip
def test_what_a_config_cannot_describe_is_refused_before_weights_are_read(models, name, rules, match, unloaded):
    with pytest.raises(UnsupportedModelError if rules else RecipeError, match=f"shrink: {match}"):
        run(recipe(models(name), *rules, **SHRINK))


def test_a_model_in_memory_is_not_shrunk():
    asked = {"calibration": {}, "prune": [NEURONS], **SHRINK}
    with pytest.raises(RecipeError, match="shrink: the smaller model is written to an output folder; leave it"):
        prune(tiny_model("llama"), None, asked, calibration=tiny_tokens())


# --- experts and blocks


@pytest.mark.slow
def test_fine_tuning_trains_the_experts_that_are_left(models):
    run(recipe(models("mixtral"), EXPERTS, output="pruned", **SHRINK))
    report = run(recipe(models("mixtral"), EXPERTS, finetune={"steps": 3}, **SHRINK))
    assert report.finetune is not None
    pruned, tuned = weights("pruned/model"), weights("out/model")
    for name in (n for n in tuned if ".experts." in n):
        assert tuned[name].shape[0] == 2
        assert all(not torch.equal(*both) for both in zip(tuned[name], pruned[name], strict=True))


@pytest.mark.slow
def test_two_processes_drop_the_blocks_that_one_does(model, tmp_path):
    alone_and_together(model, tmp_path, [THIRD])
    assert gone(tmp_path / "1/out") == gone(tmp_path / "2/out")


def test_fine_tuning_trains_the_blocks_that_stay_and_leaves_the_others_out(tmp_path):
    saved = save_tiny(tmp_path / "opt" / "model", "opt")
    rule = {**THIRD, "options": {"solve": False}}  # what is solved for has nothing left to learn in four steps
    run(recipe(saved, rule, output="pruned"))
    run(recipe(saved, rule, finetune={"steps": 4, "norms": True}))
    (block,) = gone()
    pruned, tuned = weights("pruned/model"), weights("out/model")
    inside = {n: x for n, x in tuned.items() if n.startswith(f"{block}.") and "norm" not in n}
    assert len(inside) == 12  # weights and biases of six linears
    assert not any(x.any() for x in inside.values())
    others = [n for n in tuned if ".layers." in n and not n.startswith(f"{block}.")]
    assert all(not torch.equal(tuned[n], pruned[n]) for n in others if n.endswith(("fc1.weight", "fc2.weight")))


@pytest.mark.parametrize("architecture", KINDS)
def test_blocks_that_are_skipped_in_training_give_the_gradients_of_blocks_of_zeros(architecture):
    model = tiny_model(architecture)
    (fqn, block) = list(find_blocks(model).items())[1]
    with torch.no_grad():
        for name, x in block.named_parameters():
            if "norm" not in name and "ln_" not in name:
                x.zero_()
    expected, found = gradients(model), {}
    with skipped({fqn: block}):
        found = gradients(model)
    assert not any(name.startswith(f"{fqn}.") for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):  # OPT's, which is a number
            module.dropout = 0.0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model(tiny_tokens(), use_cache=False).logits.square().mean().backward()
    model.eval()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def test_a_block_whose_keys_and_values_another_uses_again_is_not_dropped(tmp_path, monkeypatch):
    asked = recipe(save_tiny(tmp_path / "model", "gemma4"), THIRD, output=str(tmp_path / "out"))
    chosen = {"model.layers.1": 0.1}
    monkeypatch.setattr("compressx.blocks.stage.choose_blocks", lambda *_: ({}, chosen))
    told = r"prune\[0\]: model\.layers\.1 was chosen .* but model\.layers\.2 uses its keys .* by ignore: \[layers: 1\]"
    with pytest.raises(UnsupportedModelError, match=told):
        run(asked)
    more, chosen["model.layers.2"] = str(tmp_path / "more"), 0.2
    run(asked | {"prune": [THIRD | {"sparsity": 0.67}], "output": more})
    assert gone(more) == ["model.layers.1", "model.layers.2"], "without the one that uses them it may go"
    monkeypatch.undo()
    searched = str(tmp_path / "searched")
    run(asked | {"prune": [THIRD], "output": searched})
    assert gone(searched) in (["model.layers.0"], ["model.layers.2"]), "what cannot go alone is not tried"
    assert "Infinity" not in Path(searched, "plan.json").read_text()


def test_a_shrunk_model_can_be_pruned_and_shrunk_again(model):
    run(recipe(model, NEURONS, **SHRINK, output="first"))
    report = run(recipe(model, {**NEURONS, "multiple": 1}, **SHRINK) | {"model": {"path": "first/model"}})
    assert report.shrink["config"] == {"intermediate_size": [64, 48]}


def test_a_file_of_a_run_has_neither_the_experts_nor_the_blocks_that_the_smaller_model_lacks(tmp_path):
    """The router of the dense model would choose experts of zeros; a GPT-2 has no blocks of zeros to leave out."""
    for architecture, rule in {
        "qwen3moe": {"pruner": "reap", "pattern": "experts", "sparsity": 0.5},
        "gpt2": {"pruner": "depth", "pattern": "blocks", "sparsity": 0.34},
    }.items():
        folder = save_tiny(tmp_path / architecture, "llama")
        (made := tiny_of(architecture)).save_pretrained(folder)
        options = {"type": "F16", "like": str(write_like(Path(f"{architecture}.gguf"), made, architecture))}
        text = {"dataset": {"text": str(folder.with_name("text.txt"))}, "samples": 2, "sequence_length": 32}
        export = ["safetensors", {"format": "gguf", "options": options}]
        measured = {"evaluate": {"token_perplexity": text}, "output": f"out-{architecture}"}
        report = run(recipe(folder, {"targets": ["*"], **rule}, shrink=True, export=export) | measured)
        header = GgufHeader.of(Path(f"out-{architecture}/exports/gguf/model.gguf"))
        assert (header.get("expert_count"), header.get("block_count")) in {(2, 3), (None, 2)}
        ours, theirs = report.evaluation["pruned"], report.exports[1]["evaluation"]
        assert theirs["token_perplexity"] == pytest.approx(ours["token_perplexity"], rel=0.01)
