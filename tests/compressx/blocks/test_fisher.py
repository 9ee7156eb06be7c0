"""How the model's loss reacts to what linears and blocks give, against autograd through everything at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from tests.compressx.blocks.test_prune import batches, first
from torch.nn import functional

from compressx import ArtifactError, UnsupportedModelError
from compressx.blocks.fisher import _of_likelihood, divergences, drawn_labels, fisher_diagonal, gradients
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.models.blockwise import InFiles
from compressx.models.checkpoint import Checkpoint
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.runtime.ranks import Ranks
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens


def of_model(model, wanted=(), parts=None, *ranks, **told):
    """Return what is measured of the wanted linears, and of the channels of all blocks."""
    parts = batches() if parts is None else parts
    return fisher_diagonal(InMemory(model), survey(model), wanted, parts, *ranks, **told)


def by_autograd(model, parts):
    """Return the gradients of the likelihood at every output of a linear and a block, batch by batch."""
    found, generator = survey(model), torch.Generator().manual_seed(0)
    modules = {n: x.module for n, x in found.linears.items() if ".experts." not in n} | dict(found.blocks)
    at = {name: [] for name in modules}
    for ids in parts:
        left = {}

        def keep(name, out, left=left):
            left[name] = first(out)

        with ExitStack() as stack:
            for name, module in modules.items():
                stack.callback(module.register_forward_hook(lambda m, a, out, n=name: keep(n, out)).remove)
            logits = model(ids, use_cache=False).logits
        labels = torch.cat([drawn_labels(x.float(), generator) for x in logits.detach()])
        loss = functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        for name, gradient in zip(left, torch.autograd.grad(loss, list(left.values())), strict=True):
            at[name].append(gradient.view(*ids.shape, -1))
    return at


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_gradients_and_their_mean_squares_and_the_shares_of_channels_are_those_of_autograd(architecture):
    model = tiny_model(architecture)
    found = survey(model)
    parts = tiny_tokens(sequences=5).split(2)
    measured = of_model(model, found.linears, parts)
    got = gradients(InMemory(model), found, found.blocks, parts)
    assert list(got) == list(measured.channels) == list(found.blocks)
    assert measured.linears.keys() == found.linears.keys()
    for name, its in by_autograd(model, parts).items():
        squares = torch.cat(its).double().flatten(0, -2).square()
        if name in found.linears:
            rows = squares.mean(dim=0)
            torch.testing.assert_close(
                measured.linears[name].double(), rows, rtol=1e-3, atol=1e-3 * float(rows.max()), msg=name
            )
            continue
        for mine, others in zip(got[name], its, strict=True):
            torch.testing.assert_close(mine, others, rtol=1e-3, atol=1e-4 * float(others.abs().max()))
        shares = (squares / squares.sum(dim=-1, keepdim=True)).mean(dim=0)
        torch.testing.assert_close(measured.channels[name].double(), shares, rtol=1e-3, atol=1e-6)
        assert float(measured.channels[name].sum()) == pytest.approx(1.0, rel=1e-5)
    assert all(p.grad is None for p in model.parameters())


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
        of_model(model)


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
        of_model(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_models_reactions_and_divergences_are_near_those_of_float32(dtype):
    narrow, wide = (tiny_model("llama", dtype=d) for d in (dtype, torch.float32))
    parts = tiny_tokens(sequences=32).split(8)
    got, expected = (of_model(m, (), parts[:1]).channels for m in (narrow, wide))
    at, expected_at = (gradients(InMemory(m), survey(m), survey(m).blocks, parts) for m in (narrow, wide))
    change = torch.randn(8, *parts[0].shape[1:], 64, generator=torch.Generator().manual_seed(0))
    for fqn in expected:
        torch.testing.assert_close(got[fqn], expected[fqn], rtol=0.2, atol=1e-3)
        assert at[fqn][0].dtype == dtype
        mine, others = (torch.stack([divergences(change, g) for g in x[fqn]]).mean() for x in (at, expected_at))
        assert float(mine) == pytest.approx(float(others), rel=0.2)


def test_labels_are_drawn_from_the_predictions():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0], [3.0, -1.0, 0.5, 0.0]])
    generator = torch.Generator().manual_seed(0)
    labels = drawn_labels(logits.repeat_interleave(40000, dim=0), generator).view(2, -1)
    shares = torch.stack([labels.eq(label).double().mean(dim=1) for label in range(4)], dim=1)
    torch.testing.assert_close(shares, logits.double().softmax(dim=-1), rtol=0, atol=0.01)  # four standard deviations
    assert shares[0, 2] == 0


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_numbers_that_are_not_finite_are_an_error_that_names_the_weight(name):
    model = tiny_model("llama")
    weight = model.get_parameter(name)
    for value, error, message in (
        (torch.nan, ArtifactError, rf"^{name} has NaN"),
        (torch.finfo(torch.float32).max, UnsupportedModelError, "on the calibration text"),
    ):
        weight.data[0, 0] = value
        with pytest.raises(error, match=message):
            of_model(model, survey(model).linears)


def test_rows_come_from_the_first_windows_and_channels_alone_from_fewer(monkeypatch):
    monkeypatch.setattr("compressx.blocks.fisher.ROW_WINDOWS", 4)
    monkeypatch.setattr("compressx.blocks.fisher.CHANNEL_WINDOWS", 2)
    model, told = tiny_model("llama"), []
    parts, wanted = tiny_tokens(sequences=8).split(2), ["model.layers.1.mlp.up_proj"]
    rows, enough = (of_model(model, wanted, x).linears for x in (parts, parts[:2]))
    assert list(rows) == wanted
    assert torch.equal(rows[wanted[0]], enough[wanted[0]])
    alone = of_model(model, (), [torch.cat(parts)], progress=lambda *counts: told.append(counts))
    assert told == [(0, 2)]
    assert alone.linears == {}
    expected = of_model(model, wanted, parts[:1]).channels
    assert list(expected) == list(alone.channels)
    assert all(torch.equal(its, expected[fqn]) for fqn, its in alone.channels.items())


def test_of_several_processes_each_takes_its_part_of_the_windows_that_rows_come_from(monkeypatch):
    monkeypatch.setattr("compressx.blocks.fisher.ROW_WINDOWS", 4)
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: None)  # the others say nothing
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: [value])
    model, told = tiny_model("llama"), []
    linears, parts = survey(model).linears, tiny_tokens(sequences=8).split(2)
    got = of_model(model, linears, parts, Ranks(0, 2), progress=lambda *x: told.append(x)).linears
    first = of_model(model, linears, parts[:1]).linears
    assert told == [(0, 2)]
    assert all(torch.equal(its, first[name]) for name, its in got.items())


def test_shares_of_channels_are_those_of_all_processes_tokens(monkeypatch):
    model, added = tiny_model("llama"), []
    parts = tiny_tokens(sequences=8).split(2)
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: [value])
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: added.append(tensor.clone()))
    other = of_model(model, (), parts[1:2])
    theirs = iter([*added])
    mine = of_model(model, (), parts[:1])
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: tensor.add_(next(theirs)))
    got = of_model(model, (), parts[:1], Ranks(0, 2))
    for fqn, its in got.channels.items():  # as many tokens on either
        torch.testing.assert_close(its, (mine.channels[fqn] + other.channels[fqn]) / 2)


def test_windows_are_added_until_every_expert_is_reached(monkeypatch):
    monkeypatch.setattr("compressx.blocks.fisher.ROW_WINDOWS", 1)
    model, told = tiny_model("mixtral"), []
    parts = tiny_tokens(sequences=64, length=2).split(4)  # of two tokens: few of the experts
    of_model(model, survey(model).linears, parts, progress=lambda *x: told.append(x))
    assert 1 < len(told) < 64
    assert set(told[1:]) == {(1, 1)}


@pytest.mark.parametrize(("room", "readings"), [(2**40, 2), (2 * 2**16, 4), (2**16, 8), (0, 8)])
def test_a_streamed_models_sensitivities_are_those_of_the_loaded_one(room, readings, tmp_path, monkeypatch):
    """Twice for as many of the four batches as there is room for: each has 64 tokens, 64 wide, at 4 places."""
    monkeypatch.setattr("compressx.blocks.fisher.free_memory", lambda *_: 2 * room)
    monkeypatch.setattr("compressx.blocks.fisher._STATES_SHARE", 0.5)
    model, parts = tiny_model("llama"), batches(2)
    model.save_pretrained(tmp_path)
    streamed = open_streamed(Checkpoint(str(tmp_path)))
    read: list[str] = []

    def materialise(self, fqn, own=StreamedModel.materialise):
        read.append(fqn)
        return own(self, fqn)

    monkeypatch.setattr(StreamedModel, "materialise", materialise)
    both = InMemory(model), streamed
    found = [fisher_diagonal(x, survey(x.model), survey(x.model).linears, parts) for x in both]
    assert [read.count(fqn) for fqn in found[0].channels] == [readings] * 3
    at = [gradients(x, survey(x.model), found[0].channels, parts) for x in both]
    for loaded, got in ((x.linears for x in found), (x.channels for x in found), at):
        assert loaded.keys() == got.keys()
        assert all(torch.equal(torch.stack([*its]), torch.stack([*got[name]])) for name, its in loaded.items())
    assert all(p.is_meta for p in streamed.model.parameters())
