"""Weights in memory, or from disk one block at a time: those that transformers loads, read ahead and written behind."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.accelerator import pretended_accelerator
from tests.compressx.architectures import KINDS
from tests.compressx.causal import small_config
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from compressx.models import shards, streaming
from compressx.models.access import Access, InMemory, WriteBehind, block_file, device_for, weights_fingerprint
from compressx.models.architecture import architecture_of, find_blocks
from compressx.models.blockwise import StateFiles, each_block
from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.loading import load_model
from compressx.models.shards import OUTSIDE, checkpoint_tensors, find_shards
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, CompressxError, UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens


def saved(folder: Path, architecture: str, dtype: torch.dtype = torch.float32, shard: str = "200KB") -> Path:
    tiny_model(architecture, dtype=dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


CASES = [(name, torch.bfloat16, "auto") for name in (*KINDS, "falcon", "llama-tied")]
CASES += [("llama", torch.bfloat16, "float32"), ("mixtral", torch.float32, "auto"), ("gpt2", torch.float32, "float16")]


@pytest.mark.parametrize(("architecture", "stored", "wanted"), CASES, ids=str)
def test_each_block_gets_the_weights_that_transformers_loads_and_gives_back_what_its_checkpoint_holds(
    architecture, stored, wanted, tmp_path
):
    checkpoint = Checkpoint(str(saved(tmp_path, architecture, stored)), dtype=wanted)
    in_files = {name: x for file in tmp_path.glob("*.safetensors") for name, x in load_file(file).items()}
    loaded, streamed = load_model(checkpoint), open_streamed(checkpoint)
    expected, seen = loaded.state_dict(), set()
    for fqn in (OUTSIDE, *streamed.blocks):
        with streamed.materialise(fqn):
            found = streamed.tensors(fqn)
            assert all(t.dtype == expected[n].dtype and torch.equal(t, expected[n]) for n, t in found.items())
            others = [n for n in expected if n not in found]
            assert all(streamed.model.state_dict()[n].is_meta for n in others)
            written = checkpoint_tensors(streamed.model, found) if fqn != OUTSIDE else {}
        assert set(written) == set(streamed.source[fqn].members[fqn] if fqn != OUTSIDE else ())
        assert all(torch.equal(x, in_files[n]) for n, x in written.items() if wanted == "auto")
        seen |= set(found)
    assert seen == set(expected)
    assert all(p.is_meta for p in streamed.model.parameters())
    for name in {n for n, _ in loaded.named_buffers()} - set(expected):  # computed, such as rotary frequencies
        assert torch.equal(streamed.model.get_buffer(name), loaded.get_buffer(name))
        assert streamed.model.get_buffer(name).dtype == loaded.get_buffer(name).dtype


def test_what_transformers_keeps_in_float32_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    checkpoint = Checkpoint(str(saved(tmp_path, "llama")), dtype="bfloat16")
    expected, streamed = load_model(checkpoint).state_dict(), open_streamed(checkpoint)
    assert {t.dtype for t in expected.values()} == {torch.float32, torch.bfloat16}
    with streamed.materialise("model.layers.1"):
        assert all(t.dtype == expected[n].dtype for n, t in streamed.tensors("model.layers.1").items())


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_a_models_share_of_the_memory_is_that_of_its_process_within_its_container(architecture, tmp_path, monkeypatch):
    checkpoint = Checkpoint(str(saved(tmp_path / "model", architecture)))
    size = sum(p.numel() * 4 for p in tiny_model(architecture).parameters())  # one that is the head too counts once
    monkeypatch.setattr("compressx.runtime.machine._CGROUP", tmp_path)
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    (tmp_path / "memory.current").write_text("1100\n")
    for processes, free, limit, larger in (
        (1, 2 * size, "max", False), (1, 2 * size - 2, "max", True), (4, 8 * size, "max", False),
        (4, 8 * size - 4, "max", True), (1, 1 << 40, 2 * size + 1000, False), (1, 1 << 40, 2 * size + 900, True),
    ):  # fmt: skip
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert streaming.is_larger_than_memory(checkpoint, torch.device("cpu")) is larger


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


# --- damage


def test_a_tensor_that_nothing_reads_is_known_in_memory_and_streamed_alike(tmp_path: Path):
    saved(tmp_path, "llama", shard="1GB")
    path = tmp_path / "model.safetensors"
    more = {n: torch.ones(2) for n in ("model.layers.1.extra.weight", "mtp.fc", "model.layers.0.rotary_emb.inv_freq")}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    checkpoint = find_checkpoint(ModelSource(path=tmp_path))
    for model in (load_model(checkpoint), open_streamed(checkpoint).model):
        assert sorted(model.unread) == ["model.layers.1.extra.weight", "mtp.fc"]


def listed(change: Callable[[dict[str, str], list[str]], Any]) -> Callable[[Path], None]:
    """Return what changes the files in an index, given all of them, that of the last norm at the end."""

    def apply(folder: Path) -> None:
        content = json.loads((index := folder / "model.safetensors.index.json").read_text())
        files = content["weight_map"]
        change(files, sorted({*files.values()}, key=lambda file: file == files["model.norm.weight"]))
        index.write_text(json.dumps(content))

    return apply


def twice(folder: Path) -> None:
    last = max(folder.glob("model-*.safetensors"))
    held = load_file(last) | {"model.layers.0.mlp.up_proj.weight": torch.full((96, 64), 0.5)}
    save_file(held, last, metadata={"format": "pt"})


def single(folder: Path) -> None:
    save_file(tiny_model("llama", seed=1).state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "as_saved"),
    [
        (listed(lambda files, _: files.update({"model.layers.0.rotary_emb.inv_freq": files["lm_head.weight"]})), True),
        (listed(lambda files, others: files.update({"model.norm.weight": others[0]})), True),
        (listed(lambda files, _: files.pop("model.layers.2.mlp.up_proj.weight")), True),
        (listed(lambda files, all_: (files.clear(), files.update({f"x{i}": f for i, f in enumerate(all_)}))), True),
        (twice, False),
        (single, False),
    ],
    ids=["absent", "in another shard", "unlisted", "other names", "twice", "a single file beside"],
)
def test_the_headers_of_shards_decide_over_their_index_the_last_one_and_a_single_file_as_in_memory(
    change: Callable[[Path], None], as_saved: bool, tmp_path: Path
):
    change(saved(tmp_path, "llama"))
    checkpoint, whole = find_checkpoint(ModelSource(path=tmp_path)), tiny_model("llama").state_dict()
    expected, streamed = load_model(checkpoint).state_dict(), open_streamed(checkpoint)
    assert same(expected, whole) == as_saved
    for fqn in (OUTSIDE, *streamed.blocks):
        with streamed.materialise(fqn):
            found = streamed.tensors(fqn)
            assert same(found, {name: expected[name] for name in found})
    assert streamed.model.unread == ()


def without(name: str) -> Callable[[Path], None]:
    """Return what takes a tensor out of the file that has it."""

    def change(folder: Path) -> None:
        (file,) = [x for x in folder.glob("*.safetensors") if name in load_file(x)]
        save_file({n: x for n, x in load_file(file).items() if n != name}, file, metadata={"format": "pt"})

    return change


def truncated(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])


def wider(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 97}))


@pytest.mark.parametrize(
    ("change", "told"),
    [(truncated, r"model-.*safetensors is not a safetensors file, or it is truncated"),
     (without("model.layers.2.mlp.up_proj.weight"), r"lacks model\.layers\.2\.mlp\.up_proj\.weight"),
     (wider, "do not fit LlamaForCausalLM")],
)  # fmt: skip
def test_a_checkpoint_that_is_damaged_is_refused_when_the_block_is_loaded(change: Any, told: str, tmp_path: Path):
    saved(tmp_path, "llama")
    if change is not truncated:
        change(tmp_path)
    streamed = open_streamed(Checkpoint(str(tmp_path)))
    if change is truncated:
        change(tmp_path)
    with pytest.raises(ArtifactError, match=told):
        streamed.materialise("model.layers.2").__enter__()


def test_a_block_is_given_up_when_what_used_it_fails(tmp_path: Path):
    streamed = open_streamed(Checkpoint(str(saved(tmp_path, "llama"))))
    with pytest.raises(ZeroDivisionError), streamed.materialise("model.layers.1"):
        1 / 0  # noqa: B018
    assert all(p.is_meta for p in streamed.model.parameters())


def test_the_fingerprint_changes_with_any_weight_and_with_the_dtype():
    model = tiny_model("llama")
    prints = {
        weights_fingerprint(InMemory(model)),
        weights_fingerprint(InMemory(tiny_model("llama", dtype=torch.bfloat16))),
    }
    assert weights_fingerprint(InMemory(tiny_model("llama"))) in prints
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[5, 7] += 1e-3
    prints.add(weights_fingerprint(InMemory(model)))
    assert len(prints) == 3


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma3", "gpt2"])
def test_a_streamed_model_gives_the_fingerprint_and_the_logits_of_the_loaded_one(architecture: str, tmp_path: Path):
    tiny_model(architecture).save_pretrained(tmp_path)
    checkpoint = Checkpoint(str(tmp_path))
    streamed, loaded = open_streamed(checkpoint), InMemory(load_model(checkpoint))
    assert weights_fingerprint(streamed) == weights_fingerprint(loaded)
    batches = tiny_tokens(sequences=5).split(2)
    with torch.no_grad():
        expected = list(loaded.logits(batches))
        for got, want in zip(streamed.logits(batches), expected, strict=True):
            assert torch.equal(got, want)
        with streamed.whole() as model:
            assert torch.equal(model(batches[0], use_cache=False).logits, expected[0])


def test_hidden_states_of_an_evaluation_that_memory_cannot_hold_lie_in_files_until_it_is_over(tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    streamed = open_streamed(Checkpoint(str(tmp_path / "model")))
    batches = tiny_tokens(sequences=5).split(2)
    expected = list(streamed.logits(batches))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000))
    found = streamed.logits(batches)
    first = next(found)
    assert len(list((tmp_path / "scratch").rglob("*.states"))) == 3
    for got, want in zip([first, *found], expected, strict=True):
        assert torch.equal(got, want)
    assert not list((tmp_path / "scratch").iterdir())


def test_room_for_hidden_states_is_taken_up_before_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArtifactError, match=r"0\.states: No space left"):
        StateFiles(tmp_path)(torch.ones(3))


DEVICES: list[tuple[int, dict[str, str], str, str]] = [
    (0, {}, "auto", "cpu"), (2, {"LOCAL_RANK": "1"}, "auto", "cuda:1"), (2, {"LOCAL_RANK": "1"}, "cuda", "cuda:1"),
    (2, {"LOCAL_RANK": "2"}, "cpu", "cpu"), (2, {}, "cuda:1", "cuda:1"),
    (0, {}, "cuda", r"torch \S+ finds no CUDA GPU; use --device cpu"),
    (2, {"LOCAL_RANK": "2"}, "auto", "process 2 of this machine needs its own GPU, but torch finds 2; "),
    (2, {}, "cuda:2", "torch finds 2, cuda:0 to cuda:1; choose one of them"),
    (2, {"LOCAL_WORLD_SIZE": "2"}, "cuda:1", "every process needs its own GPU; use --device cuda"),
    (0, {}, "mps", "sums in float64, which Apple GPUs lack; use --device cpu"),
    (0, {}, "gpu", "unknown; expected auto, cpu, cuda or cuda:N"),
    (0, {}, "meta", "compressx runs on cpu and cuda only"),
]  # fmt: skip
"""Number of GPUs, environment, what is asked for, and the device or why there is none."""


@pytest.mark.parametrize(("count", "environment", "wanted", "expected"), DEVICES)
def test_each_process_gets_a_device_of_its_own_or_is_told_what_it_can_have(
    count: int, environment: dict[str, str], wanted: str, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if expected.startswith(("cpu", "cuda")):
        assert device_for(wanted) == torch.device(expected)
        return
    with pytest.raises(CompressxError, match=f"^device .*: .*{expected}"):
        device_for(wanted)


@pytest.fixture
def streamed(tmp_path: Path) -> StreamedModel:
    return open_streamed(Checkpoint(str(saved(tmp_path / "model", "llama"))))


def visited(model: StreamedModel, names: list[str] | None = None) -> list[str]:
    found = architecture_of(model.model)
    return [block.fqn for block, _ in each_block(model, found, {fqn: [] for fqn in model.blocks}, names)]


def test_the_bytes_of_the_next_block_are_read_in_several_reads_while_the_one_before_is_worked_on(streamed, monkeypatch):
    done, read = list[list[bytes]](), streaming._read

    def reading(places: list[tuple[Path, int, int]]) -> None:
        read(places)
        done.append(sorted(path.read_bytes()[start:end] for path, start, end in places))

    monkeypatch.setattr(streaming, "_CHUNK", 1000)
    monkeypatch.setattr(streaming, "_read", reading)
    assert visited(streamed) == [*streamed.blocks]
    for fqn, found in zip([*streamed.blocks][1:], done, strict=True):
        with streamed.materialise(fqn) as block:
            assert found == sorted(x.numpy().tobytes() for x in block.state_dict().values())


def test_a_block_that_is_most_of_the_free_memory_is_not_read_ahead(streamed, monkeypatch):
    begun: list[Any] = []
    monkeypatch.setattr(streaming, "_read", begun.append)
    size = 4 * sum(p.numel() for p in next(iter(streamed.blocks.values())).parameters())
    monkeypatch.setattr(streaming, "free_memory", lambda *_: 2 * size - 2)
    visited(streamed)
    assert not begun
    monkeypatch.setattr(streaming, "free_memory", lambda *_: 2 * size)
    visited(streamed)
    assert len(begun) == 2


FIRST, SECOND, THIRD = (f"model.layers.{i}" for i in range(3))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Hold back every writing of weights until this is set."""
    opened, write = Event(), shards.write_tensors

    def wait(path: Path, tensors: Any) -> None:
        assert opened.wait(30), "nobody has opened the gate"
        write(path, tensors)

    monkeypatch.setattr(shards, "write_tensors", wait)
    yield opened
    opened.set()
    for thread in writers():
        thread.join()


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("write ")]


def doubled(access: Access, fqn: str, folder: Path) -> dict[str, Tensor]:
    """Double a block's weights and write them; return what was written."""
    with access.materialise(fqn) as block:
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.mul_(2)
        access.write(fqn, folder)
        return {name: tensor.clone() for name, tensor in block.state_dict(prefix=f"{fqn}.").items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("memory", [False, True], ids=["streamed", "in memory"])
def test_a_block_is_written_while_the_next_one_is_loaded(memory, streamed, gate, tmp_path):
    access: Access = InMemory(tiny_model("llama")) if memory else streamed
    wanted = doubled(access, FIRST, tmp_path)
    with access.materialise(SECOND) as block:
        assert not any(p.is_meta for p in block.parameters())
        assert not block_file(tmp_path, FIRST).exists()
    gate.set()
    access.written()
    assert same(load_file(block_file(tmp_path, FIRST)), wanted)
    assert not writers()


@pytest.mark.parametrize("how", ["materialise", "read", "save"])
def test_whoever_needs_a_block_that_is_being_written_waits_for_it(how, streamed, gate, tmp_path):
    wanted = doubled(streamed, FIRST, tmp_path)
    Timer(0.2, gate.set).start()
    if how == "read":
        streamed.read(FIRST, tmp_path)
    elif how == "save":
        streamed.save(None, tmp_path, tmp_path / "saved")
        file = next((tmp_path / "saved").glob("model-00001-*.safetensors"))
        assert same(load_file(file), wanted)
        return
    with streamed.materialise(FIRST) as block:
        assert same(block.state_dict(prefix=f"{FIRST}."), wanted)


def test_the_blocks_that_no_pruner_changed_are_saved_as_they_were(streamed, tmp_path):
    before = {}
    for fqn in (SECOND, THIRD):
        with streamed.materialise(fqn) as block:
            before |= {name: tensor.clone() for name, tensor in block.state_dict(prefix=f"{fqn}.").items()}
    before |= doubled(streamed, FIRST, tmp_path / "blocks")
    streamed.save(None, tmp_path / "blocks", tmp_path / "saved")
    found = open_streamed(Checkpoint(str(tmp_path / "saved")))
    for fqn in found.blocks:
        with found.materialise(fqn) as block:
            tensors = block.state_dict(prefix=f"{fqn}.")
            assert same(tensors, {name: before[name] for name in tensors})
    assert not writers()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full, but only when the file has been begun."""

    def failing(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", failing)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("how", ["next block", "written", "write", "read"])
def test_a_full_disk_is_told_with_the_blocks_name_when_the_next_one_is_begun(how, streamed, tmp_path):
    doubled(streamed, FIRST, tmp_path / "blocks")
    for thread in writers():
        thread.join()
    told = rf"cannot write .*{FIRST}\.safetensors: No space left on device"
    asking: dict[str, Callable[[], Any]] = {
        "next block": lambda: streamed.materialise(SECOND).__enter__(),
        "written": streamed.written,
        "write": lambda: streamed.write(SECOND, tmp_path / "blocks"),
        "read": lambda: streamed.read(THIRD, tmp_path / "blocks"),
    }
    for _ in range(2):  # the file is missing whenever it is asked for
        with pytest.raises(ArtifactError, match=told):
            asking[how]()
    assert not [*(tmp_path / "blocks").iterdir()]
    assert streamed.source[FIRST].folder == tmp_path / "model", "what could not be written is not read"


def test_an_error_elsewhere_waits_for_the_writing_and_is_the_one_that_is_told(gate, tmp_path):
    behind, path = WriteBehind(), tmp_path / "block.safetensors"

    def interrupted() -> None:
        with behind.ended():
            behind.begin("block", path, lambda: {"weight": torch.ones(3)})
            Timer(0.2, gate.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not writers()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_weights_on_an_accelerator_are_copied_before_they_can_change(gate, tmp_path):
    with pretended_accelerator():
        access = InMemory(tiny_model("llama").to("cuda"))
        wanted = {name: tensor.cpu() for name, tensor in doubled(access, FIRST, tmp_path).items()}
        with torch.no_grad():
            for parameter in access.model.parameters():
                parameter.zero_()
        gate.set()
        access.written()
    assert same(load_file(block_file(tmp_path, FIRST)), wanted)


def test_what_is_outside_the_blocks_is_written_behind_and_read_back(gate, tmp_path):
    access = InMemory(tiny_model("llama-tied"))
    before = access.model.lm_head.weight.clone()
    access.write(OUTSIDE, tmp_path)
    Timer(0.2, gate.set).start()
    access.read(OUTSIDE, tmp_path)
    assert torch.equal(access.model.lm_head.weight, before)
    assert access.model.lm_head.weight is access.model.get_input_embeddings().weight


@pytest.mark.slow
def test_blocks_that_share_weights_still_do_after_they_were_read_from_finished_ones_and_are_not_streamed(
    tmp_path: Path,
):
    """Zamba's blocks 1 and 3 have one transformer."""
    model = AutoModelForCausalLM.from_config(small_config("zamba2"))
    access = InMemory(model)
    for fqn in find_blocks(model):
        access.write(fqn, tmp_path)
    access.written()
    for fqn in find_blocks(model):
        access.read(fqn, tmp_path)
    access.save(None, tmp_path, tmp_path / "model")
    names = load_file(tmp_path / "model" / "model.safetensors")
    assert not any("layers.3.shared" in name for name in names)
    with pytest.raises(UnsupportedModelError, match=r"cannot be streamed: its blocks share weights, model\.layers\.3"):
        open_streamed(Checkpoint(str(tmp_path / "model")))
