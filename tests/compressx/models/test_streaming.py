"""Blocks from disk and back: the weights that transformers itself would load, one block at a time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compressx.architectures import KINDS
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from compressx.models import streaming
from compressx.models.architecture import find_blocks
from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.loading import load_model
from compressx.models.shards import OUTSIDE, checkpoint_tensors, find_shards
from compressx.models.streaming import open_streamed
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model


def saved(folder: Path, architecture: str, dtype: torch.dtype = torch.float32, shard: str = "200KB") -> Path:
    tiny_model(architecture, dtype=dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


CASES = [(name, torch.bfloat16, "auto") for name in (*KINDS, "falcon", "llama-tied")]
CASES += [("llama", torch.bfloat16, "float32"), ("mixtral", torch.float32, "auto"), ("gpt2", torch.float32, "float16")]


@pytest.mark.parametrize(("architecture", "stored", "wanted"), CASES, ids=str)
def test_each_block_gets_the_weights_that_transformers_loads(architecture, stored, wanted, tmp_path):
    checkpoint = Checkpoint(str(saved(tmp_path, architecture, stored)), dtype=wanted)
    expected = load_model(checkpoint).state_dict()
    streamed = open_streamed(checkpoint)
    seen = set()
    for fqn in (OUTSIDE, *streamed.blocks):
        with streamed.materialise(fqn):
            found = streamed.tensors(fqn)
            assert all(t.dtype == expected[n].dtype and torch.equal(t, expected[n]) for n, t in found.items())
            others = [n for n in expected if n not in found]
            assert all(streamed.model.state_dict()[n].is_meta for n in others)
        seen |= set(found)
    assert seen == set(expected)
    assert all(p.is_meta for p in streamed.model.parameters())


def test_what_transformers_keeps_in_float32_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    checkpoint = Checkpoint(str(saved(tmp_path, "llama")), dtype="bfloat16")
    expected, streamed = load_model(checkpoint).state_dict(), open_streamed(checkpoint)
    assert {t.dtype for t in expected.values()} == {torch.float32, torch.bfloat16}
    with streamed.materialise("model.layers.1"):
        assert all(t.dtype == expected[n].dtype for n, t in streamed.tensors("model.layers.1").items())


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2"])
def test_what_is_computed_and_not_stored_lies_where_the_weights_will_be(architecture: str, tmp_path: Path):
    checkpoint = Checkpoint(str(saved(tmp_path, architecture)))
    assert all(not b.is_meta for b in open_streamed(checkpoint).model.buffers())
    assert all(b.is_meta for b in open_streamed(checkpoint, "meta").model.buffers())


def test_an_embedding_that_is_the_head_too_takes_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint, cpu = Checkpoint(str(saved(tmp_path / "model", "llama-tied"))), torch.device("cpu")
    size = sum(p.numel() * 4 for p in load_model(checkpoint).parameters())
    monkeypatch.setattr("compressx.runtime.machine._CGROUP", tmp_path)
    for free, larger in ((2 * size, False), (2 * size - 2, True)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert streaming.is_larger_than_memory(checkpoint, cpu) is larger


@pytest.mark.parametrize("processes", [1, 4])
def test_a_models_share_of_the_memory_is_that_of_its_process_within_its_container(processes, tmp_path, monkeypatch):
    size = sum(p.numel() * 4 for p in tiny_model("llama").parameters())
    checkpoint, cpu = Checkpoint(str(saved(tmp_path / "model", "llama"))), torch.device("cpu")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * size * processes))
    monkeypatch.setattr("compressx.runtime.machine._CGROUP", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert not streaming.is_larger_than_memory(checkpoint, cpu)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * size * processes - processes))
    assert streaming.is_larger_than_memory(checkpoint, cpu)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    (tmp_path / "memory.current").write_text("1100\n")
    for limit, larger in (("max", False), (2 * size * processes + 1000, False), (2 * size * processes + 900, True)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert streaming.is_larger_than_memory(checkpoint, cpu) is larger


@pytest.mark.parametrize("architecture", KINDS)
def test_what_a_block_holds_goes_back_to_what_its_checkpoint_held(architecture: str, tmp_path: Path):
    saved(tmp_path, architecture)
    stored = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    streamed = open_streamed(Checkpoint(str(tmp_path)))
    for fqn in streamed.blocks:
        with streamed.materialise(fqn):
            written = checkpoint_tensors(streamed.model, streamed.tensors(fqn))
        assert set(written) == set(streamed.source[fqn].members[fqn])
        assert all(torch.equal(tensor, stored[name]) for name, tensor in written.items())


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gptj"])
def test_what_no_checkpoint_holds_is_what_the_loaded_model_computes(architecture: str, tmp_path: Path):
    """Such as rotary frequencies; GPT-J's are float32 ones."""
    checkpoint = Checkpoint(str(saved(tmp_path, architecture, torch.bfloat16)))
    streamed, loaded = open_streamed(checkpoint), load_model(checkpoint)
    computed = {n for n, _ in loaded.named_buffers()} - set(loaded.state_dict())
    for name in computed:
        assert torch.equal(streamed.model.get_buffer(name), loaded.get_buffer(name))
        assert streamed.model.get_buffer(name).dtype == loaded.get_buffer(name).dtype


def test_of_ten_blocks_and_more_in_one_file_each_has_its_own_tensors(tmp_path: Path):
    """`model.layers.1` is how `model.layers.10` begins."""
    kind, values = TINY_CONFIGS["llama"]
    config = AutoConfig.for_model(kind, **{**values, "num_hidden_layers": 11})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    members = find_shards(tmp_path, model, find_blocks(model)).members
    assert members[OUTSIDE] == ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    for fqn in find_blocks(model):
        assert len(members[fqn]) == 9
        assert all(name.startswith(f"{fqn}.") for name in members[fqn])


def test_a_block_is_given_up_when_what_used_it_fails(tmp_path: Path):
    streamed = open_streamed(Checkpoint(str(saved(tmp_path, "llama"))))
    with pytest.raises(ZeroDivisionError), streamed.materialise("model.layers.1"):
        1 / 0  # noqa: B018
    assert all(p.is_meta for p in streamed.model.parameters())


def test_a_gguf_file_cannot_be_streamed(tmp_path: Path):
    with pytest.raises(UnsupportedModelError, match=r"cannot be streamed.*as a whole"):
        open_streamed(Checkpoint(str(tmp_path), gguf_file="x.gguf"))


# --- damage


def test_a_truncated_shard_is_named(tmp_path: Path):
    saved(tmp_path, "llama")
    streamed = open_streamed(Checkpoint(str(tmp_path)))
    file = tmp_path / streamed.source[OUTSIDE].files["model.layers.0.mlp.up_proj.weight"]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=f"{file.name} is not a safetensors file, or it is truncated"):
        streamed.materialise("model.layers.0").__enter__()


@pytest.mark.parametrize(
    "change",
    [
        lambda listed, _: listed.update({"model.layers.0.self_attn.rotary_emb.inv_freq": listed["lm_head.weight"]}),
        lambda listed, others: listed.update({"model.norm.weight": others[0]}),
        lambda listed, _: listed.pop("model.layers.2.mlp.up_proj.weight"),
        lambda listed, others: (listed.clear(), listed.update({f"x{i}": file for i, file in enumerate(others)})),
    ],
    ids=["absent", "in another shard", "unlisted", "other names"],
)
def test_the_headers_of_shards_decide_over_their_index_as_in_memory(change, tmp_path):
    saved(tmp_path, "llama")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    listed = content["weight_map"]
    change(listed, sorted({*listed.values()}, key=lambda file: file == listed["model.norm.weight"]))
    index.write_text(json.dumps(content))
    checkpoint, whole = find_checkpoint(ModelSource(path=tmp_path)), tiny_model("llama").state_dict()
    assert all(torch.equal(x, whole[n]) for n, x in load_model(checkpoint).state_dict().items())
    streamed = open_streamed(checkpoint)
    for fqn in (OUTSIDE, *streamed.blocks):
        with streamed.materialise(fqn):
            assert all(torch.equal(x, whole[n]) for n, x in streamed.tensors(fqn).items())
    assert streamed.model.unread == ()


def test_of_two_shards_with_the_same_tensor_the_last_counts_as_in_memory(tmp_path: Path):
    saved(tmp_path, "llama")
    last = max(tmp_path.glob("*.safetensors"))
    double = {"model.layers.0.mlp.up_proj.weight": torch.full((96, 64), 0.5)}
    save_file(load_file(last) | double, last, metadata={"format": "pt"})
    checkpoint = find_checkpoint(ModelSource(path=tmp_path))
    assert load_model(checkpoint).model.layers[0].mlp.up_proj.weight.unique().tolist() == [0.5]
    with open_streamed(checkpoint).materialise("model.layers.0") as block:
        assert block.mlp.up_proj.weight.unique().tolist() == [0.5]


def test_a_tensor_that_nothing_reads_is_known_in_memory_and_streamed_alike(tmp_path: Path):
    saved(tmp_path, "llama", shard="1GB")
    path = tmp_path / "model.safetensors"
    more = {n: torch.ones(2) for n in ("model.layers.1.extra.weight", "mtp.fc", "model.layers.0.rotary_emb.inv_freq")}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    checkpoint = find_checkpoint(ModelSource(path=tmp_path))
    for model in (load_model(checkpoint), open_streamed(checkpoint).model):
        assert sorted(model.unread) == ["model.layers.1.extra.weight", "mtp.fc"]


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_the_tensors_name(tmp_path: Path):
    saved(tmp_path, "llama", shard="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    streamed = open_streamed(Checkpoint(str(tmp_path)))
    with pytest.raises(ArtifactError, match=r"lacks model\.layers\.2\.mlp\.up_proj\.weight"):
        streamed.materialise("model.layers.2").__enter__()
    with streamed.materialise("model.layers.1"):
        pass


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path):
    saved(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 97}))
    streamed = open_streamed(Checkpoint(str(tmp_path)))
    with pytest.raises(ArtifactError, match="do not fit LlamaForCausalLM"):
        streamed.materialise("model.layers.0").__enter__()
