"""The losses against slow float64 references, whatever the size of the chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressx.training.finetune import distillation_loss, next_token_loss

ROWS, VOCABULARY = 11, 23


def logits(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*(shape or (ROWS, VOCABULARY)), generator=generator, dtype=torch.float64)).to(dtype)


def reference(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum p log(p / q) literally."""
    p, q = torch.softmax(teacher, -1), torch.softmax(student, -1)
    return (p * (p.log() - q.log())).sum() / len(student)


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_the_divergence_and_its_gradient_are_those_of_the_definition(rows: int) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    expected = reference(student, teacher)
    (wanted,) = torch.autograd.grad(expected, student)
    loss = distillation_loss(student, teacher, rows=rows)
    (3.0 * loss).backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(student.grad, 3.0 * wanted, rtol=1e-10, atol=1e-14)
    assert teacher.grad is None


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_the_next_token_loss_and_its_gradient_are_those_of_the_definition(rows: int) -> None:
    student = logits(2, 3, 5, VOCABULARY).requires_grad_()
    ids = torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(0))
    likelihoods = student.log_softmax(-1)
    expected = -sum(likelihoods[w, t, ids[w, t + 1]] for w in range(3) for t in range(4)) / 12
    (wanted,) = torch.autograd.grad(expected, student)  # type: ignore[arg-type]
    loss = next_token_loss(student, ids, rows=rows)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(student.grad, wanted, rtol=1e-10, atol=1e-14)
    assert student.grad is not None
    assert not student.grad[:, -1].any(), "nothing follows the last token"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_in_float32_and_their_gradient_is_narrow(dtype: torch.dtype) -> None:
    student, teacher = logits(4, dtype=dtype).requires_grad_(), logits(5, dtype=dtype)
    loss = distillation_loss(student, teacher)
    loss.backward()  # type: ignore[no-untyped-call]
    wide = student.detach().double().requires_grad_()
    expected = reference(wide, teacher.double())
    (wanted,) = torch.autograd.grad(expected, wide)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert student.grad is not None
    assert student.grad.dtype == dtype
    torch.testing.assert_close(student.grad.double(), wanted, rtol=2**-7, atol=1e-6)
