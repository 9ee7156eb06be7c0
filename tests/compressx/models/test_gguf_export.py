"""GGUF files of pruned models: what they hold, and that llama.cpp computes with them what transformers does."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compressx.gguf_files import ARCHITECTURES, tiny_byte_tokenizer, tiny_of, write_like
from tests.compressx.llama_cpp import PROMPT, agrees, log_probabilities
from tests.conftest import SMOLLM2

from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.gguf_described import described
from compressx.models.gguf_export import (
    FEWER_HEADS,
    KINDS,
    OWN_WIDTHS,
    GgufOptions,
    export_gguf,
    stored_type,
    template_of,
)
from compressx.models.gguf_header import GgufHeader
from compressx.models.gguf_tokenizer import tokenizer_metadata
from compressx.models.loading import load_model
from compressx.models.streaming import open_streamed
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, CompressxError
from compressx.testing.models import tiny_model


def test_the_type_of_a_file_may_be_written_in_any_case() -> None:
    assert [GgufOptions(type=kind).type for kind in ("q4_0", "Bf16", "F16")] == ["Q4_0", "BF16", "F16"]
    with pytest.raises(ValueError, match=r"'Q4_K_M' is none of F16, BF16.*llama-quantize FILE Q4_K_M"):
        GgufOptions(type="q4_k_m")


def test_norms_and_routers_stay_in_float_and_the_output_matrix_in_eight_bits():
    assert stored_type("blk.0.attn_norm.weight", (64,), "Q4_0", tied=True) == "F32"
    assert stored_type("blk.0.ffn_gate_inp.weight", (4, 64), "F16", tied=True) == "F32"
    assert stored_type("blk.0.ffn_up.weight", (96, 64), "Q4_0", tied=True) == "Q4_0"
    assert stored_type("blk.0.ffn_down.weight", (64, 1126), "Q4_0", tied=True) == "F16"
    assert stored_type("blk.0.ffn_down.weight", (64, 1126), "BF16", tied=True) == "BF16"
    assert stored_type("token_embd.weight", (128, 64), "Q4_1", tied=True) == "Q8_0"
    assert stored_type("token_embd.weight", (128, 64), "Q4_1", tied=False) == "Q4_1"
    assert stored_type("output.weight", (128, 64), "Q5_0", tied=False) == "Q8_0"


def like_of(folder: Path, model: Any, architecture: str, **keys: Any) -> Path:
    path = folder / f"like-{architecture}.gguf"
    return write_like(path, model, architecture, keys)


def exported(folder: Path, model: Any, architecture: str, kind: str = "F16", *, like: bool = True) -> tuple[Path, str]:
    """Write a model by the file of a converter, or by its own config and a tokenizer."""
    path = folder / "written.gguf"
    if not like:
        own = tokenizer_metadata(tiny_byte_tokenizer(), model.config.vocab_size)
        with described(model) as template:
            return path, export_gguf(InMemory(model), template, kind, path, own)
    return path, export_gguf(InMemory(model), template_of(like_of(folder, model, architecture)), kind, path)


def read(path: Path) -> Any:
    return load_model(Checkpoint(str(path.parent), path))


BOTH = pytest.mark.parametrize("like", [True, False], ids=["like a file", "of its config"])


@BOTH
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llama_cpp_computes_what_transformers_does_which_reads_every_weight_as_it_was(
    architecture: str, like: bool, tmp_path: Path
):
    model = tiny_of(architecture, seed=1)  # of seed 0 a router of qwen3moe has two experts that are all but equal
    path, told = exported(tmp_path, model, architecture, like=like)
    assert told.startswith(f"{architecture}, 3 blocks")
    assert agrees(model, path)
    found = read(path).state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], x) for name, x in model.state_dict().items())


CUTS: Mapping[str, tuple[list[tuple[int, range, tuple[int, ...]]], str]] = {
    "three dead neurons": ([(0, range(3), ())], "3 blocks, 96 neurons, 2 key/value groups"),
    "one width": ([(i, range(10 * i, 32 + 10 * i), (1,)) for i in range(3)],
                  "3 blocks, 64 neurons, 1 key/value groups"),
    "own widths": ([(0, range(64), ()), (1, range(5, 40), (1,))],
                   "deci, 3 blocks, 32 to 96 neurons, 1 to 2 key/value groups"),
    "no attention": ([(1, range(0), (0, 1))], "deci, 3 blocks, 96 neurons, 0 to 2 key/value groups"),
    "no attention in the first": ([(0, range(0), (0, 1))], "deci, 3 blocks, 96 neurons, 1 to 2 key/value groups"),
    "no feed-forward": ([(1, range(96), ())], "deci, 3 blocks, 32 to 96 neurons, 2 key/value groups"),
    "no block": ([(1, range(96), (0, 1))], "2 blocks, 96 neurons, 2 key/value groups"),
    "the second for a first": ([(0, range(96), (0, 1)), (1, range(30), (0, 1))],
                               "deci, 2 blocks, 96 neurons, 1 to 2 key/value groups"),
}  # fmt: skip
"""Neurons and key/value groups that are zeroed in blocks, and what is written then."""


def zero(model: Any, block: int, neurons: Sequence[int], groups: Sequence[int]) -> None:
    layer, of_group = model.model.layers[block], 32
    with torch.no_grad():
        layer.mlp.down_proj.weight[:, [*neurons]] = 0
        for group in groups:
            layer.self_attn.o_proj.weight[:, group * of_group : (group + 1) * of_group] = 0


@BOTH
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_units_that_are_zeros_are_not_written_and_the_file_is_read_as_the_model_that_it_is(
    architecture: str, cut: str, like: bool, tmp_path: Path
):
    model, (zeroed, expected) = tiny_of(architecture), CUTS[cut]
    for block, neurons, groups in zeroed:
        zero(model, block, neurons, groups)
    path, told = exported(tmp_path, model, architecture, like=like)
    if architecture == "qwen2" and cut == "one width":  # whose query matrix is square in llama.cpp
        expected = f"deci, {expected}"
    assert told.endswith(expected)
    assert told.startswith("deci" if "deci" in expected else architecture)
    assert agrees(model, path)
    if "deci" not in expected:
        return
    back, ids, again = read(path), torch.tensor([PROMPT]), tmp_path / "again.gguf"
    assert back.config.model_type == architecture
    with torch.no_grad():
        assert torch.allclose(back(ids).logits, model(ids).logits, atol=1e-4)
    export_gguf(InMemory(back), template_of(path), "F16", again)
    files = [GgufHeader.of(x) for x in (again, path)]
    assert files[0].shapes == files[1].shapes
    assert all(np.array_equal(x, files[1].arrays[name]) for name, x in files[0].arrays.items())


@pytest.mark.parametrize(("family", "neurons"), [("gpt2", "224 neurons"), ("phi3", "64 neurons"), ("lfm2", None)])
def test_neurons_of_zeros_are_left_out_of_other_families_unless_each_block_has_numbers(
    family: str, neurons: str | None, tmp_path: Path
):
    model = tiny_of(family)
    found = architecture_of(model)
    for name, linear in found.linears.items():
        if name.rpartition(".")[2] in {"c_proj", "down_proj", "w2"} and ".attn." not in name:
            linear.held[:, :40] = 0
    path, told = exported(tmp_path, model, family)
    assert told == ", ".join(filter(None, [family, "3 blocks", neurons]))
    assert agrees(model, path)


def test_blocks_of_one_width_get_that_of_the_widest_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = tiny_of("gemma2")
    zero(model, 0, range(40), (1,))
    zero(model, 1, range(64), ())
    zero(model, 2, range(64), (0,))
    path, told = exported(tmp_path, model, "gemma2")
    assert told == "gemma2, 3 blocks, 64 neurons, 2 key/value groups"
    assert "all get that of the widest: 64 neurons, 2 kv-groups" in caplog.text
    assert agrees(model, path)
    zero(model, 0, range(96), (0, 1))  # without the first, the others would have another kind of attention
    assert exported(tmp_path, model, "gemma2")[1].startswith("gemma2, 3 blocks")
    assert agrees(model, path)


def test_a_bias_of_attention_keeps_it(tmp_path: Path):
    model = tiny_of("llama")
    config = type(model.config)(**{**model.config.to_dict(), "attention_bias": True})
    biased = type(model)(config).eval()
    biased.load_state_dict({**biased.state_dict(), **model.state_dict()})
    biased.model.layers[1].self_attn.o_proj.bias.data.fill_(0.5)
    zero(biased, 1, range(96), (0, 1))
    path, told = exported(tmp_path, biased, "llama")
    assert told == "deci, 3 blocks, 32 to 96 neurons, 1 to 2 key/value groups"
    assert agrees(biased, path)


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_is_read_back_as_close_as_its_bits_allow(kind: str, tmp_path: Path):
    model = tiny_of("llama")
    path, _ = exported(tmp_path, model, "llama", kind)
    back, steps = (
        read(path).state_dict(),
        {"F16": 2**11, "BF16": 2**8, "Q8_0": 127}.get(kind, 15 if "4" in kind else 31),
    )
    for name, x in model.state_dict().items():
        room = 2 * float(x.abs().max()) / (127 if kind[0] == "Q" and name == "lm_head.weight" else steps)
        assert float((back[name] - x).abs().max()) <= room
    tokens, _ = log_probabilities(path, PROMPT, 128)
    assert len(tokens) == 32


@BOTH
@pytest.mark.parametrize("tied", [False, True])
def test_a_streamed_model_gives_the_same_file(tied: bool, like: bool, tmp_path: Path):
    model = tiny_of("llama")
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    zero(model, 0, range(64), (1,))
    model.save_pretrained(tmp_path / "model")
    own = tokenizer_metadata(tiny_byte_tokenizer(), 128)
    for access, name in ((InMemory(model), "memory"), (open_streamed(Checkpoint(str(tmp_path / "model"))), "streamed")):
        path = tmp_path / f"{name}.gguf"
        if like:
            export_gguf(access, template_of(like_of(tmp_path, model, "llama")), "Q8_0", path)
        else:
            with described(access.model) as template:
                export_gguf(access, template, "Q8_0", path, own)
    assert (tmp_path / "memory.gguf").read_bytes() == (tmp_path / "streamed.gguf").read_bytes()
    assert ("output.weight" in GgufHeader.of(tmp_path / "memory.gguf").shapes) != tied


def test_metadata_and_tokenizer_are_the_like_files(tmp_path: Path):
    model = tiny_of("llama")
    keys = {"general.alignment": 64, "general.file_type": 0, "general.license": 7}
    zero(model, 1, range(96), (0, 1))
    like = like_of(tmp_path, model, "llama", **keys)
    export_gguf(InMemory(model), template_of(like), "Q4_0", tmp_path / "x.gguf")
    found, given = (gguf.GGUFReader(path).fields for path in (tmp_path / "x.gguf", like))
    changed = {"general.alignment", "general.file_type", "general.quantization_version", "llama.block_count"}
    assert {*found} ^ {*given} == {"general.alignment", "general.quantization_version"}
    assert found["llama.block_count"].contents() == 2
    assert found["general.file_type"].contents() == 2
    same = [key for key in {*found} & {*given} - changed if not key.startswith("GGUF.")]
    assert all(found[key].contents() == given[key].contents() for key in same)
    assert "tokenizer.ggml.tokens" in same


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"vocab_size": 64}, "vocab_size is 128, and 64"),
        ({"hidden_size": 128, "head_dim": 16}, "hidden_size is 64, and 128"),
        ({"head_dim": 32}, "head size is 16, and 32"),
        ({"num_hidden_layers": 4}, "its number of blocks is 3, and 4 in the one to export"),
        ({"rope_theta": 5e5}, "rope_parameters is"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is"),
        ({"attention_bias": True}, "computes llama with attention_bias False, and the model to export has True"),
        ({"tie_word_embeddings": False, "intermediate_size": 128}, r"ffn_gate.weight is \[96, 64\], and \[128, 64\]"),
        ({"like": "qwen2"}, "its model_type is 'qwen2', and 'llama'"),
        ({"like": "phi3", "num_key_value_heads": 1}, "num_key_value_heads is 1 in the model and 2 in .*phi3"),
        ({"like": "phi3", "num_key_value_heads": 4}, "num_key_value_heads is 4 in the model and 2 in .*phi3"),
    ],
)
def test_the_like_file_of_another_model_is_refused_in_one_line(changed: dict[str, Any], expected: str, tmp_path: Path):
    kind = changed.pop("like", "llama")
    like = like_of(tmp_path, tiny_of(kind), kind)
    if "rope_theta" in changed:
        changed = {"rope_parameters": {"rope_type": "default", **changed}}
    other = tiny_of("phi3" if kind == "phi3" else "llama", **changed)
    with pytest.raises(CompressxError, match=expected) as told:
        export_gguf(InMemory(other), template_of(like), "F16", tmp_path / "x.gguf")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "x.gguf").exists()


@pytest.fixture(scope="module")
def own_widths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file of `deci`, and its bytes."""
    zero(model := tiny_of("llama"), 0, range(64), (1,))
    path, _ = exported(tmp_path_factory.mktemp("own"), model, "llama")
    return path, path.read_bytes()


@settings(max_examples=60)
@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=2))
def test_a_damaged_file_of_own_widths_is_refused_or_read_and_nothing_else(
    changes: list[tuple[float, int]], own_widths: tuple[Path, bytes]
):
    path, whole = own_widths
    data = bytearray(whole)
    for place, value in changes:
        data[int(place * (data.find(b"blk.2.ffn_norm") + 60))] = value
    path.write_bytes(data)
    os.utime(path, ns=(next(_TIMES),) * 2)  # a header is kept by the file's time and size
    with contextlib.suppress(CompressxError):
        read(path)


_TIMES = itertools.count(10**18, 10**9)


@pytest.mark.parametrize("value", [1e6, -1e6])
def test_values_that_float16_cannot_hold_are_refused(value: float, tmp_path: Path):
    model = tiny_of("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
    with pytest.raises(ArtifactError, match=r"layers.1.mlp.up_proj.weight has values beyond 65504, .*type BF16"):
        exported(tmp_path, model, "llama", "Q8_0")
    exported(tmp_path, model, "llama", "BF16")


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rope_parameters": LLAMA3}, None),
        ({"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}, "rope_freqs.weight .*a tensor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                              "original_max_position_embeddings": 32}},
         "a file of llama would be of another model: its rope_parameters is"),
        ({"attention_bias": True}, None),
        ({"hidden_act": "relu"}, "computes llama with hidden_act silu, and the model to export has relu"),
    ],
)  # fmt: skip
def test_what_the_file_of_a_config_cannot_say_is_refused_in_one_line(
    changed: dict[str, Any], told: str | None, tmp_path: Path
):
    model = tiny_of("llama", **copy.deepcopy(changed))
    if told is None:
        path, _ = exported(tmp_path, model, "llama", like=False)
        assert agrees(model, path)
        assert torch.equal(read(path).state_dict()["lm_head.weight"], model.lm_head.weight)
        return
    with pytest.raises(CompressxError, match=told) as error:
        exported(tmp_path, model, "llama", like=False)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("export another format")
    assert not (tmp_path / "written.gguf").exists()


def test_an_architecture_that_is_not_written_is_refused():
    with pytest.raises(CompressxError, match=r"cohere is none of the architectures that are written, bloom, .*another"):
        described(tiny_model("cohere")).__enter__()


@pytest.mark.slow
def test_the_real_model_dense_shrunk_and_cut_computes_the_same_in_llama_cpp(smollm2: Any, tmp_path: Path):
    like = template_of(find_checkpoint(ModelSource(**SMOLLM2)).file)
    prompt = smollm2.tokenizer("The history of the city of Paris begins with")["input_ids"]
    model = copy.deepcopy(smollm2.model)
    assert export_gguf(InMemory(model), like, "F16", tmp_path / "dense.gguf").startswith(
        "llama, 30 blocks, 1536 neurons"
    )
    assert agrees(model, tmp_path / "dense.gguf", prompt)
    with torch.no_grad():
        for layer in model.model.layers:  # no more than leaves a model that float16 does not throw off
            query = layer.self_attn.q_proj.weight
            query[query.abs() < query.abs().median()] = 0
            layer.mlp.down_proj.weight[:, 1440:] = 0
        model.model.layers[20].self_attn.o_proj.weight.zero_()
        model.model.layers[20].mlp.down_proj.weight.zero_()
    told = export_gguf(InMemory(model), like, "F16", tmp_path / "shrunk.gguf")
    assert told == "llama, 29 blocks, 1440 neurons, 3 key/value groups"
    queries = np.array(GgufHeader.of(tmp_path / "shrunk.gguf").arrays["blk.7.attn_q.weight"])
    assert np.mean(queries == 0) > 0.49
    assert agrees(model, tmp_path / "shrunk.gguf", prompt)
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight[:, 1126 + 8 * i :] = 0
        model.model.layers[14].self_attn.o_proj.weight.zero_()
    told = export_gguf(InMemory(model), like, "F16", tmp_path / "cut.gguf")
    assert told == "deci, 29 blocks, 1152 to 1376 neurons, 0 to 3 key/value groups"
    assert agrees(model, tmp_path / "cut.gguf", prompt)


def test_the_page_of_models_lists_what_is_written():
    page = Path(__file__).parents[3].joinpath("docs/models.md").read_text(encoding="utf-8").partition("## GGUF")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \| (\w+) \| (\w+) \|$", page, re.MULTILINE)
    said = {True: "yes", False: "no"}
    assert rows == [
        (name, kind, said[name in FEWER_HEADS], said[name in OWN_WIDTHS]) for name, (kind, _) in ARCHITECTURES.items()
    ]
