"""Settings of configs in GGUF files: what is read or written computes in llama.cpp what it does in transformers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.compressx.gguf_files import ARCHITECTURES, tiny_byte_tokenizer, tiny_of, write_like
from tests.compressx.llama_cpp import PROMPT, agrees
from transformers import AutoConfig

from compressx.models.access import InMemory
from compressx.models.checkpoint import Checkpoint
from compressx.models.gguf_described import described
from compressx.models.gguf_export import export_gguf, template_of
from compressx.models.gguf_header import GgufHeader
from compressx.models.gguf_settings import SETTINGS, Derived, computed
from compressx.models.gguf_tokenizer import tokenizer_metadata
from compressx.models.loading import load_model
from compressx.runtime.errors import CompressxError

SLOW = pytest.mark.slow
KIND = {name: kind for name, (kind, _) in ARCHITECTURES.items()}


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **more}}


THETA, LINEAR = rope(rope_theta=5e5), rope(rope_type="linear", factor=4.0)
RMS = ("rms_norm_eps", {"rms_norm_eps": 1e-2}, True)
ROTATED = [("rope_parameters", THETA, True), ("rope_parameters", LINEAR, True)]
UNTIED, TIED = ("tied", {"tie_word_embeddings": False}, True), ("tied", {"tie_word_embeddings": True}, True)
RELU, SILU = ("hidden_act", {"hidden_act": "relu"}, False), ("hidden_act", {"hidden_act": "silu"}, False)
BIASED = ("attention_bias", {"attention_bias": True}, False)
WIDE = ("head_dim", {"head_dim": 32}, True)
WINDOW = ("window", {"sliding_window": 64}, True)
WINDOWS = ("window", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, True)
DENSE_BLOCKS = [("decoder_sparse_step", {"decoder_sparse_step": 2}, False),
                ("mlp_only_layers", {"mlp_only_layers": [1]}, False)]  # fmt: skip
GEMMA = [
    RMS, WIDE, BIASED, ("hidden_activation", {"hidden_activation": "relu"}, False),
    ("query_pre_attn_scalar", {"query_pre_attn_scalar": 64}, True),
    ("final_logit_softcapping", {"final_logit_softcapping": 2.0}, True),
    ("sliding_window", {"sliding_window": 16}, True),
    ("use_bidirectional_attention", {"use_bidirectional_attention": True}, False),
    ("layer_types", {"layer_types": ["full_attention"] * 3, "sliding_window": 16}, False),
]  # fmt: skip
CASES: Mapping[str, list[tuple[str, dict[str, Any], bool]]] = {
    "bloom": [
        ("layer_norm_epsilon", {"layer_norm_epsilon": 1e-2}, True), UNTIED, ("heads", {"n_head": 8}, True),
        ("heads", {"hidden_size": 96, "n_head": 6}, True),
        ("apply_residual_connection_post_layernorm", {"apply_residual_connection_post_layernorm": True}, False),
    ],
    "gemma2": [
        *GEMMA, *ROTATED, ("attn_logit_softcapping", {"attn_logit_softcapping": 5.0}, True),
        ("attn_logit_softcapping", {"attn_logit_softcapping": None}, False),
        ("final_logit_softcapping", {"final_logit_softcapping": None}, False),
        ("tie_word_embeddings", {"tie_word_embeddings": False}, False),
    ],
    "gemma3": [
        *GEMMA, UNTIED, ("attn_logit_softcapping", {"attn_logit_softcapping": 5.0}, False),
        ("rope_parameters", {"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}}, True),
    ],
    "gpt2": [
        ("layer_norm_epsilon", {"layer_norm_epsilon": 1e-2}, True), UNTIED,
        ("activation_function", {"activation_function": "relu"}, False),
        ("activation_function", {"activation_function": "gelu"}, True),
        ("scale_attn_weights", {"scale_attn_weights": False}, False),
        ("scale_attn_by_inverse_layer_idx", {"scale_attn_by_inverse_layer_idx": True}, False),
        ("add_cross_attention", {"add_cross_attention": True}, False),
        ("n_inner", {"n_inner": 128}, True), ("n_positions", {"n_positions": 64}, True),
    ],
    "lfm2": [
        *ROTATED, UNTIED, ("norm_eps", {"norm_eps": 1e-2}, True), ("conv_L_cache", {"conv_L_cache": 4}, True),
        ("conv_bias", {"conv_bias": True}, False),
    ],
    "llama": [
        *ROTATED, RMS, WIDE, TIED, RELU, ("attention_bias", {"attention_bias": True}, True),
        ("mlp_bias", {"mlp_bias": True}, True), ("rope_parameters", rope(partial_rotary_factor=0.5), True),
    ],
    "minimax-m2": [
        ("rope_parameters", rope(partial_rotary_factor=0.5, rope_theta=5e5), True), RMS, TIED, RELU,
        ("rotary_dim", {"rotary_dim": 16}, True), ("rotary_dim", {"rotary_dim": 4}, True),
        ("head_dim", {"head_dim": 32, "rotary_dim": 16}, True), ("intermediate_size", {"intermediate_size": 64}, True),
    ],
    "nemotron": [
        *(("rope_parameters", rope(rope_theta=5e5, partial_rotary_factor=x), True) for x in (0.25, 0.5, 1.0)),
        ("norm_eps", {"norm_eps": 1e-2}, True), TIED, RELU, SILU, ("attention_bias", {"attention_bias": True}, True),
        ("mlp_bias", {"mlp_bias": True}, True), ("head_dim", {"head_dim": 32}, False),
    ],
    "phi3": [
        ("rope_parameters", THETA, True), ("rope_parameters", rope(partial_rotary_factor=0.5), True), RMS, TIED, RELU,
        ("head_dim", {"head_dim": 32}, False), ("sliding_window", {"sliding_window": 64}, True),
    ],
    "qwen2": [*ROTATED, RMS, TIED, RELU, WINDOWS, ("head_dim", {"head_dim": 32}, False)],
    "qwen2moe": [
        *ROTATED, RMS, TIED, RELU, ("qkv_bias", {"qkv_bias": False}, True), *DENSE_BLOCKS,
        ("norm_topk_prob", {"norm_topk_prob": True}, False), WINDOWS, ("head_dim", {"head_dim": 32}, False),
        ("shared_expert_intermediate_size", {"shared_expert_intermediate_size": 32}, True),
        ("moe_intermediate_size", {"moe_intermediate_size": 64}, True), ("experts", {"num_experts_per_tok": 3}, True),
    ],
    "qwen3": [*ROTATED, RMS, TIED, RELU, WIDE, BIASED, WINDOWS],
    "qwen3moe": [
        *ROTATED, RMS, TIED, RELU, WIDE, BIASED, *DENSE_BLOCKS, ("norm_topk_prob", {"norm_topk_prob": False}, False),
        ("moe_intermediate_size", {"moe_intermediate_size": 64}, True),
        ("window", {"use_sliding_window": True, "sliding_window": 64}, True),
    ],
    "stablelm": [
        *ROTATED, TIED, RELU, ("layer_norm_eps", {"layer_norm_eps": 1e-2}, True),
        ("use_qkv_bias", {"use_qkv_bias": False}, True), ("qk_layernorm", {"qk_layernorm": True}, False),
        ("use_parallel_residual", {"use_parallel_residual": True}, True),
        *(("rope_parameters", rope(partial_rotary_factor=x), True) for x in (0.5, 1.0)),
    ],
    "starcoder2": [
        *ROTATED, TIED, UNTIED, SILU, ("hidden_act", {"hidden_act": "gelu"}, True), WINDOW,
        ("norm_epsilon", {"norm_epsilon": 1e-2}, True), ("use_bias", {"use_bias": False}, False),
    ],
}  # fmt: skip
"""By architecture: a setting, a config that changes it, and whether a GGUF file can say so."""


def converted(folder: Path, architecture: str, more: Mapping[str, Any], seed: int) -> tuple[Any, Path]:
    """Draw a model and write the GGUF file of it, or of the plain model if the converter has no names for it."""
    model = tiny_of(architecture, seed, **copy.deepcopy(dict(more)))
    keys = {"rope.freq_base_swa": 1e3} if architecture == "gemma3" and "rope_parameters" in more else {}
    path = folder / f"{architecture}.gguf"
    try:
        return model, write_like(path, model, architecture, keys)
    except KeyError:
        return model, write_like(path, tiny_of(architecture, seed), architecture)


def read(path: Path) -> Any:
    return load_model(Checkpoint(str(path.parent), path))


def computes(path: Path, model: Any, *, loaded: bool = True) -> bool:
    """Return whether llama.cpp computes with a file what a model does; `loaded`: it also has to load the file."""
    try:
        return agrees(model, path)
    except AssertionError as error:
        return not loaded and "does not load" in str(error)


def outcome(folder: Path, architecture: str, more: Mapping[str, Any], seed: int = 4, *, by_file: bool = True) -> str:
    """Write a model, read what was written, and return what was refused and what is wrong.

    It is written by the file of its converter, which is read as well, or by its own config.
    """
    written, found = folder / "written.gguf", []
    try:
        if by_file:
            model, like = converted(folder, architecture, more, seed)
            if not computes(like, read(like), loaded=False):
                found.append("what is read is not what llama.cpp computes")
        else:
            model = tiny_of(architecture, seed, **copy.deepcopy(dict(more)))
    except CompressxError:
        found.append("read: refused")
    try:
        if by_file:
            export_gguf(InMemory(model), template_of(like), "F16", written)
        else:
            own = tokenizer_metadata(tiny_byte_tokenizer(), model.config.vocab_size)
            with described(model) as header:
                export_gguf(InMemory(model), header, "F16", written, own)
    except CompressxError:
        return ", ".join([*found, "written: refused"])
    if not computes(written, model):
        found.append("what is written is not the model")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        if not torch.allclose(read(written)(ids).logits, model(ids).logits, atol=2e-2):
            found.append("what was written is read as another model")
    return ", ".join([*found, "written"])


def wrong(told: str) -> bool:
    return "is not" in told or "another model" in told


def tried(folder: Path, architecture: str, more: Mapping[str, Any], *, by_file: bool = True) -> str:
    """Return the outcome; of mixtures, whose routers may be all but undecided, of the first of three that is right."""
    tries = (outcome(folder, architecture, more, seed, by_file=by_file) for seed in (4, 5, 3))
    told = ""
    for told in tries:
        if not wrong(told):
            break
    return told


QUICK = {"llama", "gemma3"}
"""Those whose cases are all tried by `make check`; of others that rotate a part of a head only the rotations are."""


@pytest.mark.parametrize("by_file", [True, False], ids=["by a file", "by its config"])
@pytest.mark.parametrize(
    ("architecture", "name", "more", "said"),
    [
        pytest.param(x, *case, marks=() if x in QUICK or (x, case[0]) == ("phi3", "rope_parameters") else SLOW)
        for x, cases in CASES.items()
        for case in [("nothing", {}, True), *cases]
    ],
)
def test_a_setting_is_written_and_read_as_it_is_or_refused(
    architecture: str, name: str, more: dict[str, Any], said: bool, by_file: bool, tmp_path: Path
):
    told = tried(tmp_path, architecture, more, by_file=by_file)
    assert not wrong(told), told
    assert told.endswith("written" if said else "refused"), told


def implied(architecture: str) -> dict[str, Any]:
    """Return the settings that llama.cpp takes from the architecture's name, and their values."""
    config, known = AutoConfig.for_model(KIND[architecture]), SETTINGS[architecture]
    always = {x: how.read(None) for x, how in known.items() if isinstance(how, Derived) and "always" in how.words}  # type: ignore[arg-type]
    others = {*computed(config, architecture)} - {*known, "vocab_size", "hidden_size", "n_embd"}
    return {**always, **{x: getattr(config, x) for x in sorted(others) if "rope" not in x}}


@pytest.mark.parametrize("architecture", SETTINGS)
def test_every_setting_of_the_table_has_a_case_that_says_or_refuses_it(architecture: str):
    said = {name for name, _, said in CASES[architecture] if said}
    assert {*SETTINGS[architecture]} - {*implied(architecture)} <= said | {"layer_types"}
    refused = {name for name, _, said in CASES[architecture] if not said}
    assert {*implied(architecture)} - {"sliding_window"} <= refused


@st.composite
def several(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    architecture = draw(st.sampled_from([*CASES]))
    cases = draw(st.lists(st.sampled_from(CASES[architecture]), min_size=2, max_size=4))
    return architecture, {key: x for _, more, _ in cases for key, x in more.items()}


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(drawn=several())
def test_settings_together_are_written_and_read_as_they_are_or_refused(drawn: tuple[str, dict[str, Any]]):
    architecture, more = drawn
    with tempfile.TemporaryDirectory() as folder:
        try:
            tiny_of(architecture, **copy.deepcopy(more))
        except Exception:  # noqa: BLE001 - transformers refuses such a config
            assume(False)
        told = tried(Path(folder), architecture, more)
    assert not wrong(told), (told, more)


def test_a_window_that_llama_cpp_lacks_limits_the_context_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from transformers import MistralConfig, MistralForCausalLM

    plain = tiny_of("llama")
    mistral = MistralForCausalLM(MistralConfig(**{**plain.config.to_dict(), "sliding_window": 64})).eval()
    mistral.load_state_dict(plain.state_dict())
    made = {"llama": (mistral, write_like(tmp_path / "x.gguf", plain, "llama")),
            "starcoder2": converted(tmp_path, "starcoder2", {"sliding_window": 64}, 0)}  # fmt: skip
    for architecture, (model, like) in made.items():
        export_gguf(InMemory(model), template_of(like), "F16", tmp_path / "written.gguf")
        assert GgufHeader.of(tmp_path / "written.gguf").values[f"{architecture}.context_length"] == 64
        assert computes(tmp_path / "written.gguf", model)
        assert f"context_length is 64, the model's window: llama.cpp has none for {architecture}" in caplog.text


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"attention.scale": 0.5}, r"llama.attention.scale is 0.5, which has no place in a config of llama"),
        ({"expert_weights_scale": 2.5}, "llama.expert_weights_scale is 2.5"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0"),
        ({"attention.sliding_window": 16}, "llama.attention.sliding_window is 16"),
        ({"attention.causal": False}, "llama.attention.causal is False, expected True"),
        ({"attention.value_length": 8}, "llama.attention.value_length is 8, expected 16"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count is 8, expected 16"),
        ({"rope.freq_base_swa": 1e3}, "llama.rope.freq_base_swa is 1000.0, expected rope.freq_base"),
    ],
)
def test_a_key_that_changes_the_computation_and_has_no_place_in_the_config_is_refused(
    keys: dict[str, Any], told: str, tmp_path: Path
):
    path = write_like(tmp_path / "x.gguf", tiny_of("llama"), "llama", keys)
    with pytest.raises(CompressxError, match=told):
        read(path)


def row(architecture: str) -> str:
    always, known = implied(architecture), SETTINGS[architecture]
    told = {x: how.words if isinstance(how, Derived) else f"`{how}`" for x, how in known.items() if x not in always}
    said = "; ".join(f"`{x}`: {how}" for x, how in told.items())
    return f"| `{architecture}` | {said} | {', '.join(f'`{x}` {value}' for x, value in always.items())} |"


def test_the_page_of_models_has_the_table_of_settings():
    page = Path(__file__).parents[3].joinpath("docs/models.md").read_text(encoding="utf-8")
    assert [row(x) for x in SETTINGS if row(x) not in page] == []
