"""Models with fewer blocks, or fewer experts: what is written computes what the pruned model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.depths import THIRD, planned
from tests.compressx.mixtures import MIXTURES, mixture
from transformers import AutoModelForCausalLM

from compressx.blocks.prune import prune_model
from compressx.masks.maskset import MaskSet
from compressx.models.access import InMemory
from compressx.models.architecture import find_blocks
from compressx.runtime.errors import UnsupportedModelError
from compressx.shrink.cuts import smaller
from compressx.shrink.stage import remaining_units, save_shrunk
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

TOKENS = tiny_tokens()
EXPERTS = {"targets": ["*"], "pruner": "reap", "pattern": "experts", "sparsity": 0.5}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS, use_cache=False).logits
    return found


def written(model: Any, folder: Path, *rules: dict[str, Any], gone: int = 0) -> tuple[Any, Any]:
    """Prune a model in place, of its blocks number `gone`, and write the smaller one.

    Returns that, loaded by transformers, and its new numbers.
    """
    plan = planned(model, *rules, shrink=True)
    if plan.depth is not None:
        plan = plan.scored({}, {[*find_blocks(model)][gone]: 0.0})
    masks = {n: e for b in prune_model(InMemory(model), plan, list(TOKENS.split(4))) for n, e in b.masks.items()}
    made = smaller(model, remaining_units(plan, MaskSet(masks)), plan.dropped)
    save_shrunk(InMemory(model), made, None, folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model").eval(), made.numbers


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("architecture", [name for name in TINY_CONFIGS if name != "gemma4"])
def test_without_a_block_every_architecture_computes_what_the_masked_model_does(architecture, gone, tmp_path):
    model = tiny_model(architecture)
    small, numbers = written(model, tmp_path, THIRD, gone=gone)
    torch.testing.assert_close(logits(small), logits(model), rtol=1e-5, atol=1e-5)
    assert len(find_blocks(small)) == small.config.get_text_config().num_hidden_layers == 2
    assert numbers == {"num_hidden_layers": (3, 2)}
    small.generate(TOKENS[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)  # with a cache of two blocks


def test_blocks_that_the_config_counts_one_by_one_do_not_go(tmp_path):
    told = r"Gemma4ForCausalLM cannot be built with num_hidden_layers 2 instead of 3: `per_layer_config` keys must be"
    with pytest.raises(UnsupportedModelError, match=told):
        written(tiny_model("gemma4"), tmp_path, THIRD)


@pytest.mark.parametrize("name", MIXTURES)
def test_with_fewer_experts_every_mixture_computes_what_the_masked_model_does(name, tmp_path):
    model = mixture(name)
    small, numbers = written(model, tmp_path, EXPERTS)
    torch.testing.assert_close(logits(small), logits(model), rtol=1e-5, atol=1e-5)
    assert {*numbers.values()} == {(4, 2)}
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "gone"),
    [("qwen3-moe-dense-block", 0), ("qwen3-moe-dense-block", 1), ("deepseek-v3", 0), ("deepseek-v3", 2)],
)
def test_blocks_of_another_kind_are_counted_again(name, gone, tmp_path):
    """With both: a block goes, and of the others half of the experts."""
    model = mixture(name)
    small, _ = written(model, tmp_path, THIRD, EXPERTS, gone=gone)
    torch.testing.assert_close(logits(small), logits(model), rtol=1e-5, atol=1e-5)


def test_neurons_of_the_blocks_that_stay_go_beside_a_block(tmp_path):
    model = tiny_model("opt")
    neurons = {"targets": ["*"], "pruner": "wanda", "pattern": "neurons", "sparsity": 0.25}
    small, numbers = written(model, tmp_path, neurons, THIRD, gone=1)
    torch.testing.assert_close(logits(small), logits(model), rtol=1e-5, atol=1e-5)
    assert numbers == {"num_hidden_layers": (3, 2), "ffn_dim": (96, 64)}
