"""How the model's loss reacts to what linears and blocks give, against autograd through everything at once."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from tests.compressx.blocks.test_prune import batches, first
from tests.compressx.built_in import BUILT_IN
from tests.compressx.pruners.problems import correlated_inputs, one_linear
from torch.nn import functional

from compressx import ArtifactError, Block, CalibrationError, UnsupportedModelError
from compressx.api.patterns import NM, Unstructured
from compressx.blocks.contract import answer_of
from compressx.blocks.fisher import (
    SquaredGradients,
    _of_likelihood,
    divergences,
    drawn_labels,
    fisher_diagonal,
    gradients,
)
from compressx.blocks.observe import SharedStatistic
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import StateFiles
from compressx.models.checkpoint import Checkpoint
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.numerics.admm import Problem
from compressx.numerics.admm import prune as solve
from compressx.runtime.ranks import Ranks
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens


def of_model(model, wanted=(), parts=None, *ranks, **told):
    """Return what is measured of the wanted linears, and of the channels of all blocks."""
    parts = batches() if parts is None else parts
    return fisher_diagonal(InMemory(model), architecture_of(model), wanted, parts, *ranks, **told)


def by_autograd(model, parts):
    """Return the gradients of the likelihood at every output of a linear and a block, batch by batch."""
    found, generator = architecture_of(model), torch.Generator().manual_seed(0)
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
    found = architecture_of(model)
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
    found = architecture_of(model)
    told = []
    in_memory = gradients(InMemory(model), found, found.blocks, parts, progress=lambda *counts: told.append(counts))
    in_files = gradients(InMemory(model), found, found.blocks, parts, StateFiles(tmp_path))
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
    arguments = InMemory(model), architecture_of(model), ["model.layers.2"], parts
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


def test_a_16_bit_models_reactions_and_divergences_are_near_those_of_float32():
    dtype = torch.bfloat16
    narrow, wide = (tiny_model("llama", dtype=d) for d in (dtype, torch.float32))
    parts = tiny_tokens(sequences=32).split(8)
    got, expected = (of_model(m, (), parts[:1]).channels for m in (narrow, wide))
    at, expected_at = (gradients(InMemory(m), x := architecture_of(m), x.blocks, parts) for m in (narrow, wide))
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
            of_model(model, architecture_of(model).linears)


def test_rows_come_from_the_first_windows_and_channels_alone_from_fewer(monkeypatch):
    monkeypatch.setattr("compressx.blocks.fisher.ROW_SEQUENCES", 4)
    monkeypatch.setattr("compressx.blocks.fisher.CHANNEL_SEQUENCES", 2)
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
    monkeypatch.setattr("compressx.blocks.fisher.ROW_SEQUENCES", 1)
    model, told = tiny_model("mixtral"), []
    parts = tiny_tokens(sequences=64, length=2).split(4)  # of two tokens: few of the experts
    of_model(model, architecture_of(model).linears, parts, progress=lambda *x: told.append(x))
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
    found = [fisher_diagonal(x, architecture_of(x.model), architecture_of(x.model).linears, parts) for x in both]
    assert [read.count(fqn) for fqn in found[0].channels] == [readings] * 3
    at = [gradients(x, architecture_of(x.model), found[0].channels, parts) for x in both]
    for loaded, got in ((x.linears for x in found), (x.channels for x in found), at):
        assert loaded.keys() == got.keys()
        assert all(torch.equal(torch.stack([*its]), torch.stack([*got[name]])) for name, its in loaded.items())
    assert all(p.is_meta for p in streamed.model.parameters())


SPEC = BUILT_IN["sensitivity"]
HALF = Unstructured(0.5, "layer")
QUERY = "model.layers.0.self_attn.q_proj"
LINEARS = {QUERY: architecture_of(tiny_model("llama")).linears[QUERY]}


def test_a_linear_that_no_token_came_through_is_refused_since_it_would_seem_to_matter_to_nothing():
    with pytest.raises(CalibrationError, match=rf"no calibration token reached {re.escape(QUERY)}"):
        SquaredGradients(LINEARS, torch.device("cpu")).means()


def test_rows_are_means_over_the_tokens_of_all_processes(monkeypatch):
    def gathered(tokens, value):
        made = SquaredGradients(LINEARS, torch.device("cpu"))
        if tokens:
            made.add(QUERY, torch.full((1, tokens, 64), value))
        return made

    others = gathered(6, 3.0)
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: tensor.add_(others.sums[QUERY]))
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: [value, others.tokens[QUERY]])
    for tokens, expected in ((2, 7.0), (0, 9.0)):  # (2 * 1 + 6 * 9) / 8; reached in the other process only
        assert gathered(tokens, 1.0).means(Ranks(0, 2))[QUERY].tolist() == [expected] * 64


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_refused(bad):
    squares = SquaredGradients(LINEARS, torch.device("cpu"))
    squares.add(QUERY, torch.full((2, 64), bad))
    with pytest.raises(
        UnsupportedModelError, match=rf"^{re.escape(QUERY)}: the gradient .* model\.dtype may be too narrow"
    ):
        squares.means()


def test_an_output_that_no_gradient_reaches_is_refused_with_the_linear():
    model = tiny_model("llama")
    query = model.model.layers[1].self_attn.q_proj
    query.forward = torch.no_grad()(query.forward)
    found = architecture_of(model)
    with pytest.raises(
        UnsupportedModelError, match=r"^model\.layers\.1\.self_attn\.q_proj: no gradient reaches its output"
    ):
        fisher_diagonal(InMemory(model), found, found.linears, batches())


def block_of_one(rows: int = 12, columns: int = 16, seed: int = 0) -> tuple[Block, torch.Tensor]:
    x = correlated_inputs(columns, tokens=64).reshape(4, 16, columns)
    sensitivities = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-3
    return replace(one_linear(rows, columns), sensitivities={"fc": sensitivities}), x


def prune(block: Block, x: torch.Tensor, pattern, **options):
    pruner = SPEC.build(SPEC.options(**options))
    statistic = pruner.observe(block, "fc")
    for part in x.split(2):
        statistic.update(part)
    return answer_of("sensitivity", pruner, block, {"fc": pattern}, {"fc": SharedStatistic(statistic)})["fc"]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_without_steps_what_goes_is_the_cheapest_by_a_slow_float64_reading(power):
    block, x = block_of_one()
    result = prune(block, x, HALF, rows=power, steps=0, damping=1e-9)
    weight, rows = block.linears["fc"].weight.double(), block.sensitivities["fc"].double()
    cost = weight**2 * x.double().square().sum(dim=(0, 1)) * (rows.mean() * (rows / rows.mean()) ** power)[:, None]
    assert torch.equal(result.keep, cost > cost.flatten().sort().values[cost.numel() // 2 - 1])


def test_rows_that_count_more_lose_fewer_weights():
    block, x = block_of_one()
    order = block.sensitivities["fc"].argsort()
    kept = [prune(block, x, HALF, rows=power).keep.sum(dim=1)[order].double() for power in (0.0, 1.0)]
    place = torch.arange(12.0, dtype=torch.double)
    even, weighted = (float(torch.corrcoef(torch.stack([place, x]))[0, 1]) for x in kept)
    assert weighted > 0.8
    assert weighted > even + 0.3


@pytest.mark.parametrize("pattern", [NM(2, 4), Unstructured(0.5, "row")], ids=str)
def test_within_an_output_sensitivities_do_not_count_and_may_be_zero(pattern):
    block, x = block_of_one()
    silent = replace(block, sensitivities={"fc": block.sensitivities["fc"] * (torch.arange(12) > 5)})
    result, expected = (prune(each, x, pattern) for each in (silent, block))
    assert torch.equal(result.keep, expected.keep)


def test_linears_that_compete_are_solved_side_by_side():
    inputs = correlated_inputs(16, tokens=64)
    block = one_linear(few=(12, 16), many=(12, 16))
    block = replace(block, sensitivities={"few": torch.full((12,), 1e-3), "many": torch.ones(12)})
    pruner = SPEC.build(SPEC.options())
    stats = {name: SharedStatistic(pruner.observe(block, name)) for name in block.linears}
    for observed in stats.values():
        observed.statistic.update(inputs)
    pattern = Unstructured(0.5, "joint")
    results = answer_of("sensitivity", pruner, block, dict.fromkeys(block.linears, pattern), stats)
    problems = {
        name: Problem(linear.weight, pruner.prepare(block, name, stats[name].statistic), pattern,
                      block.sensitivities[name][:, None])
        for name, linear in block.linears.items()
    }  # fmt: skip
    expected = solve(problems, penalty=0.3, steps=12)
    for name in block.linears:
        assert torch.equal(results[name].keep, expected[name].keep)
        torch.testing.assert_close(results[name].weight, expected[name].weight)
    assert results["few"].keep.sum() < results["many"].keep.sum()


@pytest.mark.parametrize("rows", [0.0, 0.5, 1.0])
def test_the_scale_of_a_linear_that_a_norm_follows_does_not_matter_to_a_joint_choice(rows):
    """Eight times the weight is an eighth of the gradient, where the output is normalised anyway."""

    def kept(scale):
        inputs = correlated_inputs(16, tokens=64)
        linears, its = {}, {}
        for seed, name in enumerate(("fc", "normed")):
            (linear,) = one_linear(12, 16).linears.values()
            generator = torch.Generator().manual_seed(seed)
            linear.weight.copy_(torch.randn(12, 16, generator=generator) * (scale if name == "normed" else 1))
            gradients = torch.rand(12, generator=generator) / (scale if name == "normed" else 1)
            linears[name], its[name] = linear, gradients.square()
        block = Block(0, "block", torch.nn.Module(), linears, (), None, its)
        pruner = SPEC.build(SPEC.options(rows=rows))
        stats = {name: SharedStatistic(pruner.observe(block, name)) for name in linears}
        for observed in stats.values():
            observed.statistic.update(inputs)
        results = answer_of("sensitivity", pruner, block, dict.fromkeys(linears, Unstructured(0.5, "joint")), stats)
        return torch.stack([results[name].keep for name in linears])

    assert torch.equal(kept(1.0), kept(8.0))
    assert torch.equal(kept(1.0), kept(1 / 8))
