"""2:4 weights for a GPU's sparse tensor cores, on a pretended GPU: torch packs them as on a real one, but its products
need the hardware, so that models with products have a class of the test's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.two_of_four import two_of_four
from torch import nn
from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS

from compressx import ArtifactError, UnsupportedModelError
from compressx.masks import semi_structured, tensor_cores
from compressx.masks.tensor_cores import check_device, is_two_four
from compressx.testing import tiny_model, tiny_tokens

NOT_FITTING = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
"""96 input features, where 64 are asked for."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    SparseSemiStructuredTensorCUTLASS._load_dispatch_table()
    monkeypatch.setattr(SparseSemiStructuredTensorCUTLASS, "_PROTOTYPE_WARNING_SHOWN", True)  # else imports a compiler
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)  # it packs on a GPU only
    with pretended_accelerator():
        yield torch.device("cuda", 0)


def pruned(architecture: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a tiny model whose linears are 2:4 but for the head."""
    model = tiny_model(architecture, dtype=dtype)
    two_of_four(model).apply(model)
    return model


def layout(packed: Callable[[torch.Tensor], torch.Tensor], backend: str = "test") -> Any:
    """Make a class with CUTLASS's constraints that keeps weights as a function gives them."""
    constraints = SparseSemiStructuredTensorCUTLASS._DTYPE_SHAPE_CONSTRAINTS
    return type("Layout", (), {
        "BACKEND": backend, "_DTYPE_SHAPE_CONSTRAINTS": constraints, "from_dense": staticmethod(packed)
    })  # fmt: skip


DENSE = layout(torch.clone)


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights stay as they are, so that every step but the packing is the real one."""
    monkeypatch.setattr(tensor_cores, "_classes", lambda: [DENSE])


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


# --- what is converted


def test_torch_packs_every_two_four_weight_that_fits_and_nothing_is_lost(gpu, monkeypatch) -> None:
    monkeypatch.setattr(tensor_cores, "_trial", lambda *_: "")
    model = pruned("qwen2").to(gpu)
    before = {name: (m.weight.detach().clone(), m.bias) for name, m in linears(model).items()}
    found = semi_structured(model)
    assert [*found.names] == [name for name in before if name not in NOT_FITTING]
    assert set(found.reasons) == {*NOT_FITTING, "lm_head"}
    for name, (weight, bias) in before.items():
        module = model.get_submodule(name)
        packed = isinstance(module.weight, SparseSemiStructuredTensorCUTLASS)
        assert packed == (name in found.names)
        assert torch.equal(module.weight.to_dense() if packed else module.weight, weight)
        assert module.bias is bias
        assert not (packed and module.weight.requires_grad)


def test_the_reasons_say_which_shape_is_asked_for_and_how_far_a_weight_is_from_two_four(gpu, dense) -> None:
    reasons = semi_structured(pruned().to(gpu)).reasons
    assert reasons[NOT_FITTING[0]] == (
        "[64, 96] are no multiples of [32, 64] [out_features, in_features], which test asks for in bfloat16"
    )
    assert reasons["lm_head"] == 'not 2:4: 100.00% of its groups of 4 keep more than 2; prune it with pattern: "2:4"'


def test_a_single_group_with_three_kept_weights_keeps_a_linear_dense(gpu, dense) -> None:
    model = pruned()
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data.view(64, -1, 4)[5, 3] = 1.0
    reasons = semi_structured(model.to(gpu)).reasons
    assert reasons["model.layers.0.self_attn.q_proj"].startswith("not 2:4: 0.10% of its groups of 4 keep more than 2")


def test_named_linears_alone_are_converted(gpu, dense) -> None:
    model = pruned().to(gpu)
    name = "model.layers.1.self_attn.o_proj"
    before = {n: m.weight for n, m in linears(model).items()}
    assert semi_structured(model, [name, name]) == tensor_cores.Converted((name,), {})
    assert [n for n, m in linears(model).items() if m.weight is not before[n]] == [name]


def test_outputs_are_those_of_the_model_before(gpu, dense) -> None:
    model, ids = pruned("qwen2").to(gpu), tiny_tokens().to(gpu)
    with torch.no_grad():
        before = model(ids).logits
        assert semi_structured(model).names
        assert torch.equal(model(ids).logits, before)


class Rows(torch.Tensor):
    """A weight that can do what torch's 2:4 classes can in a product: be transposed, and multiply a matrix."""

    dense: torch.Tensor

    @staticmethod
    def __new__(cls, dense: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, dense.shape, dtype=dense.dtype, device=dense.device)
        made.dense = dense
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.t.default:
            return cls(args[0].dense.t())
        if func is torch.ops.aten.detach.default:
            return cls(args[0].dense)
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return func(*(x.dense if isinstance(x, cls) else x for x in args))
        raise NotImplementedError(func)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("strides", [(64, 64, 1), (1, 1024, 16), (64, 7, 1), (1, 1, 16)])
def test_one_token_of_several_sequences_is_multiplied_whatever_its_strides(strides, bias) -> None:
    linear = nn.Linear(64, 32, bias=bias)
    x = torch.randn(16 * 64).as_strided((16, 1, 64), strides)
    with torch.no_grad():
        expected = linear(x)
        linear.weight = nn.Parameter(Rows(linear.weight.detach()), requires_grad=False)
        linear.forward = partial(tensor_cores._multiplied_by_rows, linear.forward)
        torch.testing.assert_close(linear(x), expected)


def test_converted_linears_multiply_matrices_alone(gpu, dense, monkeypatch) -> None:
    seen: list[int] = []
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, *others: seen.append(x.dim()) or linear(x, *others))
    model = pruned().to(gpu)
    converted = semi_structured(model).names
    seen.clear()
    with torch.no_grad():
        model(tiny_tokens().to(gpu))
    assert seen.count(2) == len(converted)


def test_a_forward_that_a_library_has_put_in_place_is_called_by_converted_linears(gpu, dense) -> None:
    """accelerate, which loads models on several devices, replaces `forward` by one that moves inputs."""
    model, called = pruned().to(gpu), []
    linear = model.model.layers[0].self_attn.q_proj
    own = linear.forward
    linear.forward = lambda x: called.append(x.dim()) or own(x)
    semi_structured(model)
    with torch.no_grad():
        model(tiny_tokens().to(gpu))
    assert called == [2]


# --- what is refused


def test_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="2:4 products need an NVIDIA GPU, and the model is on cpu"):
        semi_structured(pruned())


def test_a_gpu_without_sparse_tensor_cores_is_refused(gpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(UnsupportedModelError, match=r"compute capability 8\.0 \(Ampere\) or later, and .* has 7\.5"):
        check_device(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_device(gpu)


def test_a_model_without_two_four_weights_is_refused_with_one_line_for_linears_that_are_alike(gpu, dense) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        semi_structured(pruned(dtype=torch.float32).to(gpu))
    assert str(refused.value).startswith("LlamaForCausalLM: 22 of 22 linears cannot be converted to 2:4:\n")
    assert "model.layers.0-2.mlp.gate_proj: float32; 2:4 products are of float16 and bfloat16" in str(refused.value)


def test_a_named_linear_that_does_not_fit_is_refused_and_nothing_is_changed(gpu, dense) -> None:
    model = pruned().to(gpu)
    before = {n: m.weight for n, m in linears(model).items()}
    with pytest.raises(UnsupportedModelError, match=r"1 of 2 linears cannot be converted to 2:4:\n.*0\.mlp\.down_proj"):
        semi_structured(model, ["model.layers.0.self_attn.q_proj", NOT_FITTING[0]])
    assert all(m.weight is before[n] for n, m in linears(model).items())
    with pytest.raises(ArtifactError, match=r"no linear 'q_prj'; .*valid: "):
        semi_structured(model, ["q_prj"])


@pytest.mark.parametrize(
    ("architecture", "name", "reason"),
    [
        ("gpt2", "transformer.h.0.mlp.c_fc", "stored as [in, out]; only an nn.Linear can be converted"),
        ("mixtral", "model.layers.0.mlp.experts.down_proj.1", "one of several experts in one tensor; only"),
        ("llama-tied", "lm_head", "its weight is tied to model.embed_tokens.weight"),
    ],
)  # fmt: skip
def test_weights_that_are_no_linears_of_their_own_are_refused(gpu, dense, architecture, name, reason) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        semi_structured(tiny_model(architecture, dtype=torch.float16).to(gpu), [name])
    assert reason in str(refused.value)


def test_a_converted_model_is_not_saved(gpu, dense, tmp_path) -> None:
    model = pruned().to(gpu)
    semi_structured(model, ["model.layers.1.mlp.up_proj"])
    said = r"model\.layers\.1\.mlp\.up_proj: its weight is in a GPU's 2:4 layout and cannot be saved; save the model"
    with pytest.raises(ArtifactError, match=said):
        model.state_dict()
    with pytest.raises(ArtifactError, match=said):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.glob("*.safetensors")]


def test_held_masks_are_made_permanent_first(gpu, dense) -> None:
    model = pruned()
    two_of_four(model).to_torch_ao(model)
    with pytest.raises(ArtifactError, match="cannot be converted to 2:4 while its weights are parametrized"):
        semi_structured(model)


# --- which class multiplies


def raising(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("CUDA error: architecture mismatch")


def swapped(weight: torch.Tensor) -> torch.Tensor:
    """Take one of the six pairs of places for another."""
    groups = weight.clone().view(len(weight), -1, 4)
    last = (groups != 0).sum(dim=2).eq(2) & (groups[..., 2:] != 0).all(dim=2)
    groups[last] = groups[last].flip(1)
    return groups.view_as(weight)


@pytest.mark.parametrize(("packed", "why"), [
    (raising, "broken: CUDA error: architecture mismatch"), (swapped, "broken: a small trial gave a wrong product"),
])  # fmt: skip
def test_a_class_that_fails_on_this_gpu_or_is_wrong_is_passed_over_and_named_if_none_is_left(
    gpu, monkeypatch, packed, why
) -> None:
    broken = layout(packed, "broken")
    monkeypatch.setattr(tensor_cores, "_classes", lambda: [broken, DENSE])
    assert semi_structured(pruned().to(gpu)).names
    monkeypatch.setattr(tensor_cores, "_classes", lambda: [broken])
    with pytest.raises(UnsupportedModelError, match=rf"multiplies no 2:4 weights of bfloat16 on cuda:0 \({why}"):
        semi_structured(pruned().to(gpu))


def test_cusparselt_comes_first_where_torch_has_it_and_is_not_told_otherwise(monkeypatch) -> None:
    backends = lambda: [layout.BACKEND for layout in tensor_cores._classes()]  # noqa: E731
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    assert backends() == ["cusparselt", "cutlass"]
    monkeypatch.setattr(SparseSemiStructuredTensor, "_FORCE_CUTLASS", True)
    assert backends() == ["cutlass"]
    monkeypatch.setattr(SparseSemiStructuredTensor, "_FORCE_CUTLASS", False)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert backends() == ["cutlass"]


def test_a_model_is_two_four_if_a_linear_of_its_blocks_is() -> None:
    model = tiny_model("llama")
    assert not is_two_four(model)
    weight = model.model.layers[2].mlp.up_proj.weight
    weight.data.view(96, -1, 4)[..., :2] = 0
    assert is_two_four(model)
