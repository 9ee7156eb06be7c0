"""Training a pruned block's survivors towards the dense block's output."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.compressx.architectures import KINDS
from tests.compressx.blocks.test_prune import SPECS, batches, plan_all
from tests.compressx.references import mean_error, relative_errors_reference

from compressx.api.patterns import NM, Unstructured
from compressx.blocks.fisher import FisherDiagonal
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.arithmetic import matmuls_in
from compressx.models.blockwise import capture_calls, replay
from compressx.numerics.output_error import channel_weights
from compressx.recipe.sections import ReconstructBlock
from compressx.runtime.ranks import Ranks
from compressx.testing import tiny_model, tiny_tokens
from compressx.training import reconstruct as module
from compressx.training.reconstruct import BlockBatch, _Trained, reconstruct

HALF = Unstructured(0.5)
SETTINGS = ReconstructBlock(passes=3, learning_rate=0.03)


def planned(model, pattern=HALF, pruner="wanda", settings=SETTINGS, only=""):
    return replace(plan_all(model, SPECS[pruner], pattern, only=only), block_training=settings)


def outputs(model, tokens):
    """Return what leaves the last block [sequences, tokens, width], in float32."""
    seen = []
    block = list(architecture_of(model).blocks.values())[-1]
    handle = block.register_forward_hook(lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(tokens, use_cache=False)
    handle.remove()
    return seen[0].float()


def trained_twice(architecture, model_dtype=torch.float32, matmul_dtype=None, **settings):
    """Train a pruned block twice in a row, so that the second report begins with what the first left."""
    model, dense = (tiny_model(architecture, dtype=model_dtype) for _ in range(2))
    masks = next(iter(prune_model(InMemory(model), planned(model, settings=None), batches(2)))).masks
    fqn, block = next(iter(architecture_of(model).blocks.items()))
    states, calls = capture_calls(dense, architecture_of(dense).blocks, batches(2))
    with torch.no_grad():
        targets = [replay(architecture_of(dense).blocks[fqn], x, c) for x, c in zip(states, calls[fqn], strict=True)]

    def run(state, call):
        with matmuls_in(matmul_dtype, block, state.device):
            return replay(block, state, call)

    runs = [partial(run, call=c) for c in calls[fqn]]
    passages = [BlockBatch(*each) for each in zip(states, targets, runs, strict=True)]
    asked = ReconstructBlock(**{"passes": 2, "learning_rate": 0.03, **settings})
    return [reconstruct(model, fqn, masks, passages, asked) for _ in range(2)]


@pytest.mark.parametrize(
    ("architecture", "pattern"), [(a, NM(2, 4) if i % 2 else HALF) for i, a in enumerate(KINDS)], ids=str
)
def test_every_architecture_comes_nearer_to_its_dense_output_and_keeps_its_zeros(architecture, pattern):
    tokens = tiny_tokens()
    dense = outputs(tiny_model(architecture), tokens)
    errors = {}
    for settings in (None, SETTINGS):
        model = tiny_model(architecture)
        flags = {n: p.requires_grad for n, p in model.named_parameters()}
        pruned = list(prune_model(InMemory(model), planned(model, pattern, settings=settings), batches(2)))
        errors[settings] = mean_error(outputs(model, tokens), dense)
        linears = architecture_of(model).linears
        for block in pruned:
            for name, entry in block.masks.items():
                weight = linears[name].weight
                assert torch.equal(weight != 0, entry.keep)
                assert not torch.signbit(weight[weight == 0]).any()
        assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
        assert all(p.grad is None for p in model.parameters())
        if settings:
            for block in pruned:
                told = block.report.reconstruction
                assert told.after <= told.before
                assert told.history[0] == told.before
                assert len(told.history) == 4
    assert errors[SETTINGS] < 0.9 * errors[None]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_bfloat16_model_is_trained_in_float32_and_its_error_is_that_of_the_rounded_weights(architecture):
    model = tiny_model(architecture, dtype=torch.bfloat16)
    settings = SETTINGS.model_copy(update={"passes": 40, "learning_rate": 0.001})
    first, *_ = list(prune_model(InMemory(model), planned(model, settings=settings), batches(2)))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert first.report.reconstruction.after < first.report.reconstruction.before
    dense, exact = tiny_model(architecture, dtype=torch.bfloat16), model.float()
    states, calls = capture_calls(dense, architecture_of(dense).blocks, batches(2))
    fqn = first.report.fqn
    with torch.no_grad():
        targets = [replay(architecture_of(dense).blocks[fqn], x, c) for x, c in zip(states, calls[fqn], strict=True)]
        *_, call = capture_calls(exact, architecture_of(exact).blocks, batches(2))[1][fqn]
        out = replay(architecture_of(exact).blocks[fqn], states[-1].float(), call)
    expected = mean_error(out, targets[-1], of=torch.cat(targets))  # the last batch is the held-out one
    assert first.report.reconstruction.after == pytest.approx(expected, rel=0.02)


def test_channels_count_as_the_loss_reacts_to_them(monkeypatch):
    monkeypatch.setattr(module, "HELD_OUT", 0.99)
    model, dense = tiny_model("llama"), tiny_model("llama")
    fqn = "model.layers.0"
    channels = torch.rand(64, generator=torch.Generator().manual_seed(0)) ** 4
    fisher = FisherDiagonal(channels={fqn: channels})
    settings = ReconstructBlock(passes=1, learning_rate=1e-9)
    first, *_ = prune_model(InMemory(model), planned(model, settings=settings), batches(2), fisher=fisher)
    states, calls = capture_calls(dense, architecture_of(dense).blocks, batches(2))
    errors = []
    for state, call in list(zip(states, calls[fqn], strict=True))[1:]:  # the first is trained on
        with torch.no_grad():
            target, out = (replay(m.model.layers[0], state, call) for m in (dense, model))
        errors.append(relative_errors_reference(out, target, channels.double()))
    assert first.report.reconstruction.before == pytest.approx(float(torch.cat(errors).mean()), rel=1e-4)


def test_a_later_block_reads_what_pruned_blocks_give_and_is_held_to_what_dense_ones_gave(monkeypatch):
    monkeypatch.setattr(module, "HELD_OUT", 0.99)
    model, dense = tiny_model("llama"), tiny_model("llama")
    settings = ReconstructBlock(passes=1, learning_rate=1e-9)
    *_, last = prune_model(InMemory(model), planned(model, settings=settings), batches(2))
    of = outputs(dense, tiny_tokens())
    expected = mean_error(outputs(model, tiny_tokens())[2:], of[2:], of=of)  # the first batch is trained on
    assert last.report.reconstruction.before == pytest.approx(expected, rel=1e-3)


def test_a_steps_gradient_is_the_mean_over_the_tokens_of_all_processes(monkeypatch):
    def everyones(self, value):  # the other takes the one step, too, with three times the tokens
        return [value] if self.size == 1 else [value, value if value == 1 else 3 * value]

    monkeypatch.setattr(Ranks, "all_gather", everyones)
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: None)  # and without any error
    gradients = []
    monkeypatch.setattr(torch.optim.Adam, "step", lambda o: gradients.append([p.grad.clone() for p in parameters]))
    for ranks in (Ranks(), Ranks(0, 2)):
        model = tiny_model("llama")
        fqn, block = next(iter(architecture_of(model).blocks.items()))
        states, calls = capture_calls(model, architecture_of(model).blocks, batches(2))
        runs = [partial(replay, block, call=c) for c in calls[fqn]]
        passages = [BlockBatch(x, -x, run) for x, run in zip(states, runs, strict=True)]
        parameters = [block.mlp.up_proj.weight, block.self_attn.q_proj.weight]
        settings = SETTINGS.model_copy(update={"passes": 1, "batch_size": 100})
        trained = _Trained(dict.fromkeys(parameters, torch.float32), settings, channel_weights(states))
        assert list(trained.passes(passages, ranks)) == [0]
    for alone, shared in zip(*gradients, strict=True):
        assert alone.abs().max() > 0
        torch.testing.assert_close(shared, alone / 4)


def test_steps_are_fractions_of_each_tensors_size_that_rise_and_fall(monkeypatch):
    plain, model = tiny_model("llama"), tiny_model("llama")
    first = next(iter(prune_model(InMemory(plain), planned(plain, settings=None), batches(2))))
    weights = [architecture_of(plain).linears[name].weight for name in first.masks]
    sizes = torch.tensor([float(w[w != 0].square().mean().sqrt()) for w in weights])
    rates, step = [], torch.optim.Adam.step

    def noted(optimizer):
        rates.append([group["lr"] for group in optimizer.param_groups])
        step(optimizer)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    settings = SETTINGS.model_copy(update={"passes": 10, "batch_size": 2})
    next(iter(prune_model(InMemory(model), planned(model, settings=settings), batches(2))))
    assert len(rates) == 30, "six windows are trained on, two to a step"
    shares = torch.tensor(rates) / (settings.learning_rate * sizes)
    torch.testing.assert_close(shares, shares[:, :1].expand_as(shares), rtol=1e-4, atol=0)
    factors = shares[:, 0].tolist()
    assert factors[0] == pytest.approx(0.1, rel=1e-4)
    assert factors[:3] == sorted(factors[:3])
    assert factors[2:] == sorted(factors[2:], reverse=True)
    assert factors[2] > 0.95
    assert factors[-1] < 0.01


def test_a_16_bit_model_whose_blocks_are_handed_biases_is_trained_in_float32():
    """BLOOM hands every block its ALiBi in the model's dtype, which float32 scores would not take."""
    model = tiny_model("bloom", dtype=torch.float16)
    settings = ReconstructBlock(passes=2, learning_rate=0.01)
    for block in prune_model(InMemory(model, torch.float32), planned(model, settings=settings), batches(2)):
        assert block.report.reconstruction.after < block.report.reconstruction.before
    assert model.dtype == torch.float16


@pytest.mark.parametrize(
    ("architecture", "model_dtype", "products"),
    [("gpt2", torch.bfloat16, torch.float32), ("qwen2", torch.float32, torch.bfloat16), ("llama", torch.float64, None)],
    ids=str,
)
def test_the_error_after_training_is_that_of_the_weights_that_are_left(architecture, model_dtype, products):
    """In bfloat16 they are rounded; within one autocast, narrow copies of biases would be kept from step to step."""
    first, second = trained_twice(architecture, model_dtype, products, passes=4)
    assert first.after < first.before
    assert second.before == first.after


def test_only_the_survivors_and_biases_change():
    model, untouched = tiny_model("qwen2"), tiny_model("qwen2")
    settings = ReconstructBlock(passes=1, learning_rate=0.03)
    list(prune_model(InMemory(model), planned(model, settings=settings, only=".1.self_attn.q_proj"), batches(2)))
    before = dict(untouched.named_parameters())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    # A key's bias adds the same to all scores of a query, so the softmax does not see it... but for rotation.
    assert changed == {
        f"model.layers.1.self_attn.{n}" for n in ("q_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias")
    }


def test_weights_are_those_from_before_when_training_makes_the_held_out_error_worse():
    model, plain = tiny_model("llama"), tiny_model("llama")
    list(prune_model(InMemory(plain), planned(plain, settings=None), batches(2)))
    reckless = ReconstructBlock(passes=2, learning_rate=1.0)
    pruned = list(prune_model(InMemory(model), planned(model, settings=reckless), batches(2)))
    for block in pruned:
        assert block.report.reconstruction.after == block.report.reconstruction.before
        assert min(block.report.reconstruction.history[1:]) > block.report.reconstruction.before
    before = dict(plain.named_parameters())
    for name, now in model.named_parameters():
        assert torch.equal(now, before[name]), name


def first_block(model, tokens):
    """Return the name of the first block, its masks, what enters it, and what runs it."""
    masks = next(iter(prune_model(InMemory(model), planned(model, settings=None), batches(2)))).masks
    fqn, block = next(iter(architecture_of(model).blocks.items()))
    states, calls = capture_calls(model, architecture_of(model).blocks, tokens)
    return fqn, masks, states, [partial(replay, block, call=call) for call in calls[fqn]]


def test_batches_of_different_sizes_count_by_their_tokens(monkeypatch):
    """The last batch of a text is often short, and it is the last that are held out."""
    monkeypatch.setattr(module, "HELD_OUT", 0.99)
    model = tiny_model("llama")
    growing = torch.arange(1, 9)[:, None, None]  # so that batches differ in their errors
    errors = []
    for sizes in ([4, 4], [4, 3, 1]):
        fqn, masks, states, runs = first_block(model, list(tiny_tokens(sequences=8).split(sizes)))
        targets = (growing * torch.cat(states)).split(sizes)
        passages = [BlockBatch(*each) for each in zip(states, targets, runs, strict=True)]
        # A text that is too short to hold out anything is held out as a whole.
        settings = ReconstructBlock(passes=1, learning_rate=1e-9)
        errors.append(reconstruct(model, fqn, masks, passages, settings).before)
    assert errors[1] == pytest.approx(errors[0], rel=1e-5)


def test_an_error_while_training_leaves_an_ordinary_model_behind():
    model = tiny_model("llama")
    fqn, masks, states, _ = first_block(model, batches(2))

    def run(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        reconstruct(model, fqn, masks, [BlockBatch(states[0], states[0], run)], SETTINGS)
    assert set(model.state_dict()) == set(tiny_model("llama").state_dict())
    assert all(p.grad is None for p in model.parameters())
