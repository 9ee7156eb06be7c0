"""Forward passes are counted without numbers: held against torch's counter and the memory of passes that run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from compressx.api.work import Work
from compressx.blocks.hooks import inputs_watched
from compressx.costs.forward import Forward, backwards, forward
from compressx.costs.operations import Counting
from compressx.models.architecture import survey
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model

WINDOWS, TOKENS = 2, 24


def empty(architecture: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = TINY_CONFIGS[architecture]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**values, **changes})).eval()


def counted(architecture: str, products: str = "float32") -> Forward:
    model = empty(architecture)
    return forward(model, survey(model), WINDOWS, TOKENS, products)


def ran(architecture: str) -> tuple[Any, torch.Tensor]:
    """A model whose attention is a sequence of products, which torch's counter knows on every device."""
    model = tiny_model(architecture)
    if architecture in ("mixtral", "gpt-oss"):
        model.config._experts_implementation = "eager"
    return model, torch.randint(0, 128, (WINDOWS, TOKENS))


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_the_flops_of_a_forward_pass_are_those_that_torch_counts(architecture):
    model, ids = ran(architecture)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    assert counted(architecture).work.flops == counter.get_total_flops()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "mixtral"])
def test_each_block_has_its_own_count_and_what_lies_outside_has_the_rest(architecture):
    model, ids = ran(architecture)
    found = survey(model)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    of_modules = counter.get_flop_counts()
    passed = counted(architecture)
    for fqn, block in passed.blocks.items():
        (name,) = (n for n in of_modules if n.endswith(f".{fqn}"))
        assert block.work.flops == sum(of_modules[name].values())
    assert passed.outside.work.flops == 2 * ids.numel() * 128 * 64  # the head
    assert set(passed.blocks) == set(found.blocks)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi", "cohere", "falcon", "phi3"])
def test_linears_share_an_input_where_they_are_handed_the_same_tensor(architecture):
    model, ids = ran(architecture)
    fqn, found = "", survey(model)
    fqn = next(iter(found.blocks))
    linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")}
    seen: list[tuple[torch.Tensor, str]] = []
    expected: dict[str, str] = {}

    def take(name: str, x: torch.Tensor) -> None:
        expected[name] = next((of for other, of in seen if other is x), name)
        seen.append((x, expected[name]))

    with torch.no_grad(), inputs_watched(linears, take):
        model(ids, use_cache=False)
    assert {name: x.of for name, x in counted(architecture).blocks[fqn].inputs.items()} == expected


def test_an_expert_gets_its_share_of_the_tokens():
    inputs = next(iter(counted("mixtral").blocks.values())).inputs
    assert {x.share for name, x in inputs.items() if ".experts." in name} == {2 / 4}
    assert {x.share for name, x in inputs.items() if ".experts." not in name} == {1.0}


def test_the_work_before_each_linear_is_known():
    block = next(iter(counted("llama").blocks.values()))
    left = {name.rpartition(".")[2]: block.work.flops - x.before.flops for name, x in block.inputs.items()}
    products = {
        name: 2 * WINDOWS * TOKENS * 64 * width for name, width in {"down": 96, "o": 64, "q": 64, "k": 32}.items()
    }
    assert left["down_proj"] == products["down"]
    assert left["o_proj"] == 3 * products["down"] + products["o"]
    assert left["q_proj"] == block.work.flops
    assert left["k_proj"] == block.work.flops - products["q"]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "bloom", "olmo2"])
def test_the_memory_of_a_pass_is_that_of_the_tensors_which_a_real_pass_holds_at_once(architecture):
    model, ids = ran(architecture)
    real = Counting("float32")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(ids, use_cache=False)  # what is computed once a model is there now
        with real:
            model(ids, use_cache=False)
    found = counted(architecture)
    most = max(found.outside.work.memory, *(b.work.memory for b in found.blocks.values()))
    # The real pass multiplies attention out, tokens x tokens numbers for each head and what softmax makes of them.
    matrices = 4 * WINDOWS * 4 * TOKENS * TOKENS * 4
    assert 0.9 * real.peak - matrices <= most <= 1.1 * real.peak


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "mixtral"])
def test_a_graph_is_counted_as_the_tensors_that_autograd_keeps_of_a_real_pass(architecture):
    model, ids = ran(architecture)
    if architecture == "mixtral":
        model.config._experts_implementation = "grouped_mm"  # what transformers takes by itself
    found, real, kept = survey(model), Counting("float32"), dict[str, float]()
    before = 0.0

    def begin(*_: Any) -> None:
        nonlocal before
        before = real.alive

    for fqn, block in found.blocks.items():
        block.register_forward_pre_hook(begin)
        block.register_forward_hook(lambda *_, fqn=fqn: kept.update({fqn: real.alive - before}))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), real:
        model(ids, use_cache=False)
    meta = empty(architecture)
    passed = forward(meta, survey(meta), WINDOWS, TOKENS, "float32", graph=True)
    assert {fqn: block.left for fqn, block in passed.blocks.items()} == pytest.approx(kept, rel=0.1)
    output = WINDOWS * TOKENS * 64 * 4
    assert {block.left for block in counted(architecture).blocks.values()} == {output}
    assert min(kept.values()) > 5 * output


def test_the_logits_are_held_after_the_last_block():
    model = empty("llama", vocab_size=4096)
    found = forward(model, survey(model), WINDOWS, TOKENS, "float32")
    logits = WINDOWS * TOKENS * 4096 * 4
    assert logits <= found.outside.work.memory <= 1.3 * logits


def test_narrow_products_convert_their_factors_which_is_counted_as_bytes():
    wide, narrow = counted("llama").work, counted("llama", "bfloat16").work
    assert (narrow["bfloat16"], narrow["float32"]) == (wide["float32"], 0)
    assert (narrow["attention16"], narrow["attention"]) == (wide["attention"], 0)
    assert narrow["moved"] > wide["moved"]


def test_longer_windows_cost_more_only_by_their_attention():
    model = empty("llama")
    short, long = (forward(model, survey(model), n, 48 // n, "float32").work for n in (2, 1))
    assert 2 * short["attention"] == long["attention"]
    # Some versions of transformers work out the angles of the positions for each window, and some once for all.
    angles = 2 * 24 * 8
    assert long["float32"] - short["float32"] in (0, angles)


@pytest.mark.parametrize("weights", [True, False])
def test_a_backward_pass_has_the_flops_that_torch_counts(weights):
    model, ids = ran("gpt-neox")
    block = next(iter(survey(model).blocks.values()))
    with torch.no_grad():
        x = model.base_model.embed_in(ids)
        rotary = model.base_model.rotary_emb(x, torch.arange(TOKENS)[None])
    for parameter in block.parameters():
        parameter.requires_grad_(weights)
    # Products alone: attention that is multiplied out has four products backwards, the fused one five.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = block(x.requires_grad_(), position_embeddings=rotary)
        ahead = counter.get_total_flops()
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    passed = next(iter(counted("gpt-neox").blocks.values())).work
    attention = passed["attention"]
    assert backwards(passed, weights=weights)["float32"] == counter.get_total_flops() - ahead - 2 * attention
    assert backwards(passed, weights=weights)["attention"] == 2.5 * attention


def test_a_model_whose_numbers_decide_is_refused_by_name():
    class Deciding(torch.nn.Module):
        def forward(self, ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return ids.nonzero()

    class Nothing:
        blocks, linears, outside = {}, {}, {}

    with pytest.raises(UnsupportedModelError, match="Deciding: its forward pass cannot be counted without numbers"):
        forward(Deciding(), Nothing(), 1, 4, "float32")  # type: ignore[arg-type]


def test_works_add_up_and_keep_the_larger_memory():
    a, b = Work.of(3.0, float32=2, moved=1), Work.of(5.0, float32=4)
    assert 2 * (a + b) == Work({"float32": 12, "moved": 2}, 5.0)
    assert (a + b).flops == 6
    with pytest.raises(ValueError, match=r"work is counted as float32, .*; got 'flops'"):
        Work.of(flops=1)
