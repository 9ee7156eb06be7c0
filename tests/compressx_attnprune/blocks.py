"""Decoder blocks of tiny models with what enters them, recorded by plain forward hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressx import Block, Linear, find_projections
from compressx.api.pruner import BlockCall
from compressx.testing import TINY_CONFIGS, tiny_tokens

_LLAMA = TINY_CONFIGS["llama"][1]
_FALCON = TINY_CONFIGS["falcon"][1]
_LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
MORE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # A layer without positions, which says so; layers without positions that do not, one kind turning neighbours.
    "smollm3": ("smollm3", {**_LLAMA, "no_rope_layers": [1, 0, 1]}),
    "exaone4": ("exaone4", {**_LLAMA, **_LAYERS, "sliding_window_pattern": 2}),
    "cohere2": ("cohere2", {**_LLAMA, **_LAYERS, "sliding_window_pattern": 2}),
    # One norm over all heads, beside experts; scores scaled by a number of the config's own.
    "qwen2-moe": ("qwen2_moe", {**_LLAMA, **_LAYERS, "use_sliding_window": True, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "olmoe": ("olmoe", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("granite", {**_LLAMA, "attention_multiplier": 0.3}),
    # Falcon's other layouts: a key head for each group of queries, for each of them.
    "falcon-grouped": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-multi-head": ("falcon", {**_FALCON, "multi_query": False}),
    # StarCoder's two: all queries before the one key, or query, key and value head by head.
    "bigcode-multi-query": ("gpt_bigcode", {**TINY_CONFIGS["gpt2"][1], "multi_query": True}),
    "bigcode-multi-head": ("gpt_bigcode", {**TINY_CONFIGS["gpt2"][1], "multi_query": False}),
    "persimmon": ("persimmon", {**TINY_CONFIGS["llama-mha"][1], "qk_layernorm": True}),
    # Norms of the values, without weights; heads of other sizes in other layers.
    "gemma4-own-keys": ("gemma4_text", {**_LLAMA, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}),
    # Norms after the rotary embedding.
    "hunyuan": ("hunyuan_v1_dense", {**_LLAMA, "head_dim": 16}),
    # Gates in the query projection, or in a projection of their own.
    "qwen3-next": ("qwen3_next", {**_LLAMA, "head_dim": 16, "layer_types": ["full_attention"] * 3, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "afmoe": ("afmoe", {**_LLAMA, "head_dim": 16, "num_dense_layers": 3, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    # Sinks applied as a factor on the output, not as one more score as in GPT-OSS.
    "granite-swa": ("granite_swa", {**_LLAMA, "attention_multiplier": 0.3, "sliding_window": 8}),
    # Not supported: positions added to the scores, complex rotary tables, a layout of four parts.
    "mpt": ("mpt", {"vocab_size": 128, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
    "falcon-alibi": ("falcon", {**_FALCON, "alibi": True}),
    "llama4": ("llama4_text", {**_LLAMA, "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96}),
    "codegen": ("codegen", {**TINY_CONFIGS["gpt2"][1], "rotary_dim": 8}),
}  # fmt: skip
SEPARATE = ("llama", "llama-mha", "llama-mqa", "mistral", "qwen2", "qwen3", "gemma3", "opt")
FUSED = ("gpt2", "gpt-neox", "phi3")
CHECKED = (
    *SEPARATE, "gemma2", "llama-theta", "llama-3", "llama-yarn", "phi", "stablelm", "olmo2", "cohere", "glm", "gptj",
    "smollm3", "exaone4", "cohere2", "olmoe", "granite", "gemma4-own-keys", "hunyuan", "qwen2-moe", "gpt-oss",
    "granite-swa", "qwen3-next", "qwen3.5", "afmoe",
)  # fmt: skip
"""Separate query and key projections, and supported."""
BESIDE = ("gpt-oss", "qwen3-next", "qwen3.5", "afmoe")
"""Of these: sinks beside the scores, and gates beside the queries or by themselves."""
CHECKED_FUSED = (
    *FUSED, "falcon", "falcon-grouped", "falcon-multi-head", "bigcode-multi-query", "bigcode-multi-head", "persimmon"
)  # fmt: skip
"""Query, key and value in one weight, and supported."""
EVERY = (*CHECKED, *CHECKED_FUSED)


@dataclass(frozen=True, eq=False)
class Recorded:
    """A block, the input of its query projection [sequences, tokens, width], and the model's attention matrices."""

    block: Block
    x: Tensor
    attentions: Tensor  # [sequences, heads, tokens, tokens]


def build(architecture: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Build a tiny model with random biases and norms, so that nothing is an identity by accident."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = {**TINY_CONFIGS, **MORE_CONFIGS}[architecture]
    config = AutoConfig.for_model(model_type, **values, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith("norm.weight"):  # Cohere's norms have a gain for each head
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def find_block(model: Any, index: int, calls: tuple[BlockCall, ...] = ()) -> Block:
    """Describe the model's block `index` the way the host does."""
    name = next(
        n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == model.config.num_hidden_layers
    )
    fqn = f"{name}.{index}"
    module = model.get_submodule(fqn)
    linears = {
        f"{fqn}.{n}": Linear(f"{fqn}.{n}", m, transposed=type(m).__name__ == "Conv1D")
        for n, m in module.named_modules()
        if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
    }
    return Block(index, fqn, module, linears, calls, model.config)


def skeleton(architecture: str, index: int = 1) -> Block:
    """Return a block without weights, as a recipe is planned on."""
    return find_block(build(architecture, device="meta"), index)


def record(
    architecture: str, *, index: int = 1, sequences: int = 4, length: int = 32, dtype: torch.dtype = torch.float32
) -> Recorded:
    """Run a tiny model on tokens that repeat and record one block."""
    model = build(architecture, dtype=dtype)
    block, x, output = run_recorded(
        model, index, tiny_tokens(sequences=sequences, length=length), output_attentions=True
    )
    return Recorded(block, x, output.attentions[index - 3])  # the first of three blocks may have none


def run_recorded(model: Any, index: int, tokens: Tensor, **arguments: Any) -> tuple[Block, Tensor, Any]:
    """Run a model and return its block `index`, the input of its query projection, and the model's output."""
    block = find_block(model, index)
    seen: dict[str, Any] = {}

    def entering_block(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["call"] = BlockCall(args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})

    def entering_query(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen["x"] = args[0].detach().clone()

    hooks = [
        block.module.register_forward_pre_hook(entering_block, with_kwargs=True),
        block.linears[targets(block)[0]].module.register_forward_pre_hook(entering_query),
    ]
    with torch.no_grad():
        output = model(tokens, use_cache=False, **arguments)
    for hook in hooks:
        hook.remove()
    return find_block(model, index, (seen["call"],)), seen["x"], output


def targets(block: Block) -> tuple[str, ...]:
    """Return the names of the block's query and key projection, or of the one linear that fuses them."""
    separate, fused = ("q_proj", "k_proj"), ("c_attn", "query_key_value", "qkv_proj", "Wqkv")
    return tuple(n for end in (*separate, *fused) for n in block.linears if n.endswith(end))


def weights(block: Block, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the query and key weights in head order, in another dtype."""
    projections = find_projections(block)
    return projections.query.weight.to(dtype), projections.key.weight.to(dtype)
