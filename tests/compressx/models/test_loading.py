from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compressx.causal import small_config
from tests.compressx.saved import save_tiny
from transformers import AutoModelForCausalLM

from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of, find_blocks
from compressx.models.checkpoint import Checkpoint, explained, find_checkpoint, local_folder
from compressx.models.loading import _without_gguf, load_empty, load_model, load_skeleton, load_tokenizer
from compressx.models.shards import files_of
from compressx.models.streaming import open_streamed
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.testing import save_tiny_model, tiny_model, tiny_tokens


def source(**fields: object) -> ModelSource:
    return ModelSource.model_validate(fields)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny Llama on disk, in bfloat16."""
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("said", [True, False])
def test_a_model_has_the_dtype_of_its_checkpoint_or_the_one_that_is_asked_for(said: bool, saved: Path):
    config = json.loads((saved / "config.json").read_text())
    if not said:
        del config["dtype"]
    (saved / "config.json").write_text(json.dumps(config))
    for load in (load_empty, load_model):
        assert load(find_checkpoint(source(path=str(saved)))).dtype == torch.bfloat16
        model = load(find_checkpoint(source(path=saved, dtype="float32")))
        assert model.dtype == torch.float32
        assert not model.training


def test_the_skeleton_has_every_shape_and_no_weight(saved):
    checkpoint = find_checkpoint(source(path=saved))
    skeleton, model = load_skeleton(checkpoint), load_model(checkpoint)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert [(n, p.shape) for n, p in skeleton.named_parameters()] == [(n, p.shape) for n, p in model.named_parameters()]


@pytest.mark.slow
def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path):
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="is not a causal language model"):
        load_skeleton(find_checkpoint(source(path=tmp_path)))


def test_damaged_safetensors_are_an_error_that_names_the_file_before_weights_are_loaded(saved):
    file = saved / "model.safetensors"
    whole, pointer = file.read_bytes(), b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    for content in (whole[:1000], whole[:-1], b"", pointer):
        file.write_bytes(content)
        reason = ".*git lfs pull" if content is pointer else "is not a safetensors file, or it is truncated"
        with pytest.raises(ArtifactError, match=rf"model\.safetensors {reason}"):
            find_checkpoint(source(path=saved))


@pytest.mark.parametrize(("architecture", "load"), [("llama", load_model), ("gpt2", open_streamed)])
def test_a_checkpoint_with_more_blocks_than_its_config_means_is_refused(architecture, load, tmp_path):
    save_tiny_model(tmp_path, architecture)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in {"num_hidden_layers", "n_layer"} & {*config}:
        config[key] = 2
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ArtifactError, match=r"has (model\.layers|(transformer\.)?h)\.2\..*, but the config has 2 decoder"
    ):
        load(find_checkpoint(source(path=tmp_path)))


HALF = r"runs/half is not there yet: its run is active, or .* --resume; what is"


@pytest.mark.parametrize(
    ("given", "told"),
    [({"id": "nobody/nothing"}, "cannot load nobody/nothing: .*; check the id and the network, or give a local"),
     ({"id": "lama"}, r"cannot load lama: .*; did you mean '\./llama'\? check the id and the"),
     ({"id": "runs/half"}, HALF), ({"path": Path("runs/half")}, HALF)],
)  # fmt: skip
def test_what_is_neither_here_nor_on_the_hub_is_refused_with_what_to_do(given, told, saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    Path("runs/.half.partial-0a1b2c3d").mkdir(parents=True)
    with pytest.raises(ArtifactError, match=told):
        load_skeleton(find_checkpoint(source(**given)))


@pytest.mark.slow
def test_the_embedded_smollm2_is_real_and_saves_like_any_other_model(smollm2, tmp_path):
    from transformers import AutoModelForCausalLM

    text = "The capital of France is Paris. The capital of Germany is"
    ids = smollm2.tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = smollm2.model(ids).logits
    assert smollm2.tokenizer.decode(logits[0, -1].argmax()) == " Berlin"
    assert getattr(smollm2.model.config, "quantization_config", None) is None
    smollm2.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma3"])
def test_a_gguf_file_in_16_bits_computes_as_transformers_does_with_tables_in_float32(architecture: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    tiny_model(architecture).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    clean = _without_gguf(loaded).eval()
    dtypes = [{n: b.dtype for n, b in model.named_buffers()} for model in (loaded, clean)]
    assert dtypes[0] == dtypes[1]
    assert torch.float32 in dtypes[0].values()
    ids = tiny_tokens(sequences=1, length=60)
    with torch.no_grad():
        assert torch.equal(clean(ids).logits, loaded(ids).logits)
    tied = [model.lm_head.weight is model.get_input_embeddings().weight for model in (loaded, clean)]
    assert tied[0] == tied[1]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"hidden_size": 64.0}, "hidden_size"), ({"num_key_value_heads": "2"}, "num_key_value_heads"),
     ({"model_type": "no_such_model"}, "no_such_model"),
     ({"hidden_act": "nope"}, "a value that transformers does not know: 'nope'"), ({"dtype": "float99"}, "float99")],
    ids=str,
)  # fmt: skip
def test_a_config_that_transformers_cannot_use_is_an_error_that_names_the_model(changed, reason, saved):
    config = json.loads((saved / "config.json").read_text()) | changed
    (saved / "config.json").write_text(json.dumps(config))
    checkpoint = find_checkpoint(source(path=str(saved)))
    for load in (load_skeleton, load_model):
        with pytest.raises(ArtifactError, match=rf"^cannot load {saved}: .*{reason}"):
            load(checkpoint)


def test_revision_trust_and_safetensors_reach_everything_that_is_fetched(monkeypatch, tmp_path):
    seen = {}

    def fetched(name):
        def fetch(location, **given):
            seen[name] = given
            raise OSError("far enough")

        return fetch

    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", fetched(name))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched("folder"))
    asked = find_checkpoint(source(id="org/model", revision="abc", trust_remote_code=True))
    for load in (load_skeleton, load_tokenizer, local_folder, load_model):
        with pytest.raises(ArtifactError, match="far enough"):
            load(asked)
        if load is local_folder:  # which loading asks for first
            monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: tmp_path)
            monkeypatch.setattr("compressx.models.loading._config", lambda _: None)
    assert len(seen) == 4
    assert {given["revision"] for given in seen.values()} == {"abc"}
    assert all(given["trust_remote_code"] is True for name, given in seen.items() if name != "folder")
    assert seen["AutoModelForCausalLM"]["use_safetensors"] is True
    assert find_checkpoint(source(id="org/model")).arguments == {"trust_remote_code": False}


def test_a_pickle_is_not_read_however_it_is_named(saved):
    torch.save(load_model(Checkpoint(str(saved))).state_dict(), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"no file named model\.safetensors"):
        load_model(Checkpoint(str(saved)))
    hub = OSError("cannot be loaded with `safetensors`. Please do not set `use_safetensors=True`.")
    with pytest.raises(UnsupportedModelError, match="pickle checkpoints are refused"), explained(Checkpoint("a/b")):
        raise hub


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\xff\xfe\0", b"[]", b"[" * 100_000, b'{"bos_token": 5', b'{"bos_token": 5, "model": 5}',
     b'{"bos_token": 5, "model": {"type": "Newer"}}',
     b'{"bos_token": "\\ud83d", "model": {"type": "WordLevel", "vocab": {"a": -1}}}',
     b'{"added_tokens_decoder": [1], "model": {"type": "WordLevel", "vocab": {"a": "b"}}}'],
    ids=lambda x: x[:40].decode("latin-1"),
)  # fmt: skip
def test_files_of_a_tokenizer_that_are_damaged_are_told_in_one_line(name, content, tmp_path):
    folder = save_tiny(tmp_path / "model", "llama")
    (folder / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"^cannot load (the tokenizer of )?{folder}: ") as caught:
        load_tokenizer(find_checkpoint(ModelSource(path=folder)))
    assert "\n" not in str(caught.value)


def test_code_that_a_tokenizer_names_is_not_run(tmp_path):
    folder = save_tiny(tmp_path / "model", "llama")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nclass Own: pass\n"
    )
    with pytest.raises(UnsupportedModelError, match="has Python code of its own"):
        load_tokenizer(find_checkpoint(ModelSource(path=folder)))
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_tokenizer_is_refused_also_where_transformers_makes_an_empty_one(tmp_path):
    folder = save_tiny(tmp_path / "model", "gpt2")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(ArtifactError, match=f"^{folder} has no tokenizer, such as tokenizer.json; save"):
            load_tokenizer(find_checkpoint(ModelSource(path=folder)))
        (folder / "tokenizer_config.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is an encoder, which sees the"),
        ({"model_type": "bart", "architectures": ["BartModel"]}, "BartModel is an encoder-decoder"),
        ({"model_type": "t5"}, "t5 is an encoder-decoder"),
        (
            {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]},
            "ModernBertForMaskedLM is an encoder",
        ),
    ],
)
def test_a_model_that_is_no_decoder_is_refused_with_what_it_is(config, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"{told}.*; compressx prunes decoder-only language models"):
        load_skeleton(find_checkpoint(ModelSource(path=tmp_path)))


def test_a_bert_that_is_a_decoder_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "is_decoder": True, "num_hidden_layers": 2})
    )
    save_file({}, tmp_path / "model.safetensors")
    assert len(find_blocks(load_skeleton(find_checkpoint(ModelSource(path=tmp_path))))) == 2


_FURTHER = {
    "llama": (["mtp.fc.weight", "model.layers.0.extra.weight"], {"num_nextn_predict_layers": 1}),
    "deepseek_v3": (["model.layers.3.eh_proj.weight"], {"num_nextn_predict_layers": 1, "max_length": 77}),
    "glm4_moe": (["model.layers.3.eh_proj.weight"], {"num_nextn_predict_layers": 1, "temperature": 0.6}),
    "qwen3_next": (["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"], {"num_nextn_predict_layers": 1}),
    "qwen3_5_text": (["mtp.fc.weight"], {"mtp_num_hidden_layers": 1, "do_sample": True}),
    "gpt2": (["transformer.extra.weight"], {"top_k": 5, "do_sample": True, "max_length": 40}),
    "opt": ([], {"num_beams": 3, "max_length": 99}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", _FURTHER)
def test_what_no_class_reads_is_named_and_settings_of_generation_are_kept_streamed_as_in_memory(
    kind: str, tmp_path: Path
):
    """Tensors of blocks that predict several tokens, and generation's settings where old folders have them."""
    names, settings = _FURTHER[kind]
    AutoModelForCausalLM.from_config(small_config(kind)).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (file := tmp_path / "config.json").write_text(json.dumps(json.loads(file.read_text()) | settings))
    stored = load_file(tmp_path / "model.safetensors") | {name: torch.ones(2, 2) for name in names}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    models = load_model(Checkpoint(str(tmp_path))), open_streamed(Checkpoint(str(tmp_path))).model
    for model in models:
        assert model.unread == tuple(sorted(names))
        generation = model.generation_config.to_dict()
        assert {
            key: generation.get(key) for key in settings if "predict" not in key and "mtp" not in key
        }.items() <= settings.items()
        counts = {key for key in settings if "predict" in key or "mtp" in key}
        assert model.emptied.keys() >= counts or not counts
        assert all(getattr(model.config, key) == 0 for key in counts)
    assert models[0].generation_config.to_dict() == models[1].generation_config.to_dict()
    assert models[0].config.to_dict() == models[1].config.to_dict() | {
        "_name_or_path": models[0].config.to_dict().get("_name_or_path")
    }


@pytest.mark.parametrize("stored", ["own", "own, in shards", "equal", "none"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_whether_a_head_is_the_embeddings_is_known_by_the_tensors_everywhere(
    architecture: str, stored: str, tmp_path: Path
):
    """The flag of the config is the wrong one each time, but where both are equal."""
    saved, written = save_tiny_model(tmp_path / "model", architecture), tmp_path / "written"
    held = load_file(saved / "model.safetensors")
    embedding = next(x for name, x in held.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    own = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1))
    held["lm_head.weight"] = own if stored.startswith("own") else embedding.clone()
    if stored == "none":
        del held["lm_head.weight"]
    (file := saved / "config.json").write_text(
        json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": stored != "none"})
    )
    (saved / "model.safetensors").unlink()
    parts = [sorted(held)[::2], sorted(held)[1::2]] if stored == "own, in shards" else [sorted(held)]
    files = {f"model-{i}.safetensors": names for i, names in enumerate(parts)}
    for name, names in files.items():
        save_file({n: held[n] for n in names}, saved / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: name for name, names in files.items() for n in names}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint, ids, expected = Checkpoint(str(saved)), tiny_tokens(sequences=2), held.get("lm_head.weight", embedding)
    loaded, streamed = load_model(checkpoint), open_streamed(checkpoint)
    tied = not stored.startswith("own")
    for model in (loaded, load_skeleton(checkpoint), streamed.model):
        assert model.config.get_text_config().tie_word_embeddings is tied
    assert ("lm_head" in architecture_of(load_skeleton(checkpoint)).outside) is not tied
    assert torch.equal(loaded.get_output_embeddings().weight, expected)
    with torch.no_grad():
        logits = loaded(ids, use_cache=False).logits
        assert torch.equal(next(streamed.logits([ids])), logits)
        with streamed.whole() as whole:
            whole.tie_weights()  # as lm-evaluation-harness does
            assert torch.equal(whole(ids, use_cache=False).logits, logits)
    for access in (InMemory(loaded), streamed):
        access.save(None, tmp_path / "blocks", written)
        again = load_model(Checkpoint(str(written)))
        assert torch.equal(again.get_output_embeddings().weight, expected)
        assert ("lm_head.weight" in files_of(written)) is not tied
        shutil.rmtree(written)
