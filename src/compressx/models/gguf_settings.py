"""What a GGUF file says of a model's arithmetic beside its weights.

llama.cpp takes each setting from the metadata, from the tensors that the file has, or from the architecture's name;
transformers takes what it does not read from its class's defaults. `SETTINGS` has, for each architecture, where
llama.cpp takes a setting from. Configs that are read from a file are corrected by it, and a model is compared with it
before it is written.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

from compressx.models.gguf_header import GgufHeader
from compressx.runtime.errors import ArtifactError, UnsupportedModelError


class Derived(NamedTuple):
    """A setting that no key says by itself: from what llama.cpp takes it."""

    words: str
    read: Callable[[GgufHeader], Any]


Rules: TypeAlias = Mapping[str, str | Derived]


def _by(tensor: str) -> Derived:
    return Derived(f"whether there is `{tensor}`", lambda header: tensor in header.kinds)


def _local(every: int) -> Derived:
    def read(header: GgufHeader) -> list[str]:
        count, each = header.get("block_count"), header.get("attention.sliding_window_pattern", every)
        local = each if isinstance(each, list) else [i % each < each - 1 for i in range(count)]
        if header.architecture == "gemma3" and not header.get("attention.sliding_window"):
            local = [False] * count
        return ["sliding_attention" if x else "full_attention" for x in local]

    return Derived(f"`attention.sliding_window_pattern`, or one block of {every} is global", read)


def query_scalar(header: GgufHeader, blocks: int) -> int:
    """Return what llama.cpp divides Gemma's queries by the root of: it knows the largest by the number of blocks."""
    own = blocks == {"gemma2": 46, "gemma3": 62}.get(header.architecture)
    return int(header.get("embedding_length") // header.get("attention.head_count")) if own else header.head


_RMS, _EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_HEAD = Derived("`attention.key_length`", lambda header: header.head)
_OF_EXPERTS: Rules = {
    "rms_norm_eps": _RMS,
    "moe_intermediate_size": Derived(
        "`expert_feed_forward_length`",
        lambda header: (
            header.get("expert_feed_forward_length")
            or header.get("feed_forward_length") // header.get("expert_used_count")
        ),
    ),
}
_OF_GEMMA: Rules = {
    "rms_norm_eps": _RMS, "head_dim": _HEAD, "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window",
    "query_pre_attn_scalar": Derived(
        "the head size, or the number of blocks", lambda header: query_scalar(header, header.get("block_count"))
    ),
}  # fmt: skip

SETTINGS: Mapping[str, Rules] = {
    "bloom": {"layer_norm_epsilon": _EPSILON},
    "gemma2": {**_OF_GEMMA, "attn_logit_softcapping": "attn_logit_softcapping", "layer_types": _local(2)},
    "gemma3": {**_OF_GEMMA, "layer_types": _local(6)},
    "gpt2": {"layer_norm_epsilon": _EPSILON, "n_positions": "context_length", "n_inner": "feed_forward_length"},
    "lfm2": {
        "norm_eps": _RMS, "conv_L_cache": "shortconv.l_cache", "conv_bias": Derived("always False", lambda _: False),
    },
    "llama": {
        "rms_norm_eps": _RMS, "head_dim": _HEAD, "attention_bias": _by("attn_q.bias"), "mlp_bias": _by("ffn_up.bias"),
        "sliding_window": Derived("always None", lambda _: None),
    },
    "minimax-m2": {"rms_norm_eps": _RMS, "head_dim": _HEAD, "intermediate_size": "expert_feed_forward_length"},
    "nemotron": {
        "norm_eps": _EPSILON, "attention_bias": _by("attn_q.bias"), "mlp_bias": _by("ffn_up.bias"),
    },
    "phi3": {"rms_norm_eps": _RMS, "sliding_window": "attention.sliding_window"},
    "qwen2": {"rms_norm_eps": _RMS},
    "qwen2moe": {
        **_OF_EXPERTS, "qkv_bias": _by("attn_q.bias"),
        "shared_expert_intermediate_size": Derived(
            "`expert_shared_feed_forward_length`",
            lambda header: header.get("expert_shared_feed_forward_length") or header.get("feed_forward_length"),
        ),
    },
    "qwen3": {"rms_norm_eps": _RMS, "head_dim": _HEAD},
    "qwen3moe": {**_OF_EXPERTS, "head_dim": _HEAD, "norm_topk_prob": Derived("always True", lambda _: True)},
    "stablelm": {
        "layer_norm_eps": _EPSILON, "use_qkv_bias": _by("attn_q.bias"),
        "use_parallel_residual": Derived(
            "whether there is no `ffn_norm.weight`", lambda header: "ffn_norm.weight" not in header.kinds
        ),
    },
    "starcoder2": {"norm_epsilon": _EPSILON},
}  # fmt: skip
"""By llama.cpp's name the settings of transformers' config and the keys that say them. llama.cpp computes with the
default of the config's class where a key is absent, and for all settings that are not here, but for sizes and
positions."""

OWN_HEAD = {"minimax-m2", "nemotron", "qwen2moe", "stablelm"}
"""Architectures whose files have an output matrix, also where it is the embedding."""
_SQUARE = {"bloom", "gpt2", "nemotron", "phi3", "qwen2", "qwen2moe", "stablelm", "starcoder2"}
"""Those whose heads together are as wide as the hidden states."""
_LOCAL = {"gemma2", "gemma3"}
"""Those of which llama.cpp computes local attention."""
TURNED_IN_PART = {"minimax-m2", "nemotron", "phi3", "stablelm"}
"""Those of which `rope.dimension_count` entries of a head are rotated."""
NOT_ROTATED = {"bloom", "gpt2"}
_BUILT = {"qwen35", "qwen35moe"}
"""Those whose configs transformers makes of the file's keys alone."""
_READ = {
    "context_length", "embedding_length", "feed_forward_length", "block_count", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size", "expert_count",
    "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "rope.dimension_count",
    "rope.freq_base", "rope.freq_base_swa", "attention.sliding_window_pattern", "attention.causal",
    "expert_gating_func", "pooling_type", "use_parallel_residual",
}  # fmt: skip
"""Keys that are read for every architecture, have to be as it has them, or are not computed with."""
_GELUS = {"gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate"}
"""Approximations of one function, of which llama.cpp has one."""


def _settings_of(header: GgufHeader) -> Rules:
    if (found := SETTINGS.get(header.architecture)) is None:
        raise UnsupportedModelError(
            f"{header.path}: what a GGUF file of {header.architecture} leaves unsaid is not known here; expected one "
            f"of {', '.join(SETTINGS)}; give the model's folder of safetensors"
        )
    return found


def completed(config: Any, header: GgufHeader) -> Any:
    """Return the config that transformers read from a file with the settings that llama.cpp computes with.

    Refused are other architectures, positions, and keys that change the computation and have no place in a config.
    """
    config = copy.deepcopy(config)
    if header.architecture in _BUILT:
        return config
    for name, setting in _settings_of(header).items():
        value = setting.read(header) if isinstance(setting, Derived) else header.get(setting, getattr(config, name))
        if not _same(_alike(getattr(config, name, None)), _alike(value)):
            setattr(config, name, value)
    config.tie_word_embeddings = "output.weight" not in header.kinds
    _refuse_unread_keys(header)
    if header.architecture in _SQUARE and header.head * header.get("attention.head_count") != config.hidden_size:
        raise _refused(header, "attention.key_length", f"expected heads that are {config.hidden_size} wide together")
    if header.architecture in NOT_ROTATED:
        return config
    every = config.rope_parameters
    whole = every.get("full_attention", every)
    whole["rope_theta"] = header.get("rope.freq_base", 10000.0)
    turned = header.get("rope.dimension_count", header.head)
    if header.architecture in TURNED_IN_PART:
        whole["partial_rotary_factor"] = turned / header.head
    elif turned != header.head:
        raise _refused(header, "rope.dimension_count", f"expected {header.head}, the size of its heads")
    if "sliding_attention" in every:
        every["sliding_attention"]["rope_theta"] = header.get("rope.freq_base_swa", 10000.0)
    elif header.get("rope.freq_base_swa", whole["rope_theta"]) != whole["rope_theta"]:
        raise _refused(header, "rope.freq_base_swa", "expected rope.freq_base, or none")
    return _positions_scaled(config, header)


def _refused(header: GgufHeader, key: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{header.path}: {header.architecture}.{key} is {header.get(key)!r}, {why}; give the model's folder of "
        "safetensors"
    )


def _refuse_unread_keys(header: GgufHeader) -> None:
    """Refuse values of the file format that no setting reads, unless they are zero, and heads of two sizes."""
    for key in _unread_keys(header):
        if key in _known_keys() and header.get(key):
            raise _refused(header, key, f"which has no place in a config of {header.architecture}")
    gating = 2 if header.architecture == "minimax-m2" else 1  # sigmoid or softmax
    of_all = {"attention.causal": True, "attention.value_length": header.head, "expert_gating_func": gating}
    for key, value in of_all.items():
        if header.get(key, value) != value:
            raise _refused(header, key, f"expected {value}")


def unread(header: GgufHeader) -> list[str]:
    """Return the keys of a file that nobody knows: neither the file format nor a setting here."""
    if header.architecture in _BUILT:
        return []
    return [f"{header.architecture}.{key}" for key in _unread_keys(header) if key not in _known_keys()]


def _unread_keys(header: GgufHeader) -> list[str]:
    """Return the keys of the architecture that nothing reads, without its name."""
    read, start = {*_READ, *_settings_of(header).values()}, f"{header.architecture}."
    own = (key.removeprefix(start) for key in header.fields if key.startswith(start))
    return [key for key in own if key not in read and not key.startswith("rope.scal")]


@cache
def _known_keys() -> frozenset[str]:
    """Return the keys of the file format, without an architecture's name."""
    from gguf import Keys

    groups = [Keys.LLM, Keys.Attention, Keys.Rope, Keys.SSM, Keys.ShortConv]
    return frozenset(
        str(x).removeprefix("{arch}.") for group in groups for x in vars(group).values() if isinstance(x, str)
    )


def refuse_tensors(model: Any, header: GgufHeader) -> None:
    """Refuse a file with a tensor that has no place in the model, which may be on `meta`, or without one of its own."""
    from transformers import modeling_gguf_pytorch_utils as readers

    if header.architecture in _BUILT:
        return
    kind: Any = readers.TENSOR_PROCESSORS.get(header.architecture, readers.TensorProcessor)
    names = readers.get_gguf_hf_weights_map(model, kind(config={}))
    mapped = {x if x.endswith((".weight", ".bias")) else f"{x}.weight" for x in names}
    if odd := sorted(header.names - mapped - {"rope_freqs.weight"}):
        raise UnsupportedModelError(
            f"{header.path}: tensor {odd[0]} has no place in {type(model).__name__}, which would compute without it; "
            "give the model's folder of safetensors"
        )
    tied = {"output.weight"} if model.config.tie_word_embeddings else set()
    if lost := sorted(mapped - header.names - tied):
        raise ArtifactError(f"{header.path} lacks {lost[0]}, which {type(model).__name__} needs; download it again")


def _positions_scaled(config: Any, header: GgufHeader) -> Any:
    """Return a config with its file's scaling of positions, linear or Llama 3's, which transformers leaves out."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    start = f"{header.architecture}.rope.scal"
    own = {key.removeprefix(start): x.contents() for key, x in header.fields.items() if key.startswith(start)}
    kind, factor, older = (own.get(key) for key in ("ing.type", "ing.factor", "e_linear"))
    factor = float((kind in {None, "linear"} and (factor or older)) or 1)
    known = {"ing.factor", "e_linear", "ing.finetuned", "ing.original_context_length"}
    odd = [f"{start}{k}" for k, x in own.items() if k not in known and x not in {0, 1, "linear", "none"}]
    odd += [x for x in header.kinds if "rope_f" in x and (x != "rope_freqs.weight" or factor != 1)]
    every = getattr(config, "rope_parameters", None) or {}
    layer = "full_attention" if "full_attention" in every else None
    plain = every[layer] if layer else every

    def scaled(rope_type: str, factor: float, **more: float) -> Any:
        changed, new = copy.deepcopy(config), {**plain, "rope_type": rope_type, "factor": factor, **more}
        changed.rope_parameters = {**every, layer: new} if layer else new
        return changed, ROPE_INIT_FUNCTIONS[rope_type](changed, torch.device("cpu"), layer_type=layer)[0]

    factors = torch.tensor(GgufHeader.of(header.path).arrays.get("rope_freqs.weight", factor))
    if not odd and bool((factors != 1).any()):
        of_llama = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        made = scaled("linear", factor) if factor != 1 else scaled("llama3", float(factors.max()), **of_llama)
        if torch.allclose(scaled("linear", 1.0)[1] / factors, made[1], rtol=1e-5, atol=0.0):
            return made[0]
        odd = ["rope_freqs.weight"]
    if odd:
        raise UnsupportedModelError(
            f"{header.path}: {odd[0]} ({own.get(odd[0].removeprefix(start), 'a tensor')}) scales positions, which is "
            "lost when transformers reads the file; give the model's folder of safetensors"
        )
    return config


_IGNORED = re.compile(
    # No arithmetic of a whole model, or none at all.
    r".*token_id|.*dropout|.*_pdrop|initializer_range|use_cache|(original_)?max_position_embeddings|pretraining_tp|"
    r"output_.*|router_.*|summary_.*|reorder_and_upcast_attn|slow_but_exact|"
    # Sizes, which tensors have; what is compared as a head size, as widths of attention and as rows of a fused matrix.
    r"num_.*|n_(layer|head|inner|positions)|.*intermediate_size|head_dim|tie_word_embeddings|"
    r"rope_parameters|.*sliding_window|max_window_layers|layer_types|block_.*|full_attn_idxs"
)


def computed(config: Any, architecture: str) -> dict[str, Any]:
    """Return the settings of a config that change what a model computes, those that mean the same alike.

    Which these are: all fields of the config's class but those that are known to change nothing, so that a field that
    is new in transformers is compared as well.
    """
    from transformers import PreTrainedConfig

    names = {x.name for x in dataclasses.fields(config)} - {x.name for x in dataclasses.fields(PreTrainedConfig)}
    found = {name: getattr(config, name, None) for name in names if not _IGNORED.fullmatch(name)}
    if architecture == "gemma2":
        found["tie_word_embeddings"] = config.tie_word_embeddings
    every = getattr(config, "rope_parameters", None) or {}
    by_kind = {kind: rope for kind, rope in every.items() if isinstance(rope, Mapping)}  # 5.16 has other keys beside
    for kind, rope in (by_kind or {"": every}).items():
        own = {key: x for key, x in rope.items() if rope.get("rope_type") != "default" or key == "rope_theta"}
        own["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
        if architecture not in TURNED_IN_PART:
            del own["partial_rotary_factor"]
        found[f"rope_parameters{kind and f'.{kind}'}"] = own
    return {name: _alike(x) for name, x in found.items()}


def _alike(value: Any) -> Any:
    """Return one value for those that mean the same."""
    if isinstance(value, str):
        return "gelu_pytorch_tanh" if value in _GELUS else {"swish": "silu"}.get(value, value)
    return value or None


def attention_widths(config: Any) -> list[int | None]:
    """Return how many tokens the attention of each block sees, None where all before."""
    width = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [width if kind == "sliding_attention" else None for kind in kinds]


def refuse_unsayable(ours: Any, theirs: Any, header: GgufHeader) -> None:
    """Refuse a setting of a model that files of an architecture cannot say, or that this file says otherwise.

    `theirs` is the file's config as `completed` returns it; the model may have fewer blocks.
    """
    kind, depth = header.architecture, ours.num_hidden_layers
    said, own = computed(theirs, kind), computed(ours, kind)
    if kind in _LOCAL:
        said["layer_types"], own["layer_types"] = attention_widths(theirs)[:depth], attention_widths(ours)
    elif kind == "lfm2":
        said["layer_types"], own["layer_types"] = theirs.layer_types[:depth], ours.layer_types
    for name in own:
        if name == "query_pre_attn_scalar" or _same(own[name], said.get(name)):  # the exporter puts that into weights
            continue
        here, there = (getattr(config, name, every[name]) for config, every in ((ours, own), (theirs, said)))
        if (
            isinstance(SETTINGS[kind].get(name), str)
            or name in {"layer_types", "vocab_size", "hidden_size"}
            or "rope" in name
        ):
            raise header.foreign(name, there, here)
        raise UnsupportedModelError(
            f"format gguf: llama.cpp computes {kind} with {name} {there}, and the model to export has {here}; export "
            "another format"
        )


def context_of(config: Any, architecture: str) -> int | None:
    """Return the context within which llama.cpp, which has no local attention for it, computes what the model does."""
    found = [x for x in attention_widths(config) if x is not None and architecture not in _LOCAL]
    return min(found, default=None)


def _same(ours: Any, theirs: Any) -> bool:
    """Compare values of configs; numbers of a file are float32."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return all(_same(ours.get(key), theirs.get(key)) for key in {*ours, *theirs})
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-5)
    return bool(ours == theirs)
