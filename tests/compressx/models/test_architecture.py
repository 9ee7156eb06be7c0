"""Where models keep their blocks and linears, for every architecture that is supported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compressx.foreign import ATTRIBUTE_MAP, save_foreign
from torch import nn
from torch.ao.pruning.sparsifier.utils import FakeSparsity
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

from compressx.models.architecture import architecture_of, find_blocks, positions_of, refuse_prepared
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import load_skeleton
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model

_LLAMA = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
_PER_LAYER = ("per_layer_input_gate", "per_layer_projection")
EXPECTED: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "llama-mha", "llama-mqa", "llama-tied", "llama-theta", "llama-3", "llama-yarn", "mistral",
                     "qwen2", "qwen3", "gemma2", "gemma3", "stablelm", "olmo2", "cohere"), ("model.layers", _LLAMA)),
    "glm": ("model.layers", (*_LLAMA[:4], "mlp.gate_up_proj", "mlp.down_proj")),
    "phi": ("model.layers", (*_LLAMA[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2")),
    "opt": ("model.decoder.layers", ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj",
                                     "fc1", "fc2")),
    "gpt2": ("transformer.h", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    "gpt-neox": ("gpt_neox.layers", ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h",
                                     "mlp.dense_4h_to_h")),
    "falcon": ("transformer.h", ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h",
                                 "mlp.dense_4h_to_h")),
    "bloom": ("transformer.h", ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h",
                                "mlp.dense_4h_to_h")),
    "gptj": ("transformer.h", ("attn.k_proj", "attn.v_proj", "attn.q_proj", "attn.out_proj", "mlp.fc_in",
                               "mlp.fc_out")),
    "phi3": ("model.layers", ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    "qwen3.5": ("model.layers", _LLAMA),
    "gemma4": ("model.layers", (*_LLAMA, *_PER_LAYER)),
    **dict.fromkeys(("mixtral", "gpt-oss"), ("model.layers", (
        *_LLAMA[:4], *(f"mlp.experts.{p}.{e}" for p in ("gate_up_proj", "down_proj") for e in range(4))))),
}  # fmt: skip

OTHERS = {
    ("qwen3.5", 0): (*(f"linear_attn.{name}" for name in
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")), *_LLAMA[4:]),
    ("gemma4", 2): (*(name for name in _LLAMA if not name.endswith(("k_proj", "v_proj"))), *_PER_LAYER),
}  # fmt: skip
"""Blocks that are not like the others: with linear attention, or without keys and values of their own."""


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_every_block_and_linear_is_found_with_and_without_weights_and_every_matrix_accounted_for(architecture):
    """Nothing is silently left out: pruned weights, heads and refused weights together are all of the model's."""
    model = tiny_model(architecture)
    found = architecture_of(model)
    blocks, kinds = EXPECTED[architecture]
    assert list(found.blocks) == [f"{blocks}.{i}" for i in range(3)]
    of_blocks = {i: OTHERS.get((architecture, i), kinds) for i in range(3)}
    assert set(found.linears) == {f"{blocks}.{i}.{kind}" for i, kinds in of_blocks.items() for kind in kinds}
    for name, linear in found.linears.items():
        assert name.startswith(f"{found.block_of(name)}.")
        assert tuple(linear.weight.shape) == (linear.out_features, linear.in_features)

    with torch.device("meta"):
        bare = architecture_of(tiny_model(architecture))
    assert (list(bare.linears), list(bare.outside)) == (list(found.linears), list(found.outside))
    assert bare.unprunable == found.unprunable

    owners = {n for n, m in model.named_modules() if any(p.dim() >= 2 for p in m.parameters(recurse=False))}
    fused = {name for name in owners if any(n.startswith(f"{name}.") for n in found.linears)}
    assert {*found.outside, *found.unprunable, *fused, *(n for n in found.linears if n in owners)} == owners
    assert not set(found.linears) & set(found.unprunable)
    assert not any(n.startswith(blocks) for n in found.outside), "the head is never in a block"
    counted = sum(x.out_features * x.in_features for x in found.linears.values())
    # Without the biases of GPT-OSS's experts, which are one matrix.
    in_blocks = {n: p for n, p in model.named_parameters() if n.startswith(blocks) and not n.endswith("_bias")}
    matrices = {n: p.numel() for n, p in in_blocks.items() if p.dim() >= 2}
    assert counted == sum(size for n, size in matrices.items() if n.rpartition(".")[0] not in found.unprunable)


def test_experts_stored_in_by_out_are_seen_out_by_in_with_their_biases() -> None:
    model = tiny_model("gpt-oss")
    experts = model.model.layers[1].mlp.experts
    names = {n for n in architecture_of(model).linears if n.startswith("model.layers.1.mlp")}
    assert names == {f"model.layers.1.mlp.experts.{p}.{e}" for p in ("gate_up_proj", "down_proj") for e in range(4)}
    linear = architecture_of(model).linears["model.layers.1.mlp.experts.gate_up_proj.2"]
    assert (linear.out_features, linear.in_features) == (192, 64)
    assert torch.equal(linear.weight, experts.gate_up_proj[2].T)
    assert torch.equal(linear.bias, experts.gate_up_proj_bias[2])


def coded(model: Any, kinds: tuple[str, ...]) -> Any:
    """Let the linears of these kinds have weights of 8 bits."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(kinds):
            module.weight = nn.Parameter(module.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("architecture", "name", "told"),
    [("llama-tied", "lm_head", "its weight is tied to model.embed_tokens.weight; pruning it would prune both"),
     ("mixtral", "model.layers.0.mlp.gate", "not a linear: MixtralTopKRouter holds weight [4, 64]"),
     ("llama", "model.layers.0.mlp.down_proj", "its weight is quantized (torch.float8_e4m3fn); prune before quanti")],
)  # fmt: skip
def test_what_cannot_be_pruned_says_why(architecture: str, name: str, told: str) -> None:
    model = tiny_model(architecture)
    found = architecture_of(coded(model, ("down_proj",)) if architecture == "llama" else model)
    assert name not in {**found.linears, **found.outside}
    assert found.unprunable[name].startswith(told)


class _Model(nn.Module):
    """A model with the module lists that are given, and a config of three layers."""

    def __init__(self, **lists: int) -> None:
        super().__init__()
        text: Any = SimpleNamespace(num_hidden_layers=3)
        self.config = SimpleNamespace(get_text_config=lambda decoder: text)
        for name, length in lists.items():
            setattr(self, name, nn.ModuleList(nn.Linear(4, 4) for _ in range(length)))


def test_a_model_without_one_list_of_blocks_is_refused_with_what_it_has() -> None:
    assert list(find_blocks(_Model(encoder=2, layers=3))) == ["layers.0", "layers.1", "layers.2"]
    for lists, complaint in (
        ({"layers": 2}, r"found 0; module lists in the model: layers \(2\)"),
        ({"encoder": 3, "decoder": 3}, r"found 2; module lists in the model: encoder \(3\), decoder \(3\)"),
        ({}, "found 0; module lists in the model: none"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"expected one list of 3 decoder blocks.*{complaint}"):
            find_blocks(_Model(**lists))


# --- weights that are no plain parameters


class Params4bit(nn.Parameter):
    """As of bitsandbytes."""


class Sharded(torch.Tensor):
    """As of FSDP2 and torchao."""


class FullyShardedDataParallel(nn.Module):
    """As of torch.distributed.fsdp, which needs processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def of_class(cls: type[torch.Tensor]) -> Callable[[nn.Linear], None]:
    def change(linear: nn.Linear) -> None:
        linear._parameters["weight"] = torch.Tensor._make_subclass(cls, linear.weight.detach())  # type: ignore[assignment]

    return change


def by_hand(linear: nn.Linear) -> None:
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = weight


NOT_PLAIN = {
    "pruning hook": (lambda x: prune.l1_unstructured(x, "weight", 0.3),
                     r"parametrized by L1Unstructured \(0\); call torch.nn.utils.prune.remove\(module, \"weight\"\) f"),
    "pruned twice": (lambda x: [prune.random_unstructured(x, "weight", 0.3) for _ in range(2)],
                     r"parametrized by PruningContainer \(0\); call torch.nn.utils.prune.remove"),
    "pruned bias": (lambda x: prune.random_unstructured(x, "bias", 0.3), r"parametrized by RandomUnstructured \(0\)"),
    "weight norm": (parametrizations.weight_norm,
                    r"by _WeightNorm \(0\); call torch.nn.utils.parametrize.remove_parametrizations\(module, \"w"),
    "orthogonal": (parametrizations.orthogonal, r"parametrized by _Orthogonal \(0\)"),
    "spectral norm hook": (spectral_norm,
                           r"parametrized by SpectralNorm \(0\); call torch.nn.utils.remove_spectral_norm\(module\) f"),
    "old weight norm": (torch.nn.utils.weight_norm, r"by WeightNorm \(0\); call torch.nn.utils.remove_weight_norm\(m"),
    "held masks": (lambda x: parametrize.register_parametrization(x, "weight", FakeSparsity(torch.ones(4, 4))),
                   r"by FakeSparsity \(0\); call compressx.masks.squash\(sparsifier\) first"),
    "by hand": (by_hand, r"no parameters \(0\); set module.weight to an nn.Parameter first"),
    "quantized": (of_class(Params4bit),
                  r"of class Params4bit \(0\); load the model whole and in full precision, or dequantize it, first"),
    "sharded": (of_class(Sharded), r"of class Sharded \(0\)"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_weights_that_are_no_plain_parameters_are_refused_by_name_with_what_to_do(kind):
    change, says = NOT_PLAIN[kind]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    refuse_prepared(model)
    change(model[0])
    with pytest.raises(ArtifactError, match=f"the model cannot be pruned while its weights are .*{says}"):
        refuse_prepared(model, "pruned")


@pytest.mark.parametrize(
    ("wrap", "kind", "inner"),
    [(nn.DataParallel, "DataParallel", "module"), (FullyShardedDataParallel, "FullyShardedDataParallel", "module"),
     pytest.param(torch.compile, "OptimizedModule", "_orig_mod", marks=pytest.mark.slow)],  # imports the compiler
)  # fmt: skip
def test_a_wrapped_model_or_block_is_refused_by_the_name_of_the_wrapper(wrap, kind, inner):
    says = rf"wrapped in {kind} \(%s\); pass its `{inner}`, or load the model without the wrapper, first"
    with pytest.raises(ArtifactError, match=says % kind):
        refuse_prepared(wrap(nn.Sequential(nn.Linear(4, 4))), "pruned")
    with pytest.raises(ArtifactError, match=says % "1"):
        refuse_prepared(nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4))), "pruned")


# --- architectures that are not supported


@pytest.mark.parametrize(("kind", "held"), [("MyLinear", r"weight \[192, 64\]"), ("BufferLinear", "buffers")])
def test_blocks_without_a_linear_are_refused_with_what_they_hold_instead(kind: str, held: str, tmp_path: Path) -> None:
    folder = save_foreign(tmp_path / "model", (kind, kind, kind))
    told = rf"compressx knows; trunk\.stages\.0\.qkv is not a linear: {kind} holds {held}; expected nn\.Linear"
    with pytest.raises(UnsupportedModelError, match=told):
        architecture_of(load_skeleton(Checkpoint(str(folder), trust_remote_code=True)))


def test_blocks_whose_linears_are_all_quantized_are_refused_by_their_dtype() -> None:
    model = coded(tiny_model("llama"), ("",))
    with pytest.raises(UnsupportedModelError, match=r"q_proj cannot be pruned: its weight is quantized .*float8"):
        architecture_of(model)


def test_some_blocks_may_be_without_linears(tmp_path: Path) -> None:
    folder = save_foreign(tmp_path / "model", ("MyLinear", "nn.Linear", "nn.Linear"))
    found = architecture_of(load_skeleton(Checkpoint(str(folder), trust_remote_code=True)))
    assert {found.block_of(name) for name in found.linears} == {"trunk.stages.1", "trunk.stages.2"}
    assert found.unprunable["trunk.stages.0.qkv"].startswith("not a linear: MyLinear")


def test_the_line_that_names_a_configs_number_of_blocks_is_told_and_mends_it(tmp_path: Path) -> None:
    folder = save_foreign(tmp_path / "model", attribute_map="")
    checkpoint = Checkpoint(str(folder), trust_remote_code=True)
    with pytest.raises(UnsupportedModelError) as raised:
        find_blocks(load_skeleton(checkpoint))
    told = str(raised.value)
    assert "(config.num_hidden_layers, which it lacks: if it has it under another name, write attribute_map = " in told
    assert "in class TrunkConfig), found 0; module lists in the model: trunk.stages (3). " in told
    code = folder / "configuration_trunk.py"
    code.write_text(code.read_text().replace('model_type = "trunk"', f'model_type = "trunk"\n    {ATTRIBUTE_MAP}'))
    assert len(find_blocks(load_skeleton(checkpoint))) == 3


@pytest.mark.parametrize(("told", "positions"), [(64, 64), (-1, sys.maxsize), (None, sys.maxsize)])
def test_a_model_that_says_no_number_of_positions_reads_any(told: int | None, positions: int) -> None:
    """XLNet's config says -1."""
    config = SimpleNamespace(max_position_embeddings=told, get_text_config=lambda **_: config)
    assert positions_of(SimpleNamespace(config=config)) == positions  # type: ignore[arg-type]
