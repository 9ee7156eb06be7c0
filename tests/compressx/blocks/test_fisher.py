"""How the model's loss reacts to what linears and blocks give, against autograd through everything at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from tests.compressx.blocks.test_prune import batches
from torch.nn import functional

from compressx import ArtifactError, UnsupportedModelError
from compressx.blocks.fisher import _of_likelihood, divergences, drawn_labels, fisher_diagonal, gradients
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.models.checkpoint import Checkpoint
from compressx.models.hidden import InFiles
from compressx.models.streaming import open_streamed
from compressx.runtime.ranks import Ranks
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

DENSE = [a for a in TINY_CONFIGS if a != "mixtral"]


def output_gradients(model, ids, loss):
    """Return the gradient of a loss with respect to every linear's output, [batch, tokens, out_features]."""
    linears = survey(model).linears
    outputs = {}
    hooks = [
        x.module.register_forward_hook(lambda m, a, out, n=n: outputs.__setitem__(n, out)) for n, x in linears.items()
    ]
    value = loss(model(ids, use_cache=False))
    for hook in hooks:
        hook.remove()
    return dict(zip(outputs, torch.autograd.grad(value, list(outputs.values())), strict=True))


@pytest.mark.parametrize("architecture", DENSE)
def test_the_models_sensitivities_are_mean_squares_of_the_gradients_that_autograd_gives(architecture):
    model = tiny_model(architecture)
    found = survey(model)
    parts = tiny_tokens(sequences=4).split(2)
    measured = fisher_diagonal(InMemory(model), found, found.linears, parts).linears
    generator = torch.Generator().manual_seed(0)
    squares = {name: [] for name in found.linears}
    for ids in parts:

        def likelihood(output):
            labels = [drawn_labels(x.float(), generator) for x in output.logits.detach()]
            return functional.cross_entropy(output.logits.flatten(0, 1), torch.cat(labels), reduction="sum")

        for name, gradient in output_gradients(model, ids, likelihood).items():
            squares[name].append(gradient.double().square())
    for name, expected in squares.items():
        rows = torch.cat(expected).flatten(0, -2).mean(dim=0)
        torch.testing.assert_close(measured[name].double(), rows, rtol=1e-3, atol=1e-3 * float(rows.max()))
    assert all(p.grad is None for p in model.parameters())


def gradients_at_blocks(model, parts):
    """Return the gradients of the likelihood with respect to every block's output, batch by batch."""
    found, generator = survey(model), torch.Generator().manual_seed(0)
    at = {fqn: [] for fqn in found.blocks}
    for ids in parts:
        left = {}

        def keep(fqn, out, left=left):
            left[fqn] = out[0] if isinstance(out, tuple) else out

        with ExitStack() as stack:
            for fqn, block in found.blocks.items():
                stack.callback(block.register_forward_hook(lambda m, a, out, f=fqn: keep(f, out)).remove)
            logits = model(ids, use_cache=False).logits
        labels = torch.cat([drawn_labels(x.float(), generator) for x in logits.detach()])
        loss = functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        for fqn, gradient in zip(left, torch.autograd.grad(loss, list(left.values())), strict=True):
            at[fqn].append(gradient.view(*ids.shape, -1))
    return at


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_gradients_at_blocks_and_shares_of_channels_in_them_are_those_of_autograd(architecture):
    model = tiny_model(architecture)
    found = survey(model)
    parts = tiny_tokens(sequences=5).split(2)
    measured = fisher_diagonal(InMemory(model), found, (), parts)
    got = gradients(InMemory(model), found, found.blocks, parts)
    assert measured.linears == {}
    assert list(measured.channels) == list(found.blocks)
    expected = gradients_at_blocks(model, parts)
    assert list(got) == list(found.blocks)
    for fqn, its in expected.items():
        for mine, others in zip(got[fqn], its, strict=True):
            torch.testing.assert_close(mine, others, rtol=1e-3, atol=1e-4 * float(others.abs().max()))
        squares = torch.cat(its).double().flatten(0, -2).square()
        shares = (squares / squares.sum(dim=-1, keepdim=True)).mean(dim=0)
        torch.testing.assert_close(measured.channels[fqn].double(), shares, rtol=1e-3, atol=1e-6)
        assert float(measured.channels[fqn].sum()) == pytest.approx(1.0, rel=1e-5)


def test_gradients_are_kept_where_that_is_asked(tmp_path):
    model = tiny_model("llama")
    parts = tiny_tokens(sequences=4).split(2)
    found = survey(model)
    told = []
    in_memory = gradients(InMemory(model), found, found.blocks, parts, progress=lambda *counts: told.append(counts))
    in_files = gradients(InMemory(model), found, found.blocks, parts, InFiles(tmp_path))
    assert told == [(0, 4), (2, 4)]
    assert len(list(tmp_path.iterdir())) == 6
    for fqn, its in in_memory.items():
        assert all(torch.equal(a, b) for a, b in zip(its, in_files[fqn], strict=True))


def test_a_loss_that_does_not_react_is_refused():
    model = tiny_model("llama")
    model.lm_head.weight.data.zero_()
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0: the model's loss does not depend"):
        fisher_diagonal(InMemory(model), survey(model), (), batches())


@pytest.mark.parametrize(("share", "refused"), [(0.5, True), (0.4, False)])
def test_gradients_that_are_zero_at_half_of_the_tokens_are_refused(share, refused, monkeypatch):
    model = tiny_model("llama")
    (ids,) = parts = [tiny_tokens(sequences=4)]
    gone = round(share * ids.shape[1])

    def faded(*given):
        return _of_likelihood(*given) * (torch.arange(ids.shape[1]) >= gone)[:, None]

    monkeypatch.setattr("compressx.blocks.fisher._of_likelihood", faded)
    arguments = InMemory(model), survey(model), ["model.layers.2"], parts
    if not refused:
        assert gradients(*arguments)
        return
    with pytest.raises(
        UnsupportedModelError, match=rf"layers\.2: the gradient .* is zero at {4 * gone} of {ids.numel()} "
    ):
        gradients(*arguments)


def test_the_divergence_is_that_of_the_predictions_in_the_mean_over_labels():
    """Of one token whose output is turned to logits: half of the change's square in the Fisher matrix, so nearly KL."""
    generator = torch.Generator().manual_seed(0)
    head, output = torch.randn(7, 5, generator=generator).double(), torch.randn(5, generator=generator).double()
    change = 1e-2 * torch.randn(5, generator=generator).double()
    dense, now = ((head @ x).log_softmax(dim=-1) for x in (output, output + change))
    by_label = divergences(change.expand(7, 5), (dense.exp() - torch.eye(7)) @ head)  # of the negative log-likelihood
    expected = float((dense.exp() * (dense - now)).sum())
    assert float(dense.exp() @ by_label.double()) == pytest.approx(expected, rel=0.02)


def test_bfloat16_numbers_are_multiplied_in_float32():
    change = gradient = torch.full((1, 2, 300), 1.0078125, dtype=torch.bfloat16)  # its square has too many digits
    assert divergences(change, gradient)[0].tolist() == pytest.approx([(300 * 1.0078125**2) ** 2 / 2] * 2, rel=1e-6)


def test_gradients_that_are_not_finite_name_the_block_whose_output_they_are_of(monkeypatch):
    model = tiny_model("llama")

    def overflowing(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * torch.inf)

    model.model.layers[1].register_forward_hook(overflowing)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0: the gradient .* has NaN or infinite values"):
        fisher_diagonal(InMemory(model), survey(model), (), batches())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_models_reactions_are_near_those_of_float32(dtype):
    narrow, wide = (tiny_model("llama", dtype=d) for d in (dtype, torch.float32))
    got, expected = (
        fisher_diagonal(InMemory(m), survey(m), (), tiny_tokens(sequences=8).split(4)).channels for m in (narrow, wide)
    )
    for fqn, its in expected.items():
        torch.testing.assert_close(got[fqn], its, rtol=0.2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_divergences_by_a_16_bit_models_gradients_are_near_those_of_float32(dtype):
    narrow, wide = (tiny_model("llama", dtype=d) for d in (dtype, torch.float32))
    parts = tiny_tokens(sequences=32).split(8)
    got, expected = (gradients(InMemory(m), survey(m), survey(m).blocks, parts) for m in (narrow, wide))
    change = torch.randn(8, *parts[0].shape[1:], 64, generator=torch.Generator().manual_seed(0))
    for fqn, its in expected.items():
        assert got[fqn][0].dtype == dtype
        mine, others = (torch.stack([divergences(change, g) for g in x]).mean() for x in (got[fqn], its))
        assert float(mine) == pytest.approx(float(others), rel=0.2)


def test_labels_are_drawn_from_the_predictions():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0], [3.0, -1.0, 0.5, 0.0]])
    generator = torch.Generator().manual_seed(0)
    labels = drawn_labels(logits.repeat_interleave(40000, dim=0), generator).view(2, -1)
    shares = torch.stack([labels.eq(label).double().mean(dim=1) for label in range(4)], dim=1)
    torch.testing.assert_close(shares, logits.double().softmax(dim=-1), rtol=0, atol=0.01)  # four standard deviations
    assert shares[0, 2] == 0


@pytest.mark.parametrize("part", ["block", "head"])
def test_numbers_that_are_not_finite_are_an_error_that_names_the_weight(part):
    model = tiny_model("llama")
    found = survey(model)
    weight = model.model.layers[1].mlp.down_proj.weight if part == "block" else model.lm_head.weight
    weight.data[0, 0] = torch.nan
    name = "model.layers.1.mlp.down_proj.weight" if part == "block" else "lm_head.weight"
    with pytest.raises(ArtifactError, match=rf"^{name} has NaN"):
        fisher_diagonal(InMemory(model), found, found.linears, batches())
    weight.data[0, 0] = torch.finfo(torch.float32).max
    with pytest.raises(UnsupportedModelError, match="on the calibration text"):
        fisher_diagonal(InMemory(model), found, found.linears, batches())


def test_rows_come_from_the_first_windows(monkeypatch):
    monkeypatch.setattr("compressx.blocks.fisher.ROW_WINDOWS", 4)
    model = tiny_model("llama")
    found, parts = survey(model), tiny_tokens(sequences=8).split(2)
    few = fisher_diagonal(InMemory(model), found, found.linears, parts).linears
    first = fisher_diagonal(InMemory(model), found, found.linears, parts[:2]).linears
    for name, its in few.items():
        assert torch.equal(its, first[name])


def test_channels_alone_take_a_few_windows(monkeypatch):
    monkeypatch.setattr("compressx.blocks.fisher.CHANNEL_WINDOWS", 2)
    model, told = tiny_model("llama"), []
    found, parts = survey(model), tiny_tokens(sequences=8).split(4)
    few = fisher_diagonal(InMemory(model), found, (), parts, progress=lambda *counts: told.append(counts))
    first = fisher_diagonal(InMemory(model), found, found.linears, [parts[0][:2]])
    assert told == [(0, 2)]
    assert list(few.channels) == list(found.blocks)
    assert all(torch.equal(its, first.channels[fqn]) for fqn, its in few.channels.items())


def test_of_several_processes_each_takes_its_part_of_the_windows_that_rows_come_from(monkeypatch):
    monkeypatch.setattr("compressx.blocks.fisher.ROW_WINDOWS", 4)
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: None)  # the others say nothing
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: [value])
    model, told = tiny_model("llama"), []
    found, parts = survey(model), tiny_tokens(sequences=8).split(2)
    got = fisher_diagonal(
        InMemory(model), found, found.linears, parts, Ranks(0, 2), progress=lambda *x: told.append(x)
    ).linears
    first = fisher_diagonal(InMemory(model), found, found.linears, parts[:1]).linears
    assert told == [(0, 2)]
    assert all(torch.equal(its, first[name]) for name, its in got.items())


def test_shares_of_channels_are_those_of_all_processes_tokens(monkeypatch):
    model = tiny_model("llama")
    found, parts = survey(model), tiny_tokens(sequences=8).split(2)
    added = []
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: [value])
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: added.append(tensor.clone()))
    other = fisher_diagonal(InMemory(model), found, (), parts[1:2])
    theirs = iter([*added])
    mine = fisher_diagonal(InMemory(model), found, (), parts[:1])
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: tensor.add_(next(theirs)))
    got = fisher_diagonal(InMemory(model), found, (), parts[:1], Ranks(0, 2))
    for fqn, its in got.channels.items():  # as many tokens on either
        torch.testing.assert_close(its, (mine.channels[fqn] + other.channels[fqn]) / 2)


def test_windows_are_added_until_every_expert_is_reached(monkeypatch):
    monkeypatch.setattr("compressx.blocks.fisher.ROW_WINDOWS", 1)
    model, told = tiny_model("mixtral"), []
    found, parts = survey(model), tiny_tokens(sequences=64, length=2).split(4)  # of two tokens: few of the experts
    got = fisher_diagonal(InMemory(model), found, found.linears, parts, progress=lambda *x: told.append(x))
    assert set(got.linears) == set(found.linears)
    assert 1 < len(told) < 64
    assert set(told[1:]) == {(1, 1)}


def test_only_the_linears_that_are_wanted_are_measured():
    model = tiny_model("llama")
    name = "model.layers.1.mlp.up_proj"
    assert set(fisher_diagonal(InMemory(model), survey(model), [name], batches()).linears) == {name}


def test_progress_is_told_in_windows():
    model = tiny_model("llama")
    told = []
    linears = survey(model).linears
    parts = tiny_tokens(sequences=4).split(2)
    fisher_diagonal(InMemory(model), survey(model), linears, parts, progress=lambda *counts: told.append(counts))
    assert told == [(0, 4), (2, 4)]


def test_a_streamed_models_sensitivities_are_those_of_the_loaded_one(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    streamed = open_streamed(Checkpoint(str(tmp_path)))
    assert all(p.is_meta for p in streamed.model.parameters())
    loaded = fisher_diagonal(InMemory(model), survey(model), survey(model).linears, batches())
    got = fisher_diagonal(streamed, survey(streamed.model), survey(streamed.model).linears, batches())
    for name, its in loaded.linears.items():
        assert torch.equal(got.linears[name], its)
    assert list(got.channels) == list(survey(model).blocks)
    assert all(torch.equal(got.channels[fqn], its) for fqn, its in loaded.channels.items())
    at = [gradients(x, survey(x.model), list(got.channels), batches()) for x in (InMemory(model), streamed)]
    for fqn, its in at[0].items():
        assert all(torch.equal(a, b) for a, b in zip(its, at[1][fqn], strict=True))
    assert all(p.is_meta for p in streamed.model.parameters())
