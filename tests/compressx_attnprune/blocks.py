"""Decoder blocks of tiny models with what enters them, recorded by plain forward hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressx import Block, Linear
from compressx.pruner import BlockCall
from compressx.testing import TINY_CONFIGS, tiny_tokens

SEPARATE = ("llama", "llama-mha", "llama-mqa", "mistral", "qwen2", "qwen3", "gemma3", "opt")
FUSED = ("gpt2", "gpt-neox", "phi3")
MORE_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # Logit softcap, and a window on every other layer.
    "gemma2": ("gemma2", {**TINY_CONFIGS["gemma3"][1], "num_key_value_heads": 2, "attn_logit_softcapping": 3.0}),
    # Half of each head turns.
    "phi": ("phi", {**TINY_CONFIGS["llama"][1], "partial_rotary_factor": 0.5}),
    # A layer without positions.
    "smollm3": ("smollm3", {**TINY_CONFIGS["llama"][1], "no_rope_layers": [1, 0, 1]}),
    "cohere": ("cohere", TINY_CONFIGS["llama"][1]),
    "olmo2": ("olmo2", TINY_CONFIGS["llama"][1]),
}
CHECKED = (*SEPARATE, "gemma2", "phi", "smollm3")


@dataclass(frozen=True, eq=False)
class Recorded:
    """A block, the input of its q_proj [sequences, tokens, width], and the model's own attention matrices."""

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
        for parameter in model.parameters():
            if parameter.dim() > 1:
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
    return Recorded(block, x, output.attentions[index])


def run_recorded(model: Any, index: int, tokens: Tensor, **arguments: Any) -> tuple[Block, Tensor, Any]:
    """Run a model and return its block `index`, the input of that block's q_proj, and the model's output."""
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


def targets(block: Block) -> tuple[str, str]:
    """Return the names of the block's query and key projection."""
    query, key = (next(n for n in block.linears if n.endswith(end)) for end in ("q_proj", "k_proj"))
    return query, key


def weights(block: Block, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the query and key weights in another dtype."""
    query, key = targets(block)
    return block.linears[query].weight.to(dtype), block.linears[key].weight.to(dtype)
