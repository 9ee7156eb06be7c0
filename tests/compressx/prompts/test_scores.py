"""Rows of attention scores against those that the models compute themselves."""

from __future__ import annotations

from collections import Counter
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compressx.api.selector import AttentionRows
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.checkpoint import Checkpoint
from compressx.models.streaming import open_streamed
from compressx.prompts.scores import _queries, _Read, _read, check_global, global_blocks, read_scores
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

OWN_ATTENTION = ("falcon", "bloom", "gptj")
READ = [name for name in TINY_CONFIGS if name not in (*OWN_ATTENTION, "mistral", "gpt-oss")]  # the last has sinks, too
WHOLE = {"gemma2": (1,), "gemma3": (1,), "qwen3.5": (1, 2), "gemma4": (1, 2)}


def read(model: Any, ids: Tensor, *blocks: int, **more: Any) -> Tensor:
    return read_scores(InMemory(model), architecture_of(model), ids, AttentionRows(blocks, **more))


def prompt(length: int = 24) -> Tensor:
    return tiny_tokens(sequences=1, length=length)[0]


@torch.no_grad()
def attention_of(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the attention [heads, n, n] of each of three blocks, as the model says; of one without, the next one's."""
    model.set_attn_implementation("eager")
    matrices = [block[0] for block in model(ids[None], output_attentions=True, use_cache=False).attentions]
    return [*matrices[: 3 - len(matrices)], *matrices]


def closeness(scores: Tensor, expected: Tensor) -> float:
    return float((scores.softmax(-1) - expected).abs().max())


@pytest.mark.parametrize("architecture", READ)
def test_the_softmax_of_the_scores_is_the_attention_of_the_model(architecture: str) -> None:
    model, ids = tiny_model(architecture), prompt()
    if architecture == "gemma3":  # its norms and its scaling leave the attention of a tiny model flat
        for block in model.model.layers:
            block.self_attn.q_norm.weight.data.fill_(16.0)
    blocks = global_blocks(model)
    assert blocks == WHOLE.get(architecture, (0, 1, 2))
    found = read(model, ids, *blocks, queries=5)
    assert found.shape == (len(blocks), 4, 5, 24)
    assert found.dtype == torch.float32
    expected = attention_of(model, ids)
    assert closeness(found, torch.stack([expected[b][:, -5:] for b in blocks])) < 1e-5
    assert float(expected[blocks[-1]][:, -1].max()) > 2 / 24, "attention is not flat, so that errors would show"


def test_heads_and_queries_are_those_that_are_asked_for_and_later_tokens_are_not_seen() -> None:
    model, ids = tiny_model("llama"), prompt()
    whole = read(model, ids, 0, 2, queries=99)
    assert whole.shape == (2, 4, 24, 24), "a prompt has no more queries than tokens"
    assert torch.equal(whole.isneginf()[1, 2], torch.ones(24, 24).triu(1).bool())
    assert torch.equal(read(model, ids, 0, 2, heads=(3, 1), queries=2), whole[:, [3, 1], -2:])
    assert read(model, ids, queries=3).shape == (0, 0, 3, 24)


@pytest.mark.parametrize(("architecture", "block"), [("falcon", "FalconDecoderLayer"), ("gptj", "GPTJBlock")])
def test_attention_that_is_not_transformers_interface_is_refused_by_name(architecture: str, block: str) -> None:
    message = f"transformer.h.1: the attention of {block} does not go through .*use a selector that reads no attention"
    with pytest.raises(UnsupportedModelError, match=message):
        read(tiny_model(architecture), prompt(), 1)


def test_a_model_of_windows_alone_has_no_block_that_can_be_read() -> None:
    model = tiny_model("mistral")
    assert global_blocks(model) == ()
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1: its attention does not see .*such as recent"):
        read(model, prompt(), 1)


def test_a_block_with_a_window_is_refused_and_the_nearest_without_one_named() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    model = tiny_model("gemma3")
    model.config.layer_types = kinds * 2
    found = architecture_of(tiny_model("gemma3"))
    named = type(found)(dict.fromkeys(map(str, range(12))), {}, {}, {})
    for block, near in ((0, 5), (7, 5), (9, 11)):
        with pytest.raises(UnsupportedModelError, match=rf"{block}: .*\(a sliding window, .*; use block {near}$"):
            check_global(model, named, [block])
    for block in (-1, 12):
        with pytest.raises(UnsupportedModelError, match=f"has no block {block}; expected 0 to 11"):
            check_global(model, named, [block])


def test_of_the_last_block_only_queries_and_keys_are_computed_and_of_those_after_it_nothing() -> None:
    model, calls = tiny_model("llama"), Counter[str]()
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "o_proj", "down_proj", "lm_head")):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    read(model, prompt(), 1)
    inside = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    assert calls == {**{f"model.layers.0.{name}": 1 for name in inside}, f"model.layers.1.{inside[0]}": 1}


def test_the_models_own_attention_is_back_afterwards_and_after_an_error_too() -> None:
    model, ids = tiny_model("llama"), prompt()
    with torch.no_grad():
        expected = model(ids[None]).logits
    read(model, ids, 0, 2)
    assert model.config._attn_implementation == "sdpa"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.layers[1].self_attn.q_proj, "forward", lambda _: pytest.fail("a defect"))
        with pytest.raises(pytest.fail.Exception, match="a defect"):
            read(model, ids, 1)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(model(ids[None]).logits, expected)


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in (made if isinstance(made, tuple | list) else (made,)) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


def test_no_tensor_has_as_many_elements_as_a_matrix_of_attention() -> None:
    with Largest() as mode:
        read(tiny_model("llama"), prompt(2048), 2, queries=4)
    assert mode.elements <= 3 * 96 * 2048, "hidden states"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_model_that_stays_on_disk_has_the_same_scores(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    streamed, wanted = open_streamed(Checkpoint(str(tmp_path))), AttentionRows((1,), (0, 2), 3)
    found = read_scores(streamed, architecture_of(streamed.model), prompt(), wanted)
    assert torch.equal(found, read_scores(InMemory(model), architecture_of(model), prompt(), wanted))
    assert all(parameter.is_meta for parameter in streamed.model.parameters())


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "opt"])
def test_the_kind_of_mask_that_an_implementation_takes_makes_no_difference(architecture: str) -> None:
    model, ids = tiny_model(architecture), prompt()
    model.set_attn_implementation("eager")  # of float
    expected = read(model, ids, 1, queries=24)
    assert int(expected.isneginf().sum()) == 4 * 24 * 23 // 2
    if model._supports_sdpa:  # none, or of bool
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(read(model, ids, 1, queries=24), expected)
    if 0 in global_blocks(model):  # flex attention has its own, and compiles itself to run a block before the last
        expected = read(model, ids, 0, queries=24)
        model.set_attn_implementation("flex_attention")
        torch.testing.assert_close(read(model, ids, 0, queries=24), expected)


def test_dropout_of_a_model_in_training_is_off_and_its_modes_are_kept() -> None:
    model, ids = tiny_model("gpt2"), prompt()
    expected = read(model, ids, 2, queries=2)
    model.train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    assert torch.equal(read(model, ids, 2, queries=2), expected)
    assert [module.training for module in model.modules()] == modes


def test_adapters_count_and_virtual_tokens_are_refused() -> None:
    peft = pytest.importorskip("peft")
    dense, ids = tiny_model("llama"), prompt()
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama"), lora).eval()
    found = read(adapted, ids, 1)
    assert not torch.allclose(found, read(dense, ids, 1), atol=1e-2)
    torch.testing.assert_close(found, read(adapted.merge_and_unload(), ids, 1), atol=1e-4, rtol=1e-4)
    tuned = peft.get_peft_model(dense, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with pytest.raises(UnsupportedModelError, match=r"has 28 keys for a prompt of 24 tokens.* take virtual tokens"):
        read(tuned, ids, 1)


def test_weights_that_make_no_number_of_the_scores_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[0].self_attn.k_proj.weight.data[0] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0: its attention scores are NaN; check the"):
        read(model, prompt(), 0)


def scores_of(query: Tensor, key: Tensor, mask: Tensor | None = None, **told: float) -> Tensor:
    """Return the scores of the last two queries, as an attention function is told to compute them."""
    context = copy_context()
    context.run(_queries.set, 2)
    with pytest.raises(_Read) as read:
        context.run(_read, nn.Identity(), query, key, key, mask, **told)
    return read.value.scores


def query_and_key() -> tuple[Tensor, Tensor]:
    query, key = (torch.randn(1, heads, 6, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    return query, key


def products(query: Tensor, key: Tensor) -> Tensor:
    return query[0].double() @ key[0].double().repeat_interleave(2, 0).mT


FUTURE = torch.ones(6, 6).triu(1).bool()


def test_scores_are_scaled_and_capped_as_the_attention_function_is_told() -> None:
    query, key = query_and_key()
    expected = (2.0 * (3.0 * products(query, key) / 2.0).tanh()).masked_fill(FUTURE, -torch.inf)
    torch.testing.assert_close(scores_of(query, key, scaling=3.0, softcap=2.0), expected[:, -2:].float())


def test_what_a_mask_adds_is_added_for_each_head() -> None:
    query, key = query_and_key()
    slopes = torch.arange(4.0)[:, None, None] * -(torch.arange(6)[:, None] - torch.arange(6)).abs()
    mask = slopes.masked_fill(FUTURE, torch.finfo(torch.float32).min)[None]  # [1, heads, n, n], as ALiBi's
    expected = (8**-0.5 * products(query, key) + slopes).masked_fill(FUTURE, -torch.inf)
    torch.testing.assert_close(scores_of(query, key, mask), expected[:, -2:].float())


def test_products_of_few_bits_are_summed_in_float32() -> None:
    query, key = (x.bfloat16() for x in query_and_key())
    expected = (8**-0.5 * products(query, key)).masked_fill(FUTURE, -torch.inf)
    torch.testing.assert_close(scores_of(query, key), expected[:, -2:].float())
