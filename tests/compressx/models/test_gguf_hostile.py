"""GGUF files of strangers: whatever stands in their headers, a right result or one line that says what is wrong."""

from __future__ import annotations

import itertools
import math
import os
import struct
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFReader, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.compressx import gguf_files
from tests.compressx.gguf_files import BLOCKS, LICENSE, write_gguf

from compressx.models import gguf_header
from compressx.models.checkpoint import Checkpoint, find_checkpoint, license_of
from compressx.models.gguf_header import GgufHeader
from compressx.models.loading import load_model, load_skeleton, load_tokenizer
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, CompressxError

UNREAD = {"llama.logit_softcap": 30.0, "llama.gated": True}


def written(folder: Path, **changes: Any) -> Checkpoint:
    return find_checkpoint(ModelSource(path=write_gguf(folder / "tiny.gguf", **changes)))


def refused(read: Callable[[Any], object], what: Any) -> bool:
    """Return whether what is read is refused, in one line that can be printed; any other exception is raised."""
    said = ""
    try:
        read(what)
    except CompressxError as error:
        said = str(error)
    assert said.isprintable(), repr(said)
    return said != ""


def read_all(path: Path) -> set[str]:
    """Read a file in every way there is; returns those that refuse it."""
    checkpoint = Checkpoint(str(path.parent), path)
    ways = {"skeleton": load_skeleton, "tokenizer": load_tokenizer, "model": load_model, "license": license_of}
    found = {name for name, way in ways.items() if refused(way, checkpoint)}
    return found | ({"header"} if refused(header_of, path) else set())


def header_of(path: Path) -> Any:
    """Read a header in its two forms."""
    return GgufHeader.of(path).as_llama


def llama_3(factor: float, count: int, base: float = 10000.0) -> list[float]:
    """Return the factors of frequencies that llama.cpp writes for Llama 3.1, by the formula of its converter."""
    factors = []
    for i in range(count):
        length = 2 * math.pi * base ** (i / count)
        smooth = (8192 / length - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if length < 8192 / 4 else factor if length > 8192 else between)
    assert len({*factors}) == 3
    return factors


LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"keys": LINEAR}, {"rope_type": "linear", "factor": 4.0}),
        ({"keys": {"llama.rope.scale_linear": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"tensors": {"rope_freqs.weight": llama_3(8.0, 8)}},
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        ({"tensors": {"rope_freqs.weight": [1.0] * 8}, "keys": {"llama.rope.scaling.type": "none"}}, None),
    ],
    ids=["linear", "linear, as older files have it", "Llama 3", "none"],
)  # fmt: skip
def test_a_file_with_scaled_positions_computes_what_transformers_does_with_them(changes, scaling, tmp_path):
    from transformers import AutoModelForCausalLM

    plain = load_model(written(tmp_path))
    model = load_model(written(tmp_path, **changes))
    config = plain.config
    if scaling is not None:
        config.rope_parameters = {**config.rope_parameters, **scaling}
    expected = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    expected.load_state_dict(plain.state_dict())
    ids = torch.arange(100)[None] % 30
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, expected(ids).logits)
        assert torch.equal(logits, plain(ids).logits) == (scaling is None)
    assert model.unread == ()
    model.save_pretrained(tmp_path / "saved")  # and it is still there
    with torch.no_grad():
        assert torch.equal(load_model(Checkpoint(str(tmp_path / "saved")))(ids).logits, logits)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"keys": {**LINEAR, "llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type \(yarn\) scales"),
        ({"keys": {"llama.rope.scaling.attn_factor": 1.25}}, r"llama\.rope\.scaling\.attn_factor \(1\.25\) scales"),
        ({"tensors": {"rope_factors_long.weight": [2.0] * 8}}, r"rope_factors_long\.weight \(a tensor\) scales"),
        ({"tensors": {"rope_freqs.weight": [1.0] * 4 + [8.0] * 4}}, r"rope_freqs\.weight \(a tensor\) scales"),
        ({"tensors": {"rope_freqs.weight": [2.0] * 5}}, "The size of tensor a .8. must match the size of tensor b .5."),
        (
            {"tensors": {"rope_freqs.weight": llama_3(8.0, 8)}, "keys": LINEAR},
            r"rope_freqs\.weight \(a tensor\) scales",
        ),
        # One part of several, and what is no language model.
        ({"keys": {"split.count": 2}}, "split.count is 2, this is one part of 2; join them with llama-gguf-split --m"),
        ({"keys": {"split.count": "many"}}, "split.count is 'many', this is one part of"),
        ({"keys": {"split.tensors.count": 40}}, r"split.tensors.count is 40, but the file has \d+; it is damaged"),
        ({"keys": {"llama.block_count": BLOCKS + 1}}, f"block_count is {BLOCKS + 1}, but the file has {BLOCKS};"),
        ({"keys": {"llama.block_count": BLOCKS - 1}}, f"block_count is {BLOCKS - 1}, but the file has {BLOCKS};"),
        ({"keys": {"llama.block_count": "2"}}, "llama.block_count is '2', but the file has 2"),
        ({"keys": {"general.type": "adapter"}}, "no language model: general.type is 'adapter'"),
        ({"keys": {"general.type": "mmproj", "general.architecture": "clip"}}, "general.type is 'mmproj'"),
        ({"keys": {"general.architecture": "clip"}}, "no language model: .* general.architecture 'clip'"),
        ({"keys": {"general.type": "imatrix", "general.architecture": None}}, "general.type is 'imatrix'"),
        ({"keys": {"general.architecture": None}}, "general.architecture is None"),
        ({"keys": {"general.architecture": 7}}, "general.architecture is 7"),
        ({"keys": {"general.architecture": "lla\x1b[2Jma"}}, r"general.architecture is 'lla\\x1b\[2Jma'"),
        ({"tensors": {"blk.0.\x1b[31merror: x": [1.0]}}, r"names such as \['blk\.0\.\\x1b\[31merror: x'\]"),
        ({"keys": {"llama.a\nb": 1}}, r"names such as \['llama\.a\\nb'\]"),
        # Numbers that would be allocated.
        ({"keys": {"llama.embedding_length": 2**20}}, r"is of \d{13} numbers by its metadata, but has \d+; download"),
        ({"keys": {"llama.feed_forward_length": 2**30}}, r"is of \d+ numbers by its metadata, but has"),
        ({"keys": {"llama.vocab_size": 2**30}}, r"is of \d+ numbers by its metadata, but has"),
        ({"keys": {"llama.embedding_length": -64}}, "cannot load .*invalid|cannot load .*negative"),
        ({"keys": {"llama.attention.head_count": 0}}, "cannot load .*zero"),
        ({"keys": {"llama.attention.head_count": [4, 4]}}, "cannot load "),
        ({"keys": {"llama.rope.freq_base": "x"}}, "cannot load "),
    ],
)
def test_what_is_not_the_whole_of_a_model_that_can_be_read_is_refused_before_its_weights(changes, told, tmp_path):
    checkpoint = written(tmp_path, **changes)
    with pytest.raises(CompressxError, match=told) as error:
        load_model(checkpoint)
    assert "tiny.gguf" in str(error.value)
    assert str(error.value).isprintable()


def test_a_key_that_nobody_knows_is_named_and_a_tensor_that_nothing_reads_refused(tmp_path):
    keys = {**UNREAD, "llama.attention.key_length": 16, "llama.gates": [1, 2], "llama.expert_weights_scale": 0.0}
    assert sorted(load_model(written(tmp_path, keys=keys)).unread) == sorted([*UNREAD, "llama.gates"])
    for name in ("blk.1.attn_gate.weight", "blk.0.attn_q.bias", "output.bias"):
        with pytest.raises(CompressxError, match=f"tensor {name} has no place in LlamaForC|lacks blk.0.attn_k.bias"):
            load_skeleton(written(tmp_path, tensors={name: np.ones(64)}))


def test_a_run_names_what_nothing_reads_once_in_its_log_and_its_report(project):
    from compressx.pipeline.run import run

    checkpoint = written(project, keys={**UNREAD, "llama.gates": [1, 2], "llama.gate_kind": "x"})
    rules = [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}]
    report = run({"model": {"path": str(checkpoint.file)}, "prune": rules, "output": "out"})
    assert {*report.unread} == {*UNREAD, "llama.gates", "llama.gate_kind"}
    log, shown = (Path("out", name).read_text() for name in ("run.log", "report.md"))
    (line,) = [line for line in log.splitlines() if "nothing reads" in line]
    assert "WARNING nothing reads llama." in line
    assert ", nor 1 others; report.json names all" in line
    assert all(shown.count(f"| {name} |") == 1 for name in report.unread)


def test_the_weights_are_those_of_the_file_and_not_of_its_namesake_in_the_working_directory(tmp_path, monkeypatch):
    checkpoint = written(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    write_gguf(tmp_path / "elsewhere" / "tiny.gguf", seed=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    down = next(x for x in GGUFReader(checkpoint.file).tensors if x.name == "blk.1.ffn_down.weight")
    stored = torch.from_numpy(quants.dequantize(down.data, down.tensor_type).copy())
    assert torch.equal(load_model(checkpoint).model.layers[1].mlp.down_proj.weight, stored)


@pytest.mark.parametrize("longer", [0, 1])
def test_the_license_of_a_file_is_known_without_a_load_and_after_another_took_its_place(longer, tmp_path):
    checkpoint = written(tmp_path)
    assert license_of(checkpoint) == {"license": LICENSE}
    data = checkpoint.file.read_bytes().replace(LICENSE.encode(), b"mit-license"[: len(LICENSE)]) + bytes(longer)
    checkpoint.file.write_bytes(data)
    os.utime(checkpoint.file, ns=(10**18, 10**18 + longer))
    assert GgufHeader.of(checkpoint.file).values["general.license"] == "mit-licens"


# --- bytes


def header() -> tuple[bytes, int, list[str]]:
    """Return a file, where its tensors begin, and its keys."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "tiny.gguf")
        reader = GGUFReader(path)
        return path.read_bytes(), int(reader.data_offset), [key for key in reader.fields if not key.startswith("GGUF.")]


WHOLE, HEAD, KEYS = header()
TIMES = itertools.count(10**18, 10**9)
CHANGES = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, HEAD - 1), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(0, len(WHOLE) - 1), st.just(0)),
    st.tuples(
        st.just("count"), st.integers(0, HEAD - 8), st.sampled_from([0, 1, 2**31, 2**32, 2**60, 2**62, 2**64 - 1])
    ),
    st.tuples(st.just("byte"), st.integers(0, HEAD - 1), st.integers(0, 255)),
)


def damaged(changes: list[tuple[str, int, int]]) -> bytes:
    data = bytearray(WHOLE)
    for kind, place, value in changes:
        if kind == "cut":
            data = data[:place]
        elif place + 8 <= len(data):
            data[place : place + 8] = {
                "flip": bytes([data[place] ^ (1 << (value % 8))]) + data[place + 1 : place + 8],
                "count": struct.pack("<Q", value),
                "byte": bytes([value % 256]) + data[place + 1 : place + 8],
            }[kind]
    return bytes(data)


def made_by_hand(kind: int, value: bytes, tensors: int = 1) -> bytes:
    """Return a file with one key, `a`, and no tensor but those that it claims."""
    return b"GGUF" + struct.pack("<IQQQ", 3, tensors, 1, 1) + b"a" + struct.pack("<I", kind) + value


CLAIMS = {
    "array": made_by_hand(9, struct.pack("<IQ", 0, 2**62)),
    "longer array": made_by_hand(9, struct.pack("<IQ", 0, 2**62) + bytes(1000)),
    "nested": made_by_hand(9, struct.pack("<IQ", 9, 1) * 3000),
    "string": made_by_hand(8, struct.pack("<Q", 2**63) + b"x"),
    "tensors": made_by_hand(0, b"1", tensors=2**60),
    "dimensions": made_by_hand(0, b"1" + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**31)),
    "shape": made_by_hand(0, b"1" + struct.pack("<Q", 1) + b"t" + struct.pack("<I2QIQ", 2, 2**32, 2**32, 0, 0)),
    "offset": made_by_hand(
        0, b"1" + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 1, 0, 2**64 - 8) + bytes(99)
    ),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "empty": b"",
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_count_that_the_file_cannot_hold_is_refused_at_once(claim, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CLAIMS[claim])
    before = time.process_time()
    with pytest.raises(ArtifactError, match=r"tiny\.gguf") as error:
        header_of(at_a_new_time(path))
    assert str(error.value).isprintable()
    assert time.process_time() - before < 2


def at_a_new_time(path: Path) -> Path:
    """Headers are kept by the file's name, time and size."""
    os.utime(path, ns=(next(TIMES),) * 2)
    return path


def test_a_header_is_read_no_further_than_any_vocabulary_goes_and_in_one_byte_order(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_header, "_MOST_READS", 100)
    with pytest.raises(ArtifactError, match=r"tiny\.gguf is not a GGUF file"):
        header_of(at_a_new_time(path))
    monkeypatch.undo()
    monkeypatch.setattr(gguf_files, "GGUFWriter", partial(GGUFWriter, endianess=GGUFEndian.BIG))
    with pytest.raises(ArtifactError, match=r"tiny\.gguf: its numbers are in the other byte order"):
        header_of(write_gguf(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(CHANGES, min_size=1, max_size=3))
def test_a_damaged_file_is_read_or_refused_in_one_line(changes, thorough, tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(damaged(changes))
    at_a_new_time(path)
    refused(header_of, path)
    if thorough:
        refusing = read_all(path)
        assert "header" not in refusing or {"skeleton", "tokenizer", "model"} <= refusing


SCALARS = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.integers(-2, 9), st.floats(width=32), st.booleans(), st.text(max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=4), st.none(),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*KEYS, "general.alignment", "general.type", "llama.rope.scaling.factor"]), value=SCALARS)
def test_a_value_of_any_kind_is_read_or_refused_in_one_line(key, value, tmp_path):
    assert read_all(at_a_new_time(write_gguf(tmp_path / "tiny.gguf", keys={key: value}))) != {"license"}
