from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.saved import save_tiny
from tests.compressx.two_of_four import two_of_four

from compressx.api.exporter import FinishedModel
from compressx.models.checkpoint import find_base, find_checkpoint
from compressx.models.loading import load_model
from compressx.models.packed import PackedFile
from compressx.models.packed_folder import (
    PackedExporter,
    base_in,
    needs_base,
    pack_folder,
    packed_sizes,
    unpack_folder,
    unpacked,
)
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.runtime.files import BLOCKS, STATE
from compressx.testing import tiny_model


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))  # noqa: PTH208 - hidden names included


def save_pruned(folder: Path, architecture: str = "llama", *, shards: bool = False) -> Path:
    """Save a tiny model in bfloat16, two of four weights zero, in one file or in several with an index."""
    save_tiny(folder, architecture, torch.bfloat16)
    model = tiny_model(architecture, dtype=torch.bfloat16)
    two_of_four(model).apply(model)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    if shards:
        (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_pruned(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_pruned(tmp_path / "sharded", shards=True)


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "mixtral", "gpt2"])
@pytest.mark.parametrize("shards", [False, True])
def test_every_file_comes_back_byte_for_byte(tmp_path: Path, architecture: str, shards: bool) -> None:
    source = save_pruned(tmp_path / "source", architecture, shards=shards)
    (source / "modeling.py").write_text("VALUE = 1\n")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/short.jinja").write_text("{{ messages }}")
    told: list[str] = []
    sizes = pack_folder(source, tmp_path / "packed", progress=told.append)
    assert told == sorted(p.name for p in source.glob("*.safetensors"))
    assert unpack_folder(tmp_path / "packed", tmp_path / "again") == packed_sizes(tmp_path / "packed")
    assert contents(tmp_path / "again") == contents(source)
    assert sizes.bytes == sum(p.stat().st_size for p in source.glob("*.safetensors"))
    assert sizes.packed_bytes == sum(p.stat().st_size for p in (tmp_path / "packed").glob("*.safetensors"))
    assert names_in(tmp_path / "packed") == sorted(
        p.name.replace("safetensors", "packed.safetensors", 1) for p in source.iterdir()
    )


def test_the_output_folder_of_a_run_keeps_its_other_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_pruned(run / "model")
    (run / "text.txt").unlink()  # which no run writes
    for name in ("masks.safetensors", "report.json", "recipe.yaml", "plots/one.svg"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(name)
    pack_folder(run, tmp_path / "packed")
    found = contents(tmp_path / "packed")
    assert {n: c for n, c in contents(run).items() if n != "model/model.safetensors"}.items() <= found.items()
    assert found.keys() - contents(run).keys() == {"model/model.packed.safetensors"}
    unpack_folder(tmp_path / "packed", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(run)


_ANSWER = """
import sys
sys.modules["compressx"] = None  # importing it is an error
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert len(AutoTokenizer.from_pretrained(sys.argv[1])) > 3
with torch.no_grad():
    logits = model(torch.arange(1, 9)[None]).logits
torch.save(logits, sys.argv[2])
"""


def answered(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _ANSWER, str(folder), str(out)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_unpacked_model_answers_without_compressx_and_a_packed_one_is_refused(model: Path, tmp_path: Path) -> None:
    pack_folder(model, tmp_path / "packed")
    unpack_folder(tmp_path / "packed", tmp_path / "again")
    done = answered(tmp_path / "again", tmp_path / "logits.pt")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = load_model(find_checkpoint(ModelSource(path=model)))(torch.arange(1, 9)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)
    refused = answered(tmp_path / "packed", tmp_path / "none.pt")
    assert refused.returncode == 1
    assert "no file named model.safetensors" in refused.stderr


@pytest.mark.parametrize("form", ["model", "sharded", "run"])
def test_a_packed_folder_is_loaded_wherever_a_model_is_taken(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / form / "model" if form == "run" else tmp_path / form
    save_pruned(source, shards=form == "sharded")
    pack_folder(tmp_path / form, tmp_path / "packed")
    expected = load_model(find_checkpoint(ModelSource(path=tmp_path / form))).state_dict()
    with caplog.at_level(logging.INFO, "compressx"):
        for _ in range(2):
            checkpoint = find_checkpoint(ModelSource(path=tmp_path / "packed"))
            found = load_model(checkpoint).state_dict()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert sum("unpacking" in line for line in caplog.messages) == 1
    assert Path(checkpoint.location).is_relative_to(tmp_path / "cache")
    assert contents(Path(checkpoint.location)) == contents(source)


def test_the_cache_tells_packed_folders_apart_by_any_file_of_them(model: Path, tmp_path: Path) -> None:
    pack_folder(model, tmp_path / "packed")
    first = unpacked(tmp_path / "packed")
    pack_folder(first, tmp_path / "elsewhere")
    assert unpacked(tmp_path / "elsewhere") == first
    config = tmp_path / "packed" / "config.json"
    config.write_text(config.read_text() + " ")
    second = unpacked(tmp_path / "packed")
    assert second != first
    assert (second / "config.json").read_text().endswith(" ")


def test_two_that_need_one_packed_folder_at_a_time_unpack_it_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_folder(model, tmp_path / "packed")
    written, begun, go_on = [], threading.Event(), threading.Event()
    original = PackedFile.unpack

    def slow(self: PackedFile, target: Path, **options: Any) -> None:
        written.append(target)
        begun.set()
        go_on.wait(10)
        original(self, target, **options)

    monkeypatch.setattr(PackedFile, "unpack", slow)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(unpacked(tmp_path / "packed"))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threading.Timer(0.3, go_on.set).start()
    for thread in threads:
        thread.join(20)
    assert len(written) == 1
    assert len(found) == 2
    assert found[0] == found[1]


def test_what_cannot_be_packed_says_why(model: Path, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    pack_folder(model, packed)
    unfinished, with_blocks = (shutil.copytree(model, tmp_path / x) for x in (STATE, BLOCKS))
    (unfinished / STATE).touch()
    (with_blocks / BLOCKS).mkdir()
    for act, source, output, said in (
        (pack_folder, packed, out, "packed is packed already; compressx unpack restores it"),
        (unpack_folder, model, out, r"model is not packed: .*model has no \*\.packed\.safetensors"),
        (pack_folder, model, packed, "output .*packed exists; name a new folder with -o"),
        (unpack_folder, packed, model, "output .*model exists; name a new folder with -o"),
        (pack_folder, unfinished, out, f" has {STATE}, as the folder of an unfinished run"),
        (pack_folder, with_blocks, out, f" has {BLOCKS}, as the folder of an unfinished run"),
    ):
        with pytest.raises(ArtifactError, match=said):
            act(source, output)
    assert not out.exists()


@pytest.mark.parametrize("load", [unpacked, lambda folder: unpack_folder(folder, folder.with_name("out"))])
def test_a_damaged_folder_is_refused_by_the_name_of_the_file(load, sharded: Path, tmp_path: Path) -> None:
    pack_folder(sharded, tmp_path / "packed")
    shard = min((tmp_path / "packed").glob("*.packed.safetensors"))
    changed = bytearray(shard.read_bytes())
    changed[-1] ^= 1
    shard.write_bytes(changed)
    with pytest.raises(ArtifactError, match=rf"{shard.name} is damaged: \S+weight "):
        load(tmp_path / "packed")
    shard.unlink()
    with pytest.raises(ArtifactError, match=rf"packed is packed, but {shard.name} is missing"):
        load(tmp_path / "packed")
    assert not (tmp_path / "out").exists()


# --- against a base


def save_tuned(folder: Path, architecture: str = "llama", *, shards: bool = False, tied: bool = True) -> Path:
    """Save a fine-tune of `save_pruned`: a tenth of the entries moved by some percent."""
    save_pruned(folder, architecture)
    model = load_model(find_checkpoint(ModelSource(path=folder)))
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            moved = torch.rand(tensor.shape, generator=random) < 0.1
            tensor.mul_(1 + 0.05 * moved)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    if shards:
        (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(("base_shards", "shards"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_fine_tune_takes_a_fraction_beside_its_base_whatever_their_shards(
    tmp_path: Path, base_shards: bool, shards: bool
) -> None:
    save_pruned(tmp_path / "base", shards=base_shards)
    tuned = save_tuned(tmp_path / "tuned", shards=shards)
    base = find_base(str(tmp_path / "base"))
    sizes = pack_folder(tuned, tmp_path / "packed", base=base)
    alone = pack_folder(tuned, tmp_path / "alone")
    assert all(tensor.differs for tensor in sizes.tensors if tensor.bytes > 1000)
    assert sum(x.packed_bytes for x in sizes.tensors) < 0.25 * sum(x.packed_bytes for x in alone.tensors)
    assert (sizes.base, alone.base) == ("base", None)
    unpack_folder(tmp_path / "packed", tmp_path / "again", base=base)
    assert contents(tmp_path / "again") == contents(tuned)


@pytest.mark.parametrize("form", ["folder", "run", "packed"])
def test_a_base_may_be_a_folder_that_of_a_run_or_packed(form: str, tmp_path: Path) -> None:
    base = save_pruned(tmp_path / "run" / "model" if form == "run" else tmp_path / "folder")
    if form == "packed":
        pack_folder(base, tmp_path / "packed")
    tuned = save_tuned(tmp_path / "tuned")
    assert pack_folder(tuned, tmp_path / "small", base=find_base(str(tmp_path / form))).base == form
    source = ModelSource(path=tmp_path / "small", base=str(tmp_path / form))
    found = find_checkpoint(source)
    assert contents(Path(found.location)) == contents(tuned)


def test_without_its_base_or_with_another_one_a_fine_tune_is_refused_even_if_it_is_in_the_cache(
    model: Path, tmp_path: Path
) -> None:
    pack_folder(save_tuned(tmp_path / "tuned"), tmp_path / "packed", base=base_in(model))
    good = ModelSource(path=tmp_path / "packed", base=str(model))
    for _ in range(2):
        for call in (
            lambda: find_checkpoint(ModelSource(path=tmp_path / "packed")),
            lambda: unpack_folder(tmp_path / "packed", tmp_path / "out"),
        ):
            with pytest.raises(
                ArtifactError, match=r"holds what differs .*\(packed against model\); give that model's fo"
            ):
                call()
        save_pruned(tmp_path / "gpt", "gpt2")
        with pytest.raises(ArtifactError, match=r"packed against model.*: .*gpt has no \S+weight of BF16 "):
            find_checkpoint(good.model_copy(update={"base": str(tmp_path / "gpt")}))
        assert contents(Path(find_checkpoint(good).location)) == contents(tmp_path / "tuned")
    assert not (tmp_path / "out").exists()
    assert (needs_base(tmp_path / "packed"), needs_base(model), needs_base("org/model")) == (True, False, False)


def test_a_base_that_is_not_needed_is_refused(model: Path, tmp_path: Path) -> None:
    pack_folder(model, tmp_path / "packed")
    for place in (model, tmp_path / "packed"):
        with pytest.raises(
            ArtifactError, match=rf"{place.name} is not packed against a base; leave --base, or model\.base"
        ):
            find_checkpoint(ModelSource(path=place, base=str(model)))
    with pytest.raises(ArtifactError, match=r"packed is not packed against a base"):
        unpack_folder(tmp_path / "packed", tmp_path / "out", base=base_in(model))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_a_base_says_why(model: Path, tmp_path: Path) -> None:
    tuned = save_tuned(tmp_path / "tuned")
    wide = tiny_model("llama", dtype=torch.float32)
    wide.save_pretrained(tmp_path / "wide")
    kinds = r"BF16 \[\d+, \d+\] here, F32 \[\d+, \d+\] there; give the model that it was fine-tuned from"
    with pytest.raises(ArtifactError, match=rf"tuned shares with its base .*wide no dtype and shape .* is {kinds}"):
        pack_folder(tuned, tmp_path / "out", base=find_base(str(tmp_path / "wide")))
    save_pruned(tmp_path / "gpt", "gpt2")
    with pytest.raises(ArtifactError, match=r"tuned shares with its base .*gpt no name of a tensor; give"):
        pack_folder(tuned, tmp_path / "out", base=base_in(tmp_path / "gpt"))
    pack_folder(tuned, tmp_path / "packed", base=base_in(model))
    with pytest.raises(
        ArtifactError, match=r"base .*packed is packed against a base itself; restore it with compressx"
    ):
        find_base(str(tmp_path / "packed"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"base .*x\.gguf is a GGUF file, expected a model in safetensors"):
        find_base(str(tmp_path / "x.gguf"))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin is a pickle checkpoint"):
        find_base(str(model))
    with pytest.raises(ArtifactError, match=r"model path .*nowhere does not exist"):
        find_base(str(tmp_path / "nowhere"))
    assert not (tmp_path / "out").exists()


def test_the_exporter_packs_against_the_base_of_a_run_if_they_have_tensors_in_common(
    model: Path, tmp_path: Path
) -> None:
    tuned = save_tuned(tmp_path / "tuned")
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "wide")
    for base, name in ((model, "model"), (tmp_path / "wide", None), (None, None)):
        folder = tmp_path / f"exports-{base and base.name}"
        folder.mkdir()
        PackedExporter().export(FinishedModel(tuned, None, None, {}, base), folder)
        assert packed_sizes(folder).base == name
    pack_folder(tuned, tmp_path / "packed", base=base_in(model))
    assert contents(tmp_path / "exports-model") == contents(tmp_path / "packed")


def test_a_base_from_the_hub_is_called_by_its_id(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name-7b" / "snapshots" / "0123"
    shutil.copytree(model, snapshot)
    assert base_in(snapshot).name == "org/name-7b"
    assert base_in(model).name == "model"
