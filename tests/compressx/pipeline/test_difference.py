"""Pruning the difference of a fine-tuned model from its base: `base:` in a recipe."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.cli.commands import printed, refused
from tests.compressx.pipeline.runs import loaded, recipe, same, weights
from tests.compressx.processes import in_two
from tests.compressx.saved import save_tiny

import compressx
from compressx.masks.inspect import inspect_model
from compressx.masks.maskset import MaskSet
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_tokenizer
from compressx.models.shards import save_model
from compressx.pipeline.run import plan, run
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, CompressxError

OF_LINEARS = ("wanda", "sparsegpt", "dare")


def save_tuned(base: Path, folder: Path, *, dtype: torch.dtype | None = None, share: float = 1.0) -> Path:
    """Save a fine-tune of a saved model: a share of each weight moves by a tenth of its size or less."""
    model = loaded(base)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(moved * 0.02 * torch.randn(parameter.shape, generator=generator))
            parameter.view(-1)[::50] *= 1e-9  # the sum of base and difference would round these to nothing
    save_model(model.to(dtype or model.dtype), load_tokenizer(find_checkpoint(ModelSource(path=base))), folder)
    return folder


@pytest.fixture(scope="session", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give a base and its fine-tune, with a text beside the latter."""
    home = tmp_path_factory.mktemp("pair")
    base = save_tiny(home / "base", "llama", request.param)
    return base, save_tuned(base, home / "tuned")


def linears(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `targets: ["*"]` prunes, by the name of the linear."""
    return {n.removesuffix(".weight"): x for n, x in model.items() if "_proj" in n}


@pytest.mark.parametrize("pruner", OF_LINEARS)
def test_what_is_dropped_is_the_bases_to_the_bit_and_the_rest_stays_close_to_the_fine_tune(
    pair: tuple[Path, Path], pruner: str
) -> None:
    base, tuned = pair
    report = run(recipe(tuned, {"targets": ["*"], "pruner": pruner, "sparsity": 0.75}, base={"path": str(base)}))
    before, after, theirs = weights(tuned), weights("out"), weights(base)
    masks = MaskSet.load("out/masks.safetensors")
    assert masks.verify(loaded("out/model"), base=loaded(base))
    for name, weight in linears(after).items():
        keep = masks[name].keep
        assert torch.equal(weight[~keep], linears(theirs)[name][~keep])
        assert (~keep).sum() == keep.numel() * 3 // 4
        moved = (weight - linears(before)[name])[keep].float().abs().mean()
        assert moved <= 4 * (linears(before)[name] - linears(theirs)[name])[keep].float().abs().mean()
    others = {n: x for n, x in after.items() if "_proj" not in n}
    assert same(others, {n: before[n] for n in others})
    assert (report.sparsity, report.base, report.share) == (0.75, str(base), "as base")
    assert json.loads(Path("out/model/config.json").read_text())["compressx"]["base"] == str(base)


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral", "gpt-oss"])
def test_weights_that_are_stored_transposed_or_fused_drop_to_the_bases(tmp_path: Path, architecture: str) -> None:
    base = save_tiny(tmp_path / "base", architecture)
    tuned = save_tuned(base, tmp_path / "tuned")
    run(recipe(tuned, {"targets": ["*"], "pruner": "wanda", "sparsity": 0.75}, base={"path": str(base)}))
    masks, after, theirs = MaskSet.load("out/masks.safetensors"), loaded("out/model"), loaded(base)
    assert masks.sparsity() == 0.75
    assert masks.verify(after, base=theirs)


@pytest.mark.parametrize("pruner", OF_LINEARS)
def test_where_nothing_is_dropped_the_fine_tune_is_written_byte_for_byte(pair: tuple[Path, Path], pruner: str) -> None:
    base, tuned = pair
    run(recipe(tuned, {"targets": ["*"], "pruner": pruner, "sparsity": 0.0}, base={"path": str(base)}))
    assert same(weights("out"), weights(tuned))


@pytest.mark.parametrize("streaming", [False, True])
def test_where_everything_is_dropped_the_base_is_written_byte_for_byte(
    pair: tuple[Path, Path], streaming: bool
) -> None:
    base, tuned = pair
    everything = {"targets": ["*"], "pruner": "magnitude", "sparsity": 1.0}
    keeps = {} if streaming else {"base_keeps": ["*norm*", "*embed_tokens*", "lm_head*"]}
    model = {"path": str(tuned), "streaming": streaming}
    run(recipe(tuned, everything, model=model, base={"path": str(base)}, **keeps))
    after, theirs = weights("out"), weights(base)
    expected = linears(theirs) if streaming else theirs
    assert same(linears(after) if streaming else after, expected)


def test_a_streamed_run_an_interrupted_one_and_one_in_memory_end_with_the_same_weights(pair: tuple[Path, Path]) -> None:
    base, tuned = pair
    asked = recipe(tuned, {"targets": ["*"], "pruner": "sparsegpt", "pattern": "2:4"}, base={"path": str(base)})
    run(asked)
    run(asked | {"model": {"path": str(tuned), "streaming": True}, "output": "streamed"})
    assert same(weights("out"), weights("streamed"))
    model = loaded(tuned)
    tokenizer = load_tokenizer(find_checkpoint(ModelSource(path=tuned)))
    pruned = compressx.prune(model, tokenizer, {k: v for k, v in asked.items() if k not in ("model", "output")})
    assert same(dict(pruned.model.state_dict()), weights("out"))
    assert pruned.masks.verify(pruned.model, base=loaded(base))
    assert "are the base's" in repr(pruned.report)


def test_allocation_measures_differences(pair: tuple[Path, Path]) -> None:
    base, tuned = pair
    allocation = {"method": "divergence", "target": 0.8, "sparsities": [0.5, 0.9], "samples": 4}
    report = run(recipe(tuned, {"targets": ["*"], "pruner": "wanda"}, base={"path": str(base)}, allocation=allocation))
    assert report.sparsity == pytest.approx(0.8, abs=0.01)
    assert MaskSet.load("out/masks.safetensors").verify(loaded("out/model"), base=loaded(base))


def test_blocks_are_reverted_whole_those_first_that_fine_tuning_changed_least(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    model = loaded(base)
    with torch.no_grad():
        for i, size in enumerate((0.05, 0.001, 0.05)):
            for parameter in model.model.layers[i].parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    tuned = tmp_path / "tuned"
    save_model(model, load_tokenizer(find_checkpoint(ModelSource(path=base))), tuned)
    rule = {"targets": ["*"], "pruner": "depth", "pattern": "blocks", "sparsity": 0.34}
    run(recipe(tuned, rule, base={"path": str(base)}))
    after, before, theirs = weights("out"), weights(tuned), weights(base)
    assert json.loads(Path("out/plan.json").read_text())["blocks"]["dropped"] == ["model.layers.1"]
    for name, weight in after.items():
        assert torch.equal(weight, (theirs if ".layers.1." in name else before)[name]), name


def refusal(asked: dict[str, Any]) -> str:
    with pytest.raises(CompressxError) as refused:
        plan(asked)
    return str(refused.value)


@pytest.fixture
def tuned(tmp_path: Path) -> tuple[Path, Path]:
    base = save_tiny(tmp_path / "base", "llama")
    return base, save_tuned(base, tmp_path / "tuned")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"shrink": True}, "shrink needs zeros, but with base at"),
        ({"finetune": {"steps": 2}}, "finetune needs zeros, but with base at"),
        ({"reconstruct_block": {"passes": 1}}, "reconstruct_block needs zeros, but with base at"),
        ({"prune": [{"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.5}]},
         "attnprune prunes no difference from base at"),
        ({"prune": [{"targets": ["*"], "pruner": "magnitude", "pattern": "neurons", "sparsity": 0.5}]},
         "magnitude prunes no difference from base at"),
        ({"base_keeps": ["*.q_proj.weight"]}, "is pruned by a rule; name embeddings, norms or biases"),
        ({"base_keeps": ["*nrm*"]}, "no parameter is called '*nrm*'"),
        ({"base_keeps": ["*norm*"]}, "base_keeps: taking weights from another model needs all "),
        ({"base": None, "base_keeps": ["*norm*"]}, "base_keeps only goes with base"),
    ],
)  # fmt: skip
def test_what_holds_zeros_is_refused_with_a_base_in_one_line(
    tuned: tuple[Path, Path], changes: dict[str, Any], expected: str
) -> None:
    source = {"path": str(tuned[1]), "streaming": "base_keeps" in changes and "*norm*" in changes["base_keeps"]}
    told = refusal(recipe(tuned[1], base={"path": str(tuned[0])}, model=source) | changes)
    assert expected in told
    assert "\n" not in told


def test_a_base_that_is_none_of_the_models_is_refused_in_one_line(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    base, model = tuned
    config = json.loads((base / "config.json").read_text())
    copies = {}
    for name, change in (("wider", {"intermediate_size": 256}), ("words", {"vocab_size": 256})):
        copies[name] = tmp_path / name
        shutil.copytree(base, copies[name])
        (copies[name] / "config.json").write_text(json.dumps(config | change))
    named = {
        str(model): "is the model itself; name the model that it was fine-tuned from",
        str(save_tiny(tmp_path / "other", "qwen2")): "it is Qwen2ForCausalLM, and LlamaForCausalLM in the model",
        str(save_tiny(tmp_path / "half", "llama", torch.bfloat16)): "its dtype is torch.bfloat16, and torch.float",
        str(copies["wider"]): "mlp.gate_proj.weight is [256, 64], and [96, 64] in the model",
        str(copies["words"]): "embed_tokens.weight is [256, 64], and [128, 64] in the model",
        str(tmp_path / "nowhere"): "nowhere",
    }
    for path, expected in named.items():
        told = refusal(recipe(model, base={"path": path}))
        assert expected in told
        assert told.startswith("<dict>:base: ")
        assert "\n" not in told


def test_a_base_with_the_models_own_weights_is_refused_before_anything_is_pruned(tuned: tuple[Path, Path]) -> None:
    copy = tuned[0].with_name("copy")
    shutil.copytree(tuned[1], copy)
    with pytest.raises(ArtifactError, match="the model's own weights, so that there is no difference to prune"):
        run(recipe(tuned[1], base={"path": str(copy)}))


def test_masks_of_a_difference_need_their_base(tuned: tuple[Path, Path]) -> None:
    base, model = tuned
    run(recipe(model, base={"path": str(base)}))
    masks, dense, theirs = MaskSet.load("out/masks.safetensors"), loaded(model), loaded(base)
    with pytest.raises(ArtifactError, match="these masks drop weights to those of a base model; give it"):
        masks.apply(dense)
    with pytest.raises(ArtifactError, match="only zeros can be held"):
        masks.to_torch_ao(dense)
    with pytest.raises(ArtifactError, match="the base's weight has sha256"):
        masks.apply(dense, base=dense)
    masks.apply(dense, original=True, base=theirs)
    assert same(dict(dense.state_dict()), weights("out"))


def test_inspect_counts_the_weights_that_are_not_the_bases_though_a_mask_drops_them(tuned: tuple[Path, Path]) -> None:
    base, model = tuned
    run(recipe(model, base={"path": str(base)}))
    for asked, counts in (("out", 0), (str(model), 1)):
        source = ModelSource(path=Path(asked))
        found = inspect_model(source, Path("out/masks.safetensors"), base=ModelSource(path=base))
        dropped = sum(x.shape[0] * x.shape[1] for x in found.linears) // 2
        assert sum(x.off_mask or 0 for x in found.linears) == counts * dropped
        assert {x.mask for x in found.linears} == {"wanda 50% row, as base"}
    text = printed("inspect", "out")
    assert "compared with out/masks.safetensors, which needs its base: give it by --base" in text
    assert "0 weights are not as it drops them" in printed("inspect", "out", "--base", str(base))


def test_inspect_refuses_a_base_without_the_head_that_has_a_mask(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    base, model = tuned
    rule = {"targets": ["lm_head"], "pruner": "magnitude", "sparsity": 0.5}
    run(recipe(model, rule, base={"path": str(base)}))
    assert "0 weights are not as it drops them" in printed("inspect", "out", "--base", str(base))
    tied = save_tiny(tmp_path / "tied", "llama-tied")
    told = refused("inspect", "out", "--base", str(tied))
    assert "base: lm_head is no linear of its own, and [128, 64] in the model" in told


def test_the_commands_take_a_difference_with_its_base_as_masks_and_packed(tuned: tuple[Path, Path]) -> None:
    base, model = tuned
    sections = {"export": ["safetensors", "packed"], "evaluate": None}
    run(recipe(model, {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.9}, base={"path": str(base)}) | sections)
    told = printed("apply", "out/masks.safetensors", str(model), "--base", str(base), "--output", "applied")
    assert "weights became the base's" in told
    assert same(weights("applied"), weights("out"))
    assert "these masks drop weights to those of a base model" in refused(
        "apply", "out/masks.safetensors", str(model), "--output", "zeros"
    )
    text = f"evaluate.token_perplexity={{dataset: {{text: {model.with_name('text.txt')}}}, sequence_length: 32}}"
    measured = [
        printed("eval", *given, "--base", str(base), "--set", text, "--json")
        for given in ((str(model), "--masks", "out/masks.safetensors"), ("out/exports/packed",))
    ]
    assert measured[0] == measured[1] == printed("eval", "out", "--set", text, "--json")
    packed = Path("out/exports/packed/model.packed.safetensors").stat().st_size
    assert packed < 0.75 * Path("out/model/model.safetensors").stat().st_size  # with an embedding that moved whole
    assert "give that model's folder or hub id by --base" in refused("eval", "out/exports/packed")
    assert "0 weights are not as it drops them" in printed(
        "inspect", "out/exports/packed", "--masks", "out/masks.safetensors", "--base", str(base)
    )


def _run(path: Path) -> str:
    return run(path).to_json()


@pytest.mark.slow
def test_two_processes_prune_the_same_differences_as_one(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    rule = {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.75}
    asked = recipe(tuned[1], rule, base={"path": str(tuned[0])}, compute_dtype="float32", output=str(tmp_path / "two"))
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(asked))
    in_two(partial(_run, path), tmp_path)
    run(asked | {"output": "one"})
    one, two = (MaskSet.load(Path(x) / "masks.safetensors") for x in ("one", tmp_path / "two"))
    assert sum(int((one[n].keep != two[n].keep).sum()) for n in one) < 1e-3 * sum(x.keep.numel() for x in one.values())
    assert two.verify(loaded(tmp_path / "two/model"), base=loaded(tuned[0]))


def test_dare_divides_the_kept_differences_by_their_share(tuned: tuple[Path, Path]) -> None:
    base, model = tuned
    name = "model.layers.0.mlp.up_proj"
    run(recipe(model, {"targets": [name], "pruner": "dare", "sparsity": 0.75}, base={"path": str(base)}))
    before, theirs, found = (linears(weights(x))[name] for x in (model, base, "out"))
    assert torch.unique(((found - theirs) / (before - theirs)).round(decimals=2)).tolist() == [0, 4]
