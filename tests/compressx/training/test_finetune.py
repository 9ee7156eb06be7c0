"""Sparse fine-tuning of tiny models: what is trained and what is not, how well, and how it goes on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.compressx.architectures import KINDS
from tests.compressx.models.test_arithmetic import Products
from torch import Tensor

from compressx.api.record import FinetuneReport
from compressx.masks.maskset import MaskEntry, MaskSet, weight_sha256
from compressx.models.architecture import architecture_of
from compressx.recipe.sections import Finetune, Lora
from compressx.runtime.errors import ArtifactError, CalibrationError, OutOfMemoryError
from compressx.testing import tiny_model, tiny_tokens
from compressx.training import finetune as module
from compressx.training.finetune import backed_off, batch, distillation_loss, finetune, learning_rate, next_token_loss
from compressx.training.trainable import trainable

WINDOWS = tiny_tokens(sequences=8, length=16)
HELD_OUT = tiny_tokens(sequences=8, length=16, seed=1)


def pruned(architecture: str, dtype: torch.dtype = torch.float32) -> tuple[Any, MaskSet]:
    """Give a tiny model with the smaller half of every linear's weights dropped, and its masks."""
    model = tiny_model(architecture, dtype=dtype)
    masks = masks_of(model)
    masks.apply(model)
    return model, masks


def masks_of(model: Any) -> MaskSet:
    return MaskSet(
        {
            n: MaskEntry(x.weight.abs() > x.weight.abs().median(), "50% layer", "magnitude", weight_sha256(x.weight))
            for n, x in architecture_of(model).linears.items()
        }
    )


def tuned(
    architecture: str = "llama", *, dtype: torch.dtype = torch.float32, checkpoint: Path | None = None,
    progress: Callable[[int, int, float], None] | None = None, **given: Any,
) -> tuple[Any, MaskSet, FinetuneReport]:  # fmt: skip
    model, masks = pruned(architecture, dtype)
    settings = Finetune(**{"steps": 6, "learning_rate": 1e-3, "batch_size": 2, "held_out": 0, **given})
    teacher = None if settings.teacher == "none" else tiny_model(architecture, dtype=dtype)
    report = finetune(model, masks, WINDOWS, settings, teacher=teacher, checkpoint=checkpoint, progress=progress)
    return model, masks, report


@pytest.fixture
def no_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARMUP", 0.0)


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def loss_of(model: Any, teacher: Any | None) -> float:
    with torch.no_grad():
        logits = model(HELD_OUT).logits
        if teacher is None:
            return float(next_token_loss(logits, HELD_OUT))
        return float(distillation_loss(logits.flatten(0, 1), teacher(HELD_OUT).logits.flatten(0, 1)))


def watch_steps(monkeypatch: pytest.MonkeyPatch, see: Callable[[Any], object]) -> None:
    """Show the optimizer right before each of its steps."""
    step = torch.optim.AdamW.step

    def watched(optimizer: Any, *arguments: Any) -> Any:
        see(optimizer)
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)


def gradient_norm(optimizer: Any) -> float:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return float(torch.stack([g.norm() for g in gradients]).norm())


# --- what is trained


@pytest.mark.parametrize("architecture", KINDS)
def test_survivors_change_and_the_zeros_stay(architecture: str) -> None:
    before, masks = pruned(architecture)
    after, _, report = tuned(architecture)
    old, new = architecture_of(before).linears, architecture_of(after).linears
    for name, entry in masks.items():
        weight = new[name].weight
        assert torch.equal(weight != 0, entry.keep), name
        assert not torch.signbit(weight[~entry.keep]).any(), "plain zeros, none of them -0.0"
        assert not torch.equal(weight, old[name].weight), name
    assert report.trained == sum(int(entry.keep.sum()) for entry in masks.values())
    others = {n: p for n, p in parameters(after).items() if not any(n.startswith(x.rpartition(".")[0]) for x in masks)}
    assert all(torch.equal(p, parameters(before)[n]) for n, p in others.items()), "the embedding, norms and the head"


@pytest.mark.parametrize(
    ("architecture", "norms"), [("gpt2", False), ("llama", True), ("stablelm", True), ("llama-tied", True)]
)
def test_norms_are_trained_when_asked_for_and_biases_are_not(architecture: str, norms: bool) -> None:
    before, masks = pruned(architecture)
    after, _, report = tuned(architecture, norms=norms)
    old, new = parameters(before), parameters(after)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    weights = {f"{name}.weight" for name in masks}
    gain = {n for n in old if n.endswith(".weight") and any(x in n for x in ("norm", "ln_"))}
    assert gain
    assert changed == weights | (gain if norms else set())
    tied = [x.get_output_embeddings().weight is x.get_input_embeddings().weight for x in (before, after)]
    assert tied[0] == tied[1]
    small = sum(old[n].numel() for n in gain) if norms else 0
    assert report.trained == small + sum(int(entry.keep.sum()) for entry in masks.values())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "llama-tied"])
@pytest.mark.parametrize("norms", [False, True])
def test_adapters_are_trained_in_place_of_weights_and_merged_under_the_masks(architecture: str, norms: bool) -> None:
    before, masks = pruned(architecture)
    after, _, report = tuned(architecture, lora={"rank": 4}, norms=norms)
    assert not any(hasattr(module, "base_layer") for module in after.modules())
    old, new = architecture_of(before).linears, architecture_of(after).linears
    gains = 0
    for name, parameter in parameters(before).items():
        if (linear := name.removesuffix(".weight")) in masks:
            weight, keep = new[linear].weight, masks[linear].keep
            assert not torch.equal(weight, old[linear].weight)
            assert torch.equal(weight != 0, keep), linear
            assert not torch.signbit(weight[~keep]).any()
        elif norms and name.endswith(".weight") and any(x in name for x in ("norm", "ln_")):
            gains += parameter.numel()
            assert not torch.equal(parameter, parameters(after)[name]), name
        else:
            assert torch.equal(parameter, parameters(after)[name]), name
    adapters = sum(4 * sum(entry.keep.shape) for entry in masks.values())
    assert report.trained == adapters + gains


def test_rank_and_targets_decide_what_an_adapter_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    before, masks = pruned("llama")
    made: list[Any] = []
    wrap = peft.get_peft_model
    monkeypatch.setattr(peft, "get_peft_model", lambda model, config: made.append(config) or wrap(model, config))
    after, _, report = tuned(lora={"rank": 2, "targets": ["*.q_proj", "*.0.mlp.*"]})
    tuned(lora={"rank": 3, "targets": ["*.q_proj"]})
    assert [(config.r, config.lora_alpha) for config in made] == [(2, 4), (3, 6)]
    now, was = (architecture_of(x).linears for x in (after, before))
    changed = {n for n in masks if not torch.equal(now[n].weight, was[n].weight)}
    expected = {n for n in masks if n.endswith("q_proj") or ".0.mlp." in n}
    assert changed == expected
    assert report.trained == sum(2 * sum(masks[name].keep.shape) for name in expected)


def test_adapters_of_a_16_bit_model_are_merged_into_16_bits() -> None:
    narrow, masks, _ = tuned(dtype=torch.bfloat16, lora={"rank": 4})
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert masks.verify(narrow)


def test_an_interrupted_training_leaves_no_adapters_on_the_model() -> None:
    model, masks = pruned("llama")
    before = parameters(model)
    settings = Finetune(steps=3, teacher="none", lora={"rank": 4})  # type: ignore[arg-type]
    with pytest.raises(Stop):
        finetune(model, masks, WINDOWS, settings, progress=stop_after(2))
    assert all(torch.equal(p, before[n]) for n, p in parameters(model).items())
    assert all(p.requires_grad for p in model.parameters())


def test_the_bias_of_a_linear_without_weights_is_not_trained() -> None:
    model, masks = pruned("opt")
    first, second = (n for n in [*masks][:2])
    entry = masks[first]
    masks = MaskSet({**masks, first: replace(entry, keep=torch.zeros_like(entry.keep))})
    masks.apply(model)
    with trainable(model, model, masks, biases=True) as trained:
        assert model.get_parameter(f"{first}.bias") not in trained
        assert {model.get_parameter(f"{second}.{kind}") for kind in ("weight", "bias")} <= {*trained}


@pytest.mark.slow
def test_a_model_in_16_bits_is_trained_in_float32_and_rounded_once() -> None:
    dtype = torch.bfloat16
    narrow, masks = pruned("llama", dtype)
    wide = copy.deepcopy(narrow).float()
    settings = Finetune(steps=30, learning_rate=1e-4, batch_size=2, teacher="none", norms=True, held_out=0)
    start = parameters(narrow)
    for model in (narrow, wide):
        finetune(model, masks, WINDOWS, settings)
    assert all(torch.equal(p.to(dtype), parameters(narrow)[n]) for n, p in parameters(wide).items())
    changed = [n for n, p in parameters(narrow).items() if not torch.equal(p, start[n])]
    assert len(changed) > len(masks) / 2, "steps far below the precision of the dtype add up"
    assert masks.verify(narrow)


def test_a_teacher_in_16_bits_multiplies_in_the_same_dtype_as_the_model() -> None:
    model, masks = pruned("llama", torch.bfloat16)
    teacher = tiny_model("llama", dtype=torch.bfloat16)
    for products in (torch.float32, torch.bfloat16):
        with Products() as counted:
            finetune(model, masks, WINDOWS, Finetune(steps=1, held_out=0), teacher=teacher, matmul_dtype=products)
        assert counted.seen == {products}


@pytest.mark.usefixtures("no_warmup")
def test_the_next_step_sees_every_parameter_that_a_step_changed_whatever_the_products() -> None:
    """Within one autocast, narrow copies of weights would be kept from step to step."""
    model, masks = pruned("qwen2")
    settings = Finetune(steps=3, learning_rate=1e-2, batch_size=8, teacher="none", held_out=0)
    expected: list[float] = []

    def progress(*_: Any) -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected.append(float(next_token_loss(copy.deepcopy(model)(WINDOWS).logits, WINDOWS)))

    report = finetune(model, masks, WINDOWS, settings, matmul_dtype=torch.bfloat16, progress=progress)
    assert report.losses[1:] == pytest.approx(expected[:2], rel=1e-5)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["weights", "adapters"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_checkpointing_leaves_no_hook_on_the_embeddings_and_the_models_own_is_left_on(own, checkpointing, lora) -> None:
    model, masks = pruned("llama")
    if own:
        model.gradient_checkpointing_enable()
    embeddings = model.get_input_embeddings()
    hooks, handles = dict(embeddings._forward_hooks), vars(model).get("_require_grads_hooks")
    flags = [getattr(m, "gradient_checkpointing", None) for m in model.modules()]
    settings = Finetune(steps=2, teacher="none", gradient_checkpointing=checkpointing, lora=lora)
    finetune(model, masks, WINDOWS, settings)
    assert dict(embeddings._forward_hooks) == hooks
    assert vars(model).get("_require_grads_hooks") is handles
    assert [getattr(m, "gradient_checkpointing", None) for m in model.modules()] == flags
    assert model.requires_grad_(False)(WINDOWS).logits.requires_grad == own


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_comes_back_as_it_was_but_for_its_weights(architecture: str) -> None:
    """Modes, gradients, what asks for gradients, parametrizations, buffers and the random state."""
    model, masks = pruned(architecture)
    model.get_input_embeddings().weight.requires_grad_(False)
    modes = [m.training for m in model.modules()]
    asked = {n: p.requires_grad for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    flags = [getattr(m, "gradient_checkpointing", None) for m in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    finetune(model, masks, WINDOWS, Finetune(steps=2, teacher="none"))
    assert torch.equal(torch.rand(3), expected)
    assert [m.training for m in model.modules()] == modes
    assert {n: p.requires_grad for n, p in model.named_parameters()} == asked
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert [getattr(m, "gradient_checkpointing", None) for m in model.modules()] == flags
    masks.to_torch_ao(model)  # would refuse a prepared one


# --- how well


def test_distillation_brings_the_pruned_model_nearer_to_the_dense_one() -> None:
    model, masks = pruned("llama")
    dense = tiny_model("llama")
    before = loss_of(model, dense)
    windows = tiny_tokens(sequences=256, length=16, seed=2)
    settings = Finetune(steps=60, learning_rate=1e-2, batch_size=8)
    losses = finetune(model, masks, windows, settings, teacher=dense).losses
    assert all(torch.equal(p, parameters(tiny_model("llama"))[n]) for n, p in parameters(dense).items())
    assert all(p.grad is None for p in dense.parameters())
    assert not dense.training
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert loss_of(model, dense) < 0.75 * before, "on windows that it was not trained on"


# --- steps


def test_every_epoch_takes_every_window_once_in_an_order_of_its_own() -> None:
    numbered = torch.arange(6)[:, None].repeat(1, 3)
    settings = Finetune(batch_size=4, seed=5)
    taken = torch.cat([batch(numbered, step, settings)[:, 0] for step in range(6)])  # 24 = 4 epochs
    epochs = taken.view(4, 6)
    assert all(sorted(epoch.tolist()) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1
    other = batch(numbered, 0, Finetune(batch_size=4, seed=6))[:, 0]
    assert other.tolist() != taken[:4].tolist()


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradient_checkpointing_computes_blocks_again_and_changes_nothing_but_memory(architecture: str) -> None:
    """GPT-2 drops units, so that its recomputed blocks have to drop the same ones."""
    trained = []
    for checkpointing in (True, False):
        calls: list[Any] = []
        model, masks = pruned(architecture)
        _, second, *_ = architecture_of(model).blocks.values()
        second.mlp.register_forward_pre_hook(lambda *given, to=calls: to.append(given))
        settings = Finetune(
            steps=2, learning_rate=1e-2, teacher="none", held_out=0, gradient_checkpointing=checkpointing
        )
        report = finetune(model, masks, WINDOWS, settings)
        trained.append((len(calls), report.losses, parameters(model)))
    (twice, losses, with_it), (once, others, without) = trained
    assert (twice, once, losses) == (4, 2, others)
    assert all(torch.equal(parameter, without[name]) for name, parameter in with_it.items())


def test_the_learning_rate_rises_and_falls_and_weights_do_not_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    decays: set[float] = set()

    def see(optimizer: Any) -> None:
        rates.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0]["scale"])
        decays.update(group["weight_decay"] for group in optimizer.param_groups)

    watch_steps(monkeypatch, see)
    tuned(steps=30, learning_rate=1e-3)
    assert decays == {0.0}
    assert rates[0] == pytest.approx(1e-4)
    assert rates[:4] == sorted(rates[:4])
    assert rates[3] == pytest.approx(1e-3)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert 0 < rates[-1] < 1e-4


@pytest.mark.usefixtures("no_warmup")
@pytest.mark.parametrize(("given", "relative"), [({}, True), ({"norms": True}, True), ({"lora": {"rank": 2}}, False)])
def test_a_weights_rate_is_relative_to_its_size_before_the_training_and_an_adapters_is_not(
    given, relative, monkeypatch
):
    """So a model of which all weights are a tenth as large takes steps a tenth as large."""
    seen: list[tuple[float, float]] = []

    def see(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            (weight,) = group["params"]
            nonzero = weight.detach()[weight.detach() != 0]
            seen.append((group["lr"], float(nonzero.square().mean().sqrt()) if len(nonzero) else 0.0))

    watch_steps(monkeypatch, see)
    tuned("gpt2", steps=2, learning_rate=1e-3, **given)
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    sizes = [size for _, size in first]
    assert [rate for rate, _ in first] == pytest.approx(
        [1e-3 * size for size in sizes] if relative else [1e-3] * len(sizes)
    )
    assert len(set(sizes)) > 1
    assert [rate for rate, _ in second] == pytest.approx([rate / 2 for rate, _ in first]), (
        "the cosine, of the same sizes"
    )


def test_gradients_are_clipped_to_a_norm_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    watch_steps(monkeypatch, lambda optimizer: norms.append(gradient_norm(optimizer)))
    monkeypatch.setattr(module, "next_token_loss", lambda *a: 1000.0 * next_token_loss(*a))
    tuned(steps=2, teacher="none")
    assert norms == pytest.approx([1.0, 1.0], rel=1e-3)


def test_a_step_knows_nothing_of_the_gradients_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    watch_steps(monkeypatch, lambda optimizer: norms.append(gradient_norm(optimizer)))
    monkeypatch.setattr(module, "_LARGEST_NORM", 1e9)  # a sum of gradients would be clipped to the norm of one
    tuned(steps=3, batch_size=8, learning_rate=1e-12)  # all windows and, all but, the same weights each time
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-3)


def test_dropout_drops_other_units_at_every_step() -> None:
    model, masks = pruned("gpt2")
    settings = Finetune(steps=3, learning_rate=1e-12, batch_size=1, teacher="none")
    losses = finetune(model, masks, WINDOWS[:1], settings).losses
    assert len(set(losses)) == 3  # of the same window and, all but, the same weights


def test_weights_that_the_last_step_ruined_are_an_error_and_are_not_kept_where_windows_are_held_out() -> None:
    ruined: dict[str, Any] = {"steps": 1, "learning_rate": 1e41, "teacher": "none"}
    with pytest.raises(
        CalibrationError, match=r"q_proj.weight has NaN or infinite .*learning_rate 1e\+41 is too large"
    ):
        tuned(**ruined)
    after, masks, report = tuned(**ruined, held_out=1)
    before, _ = pruned("llama")
    assert [math.isfinite(x.loss) for x in report.held_out] == [True, False]
    assert all(torch.equal(p, parameters(before)[n]) for n, p in parameters(after).items()), "those before the step"
    assert masks.verify(after)


def test_zeros_that_are_lost_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressx.training.trainable.zeroed", lambda x, keep: x)
    with pytest.raises(ArtifactError, match=r"q_proj: \d+ weights that the mask drops are not zero after fine-tuning"):
        tuned()


# --- how long, and what is held out


def test_a_training_by_time_ends_nearest_to_its_minutes_with_a_whole_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every step takes ten seconds: six of them are nearest to 62 seconds."""
    clock, rates = iter(range(0, 10_000, 10)), []
    now = next(clock)

    def tick(optimizer: Any) -> None:
        nonlocal now
        now = next(clock)
        rates.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0]["scale"])

    monkeypatch.setattr(module.time, "perf_counter", lambda: float(now))
    watch_steps(monkeypatch, tick)
    told: list[tuple[int, int]] = []
    _, _, report = tuned(
        steps=None, minutes=62 / 60, held_out=1, progress=lambda done, total, _: told.append((done, total))
    )
    assert report.steps == 6
    assert told == [(1, 6), (2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) > 0.9e-3
    assert rates[-1] < 0.2e-3
    assert [x.seconds for x in report.held_out] == [0.0, 20.0, 40.0, 50.0, 60.0]


def test_held_out_windows_are_not_trained_on_and_measured_before_and_four_times() -> None:
    windows = tiny_tokens(sequences=32, length=16)
    model, masks = pruned("llama")
    teacher = tiny_model("llama")
    settings = Finetune(steps=16, learning_rate=1e-3, batch_size=2, held_out=4)
    report = finetune(model, masks, windows, settings, teacher=teacher)
    assert report.windows == (28, 16)
    assert [x.step for x in report.held_out] == [0, 4, 8, 12, 16]
    assert report.held_out[-1].loss < report.held_out[0].loss
    with torch.no_grad():
        logits = [m.eval()(windows[28:]).logits.flatten(0, 1) for m in (model, teacher)]
    kept = min(x.loss for x in report.held_out)
    assert float(distillation_loss(*logits)) == pytest.approx(kept, rel=1e-4)
    assert not finetune(*pruned("llama"), windows, Finetune(steps=1, teacher="none", held_out=0)).held_out


@pytest.mark.usefixtures("no_warmup")
def test_the_weights_with_the_lowest_held_out_loss_are_kept() -> None:
    """A rate so large that training only harms: the weights before it are the best."""
    start = parameters(pruned("llama")[0])
    model, masks, report = tuned(steps=4, learning_rate=1.0, held_out=1)
    assert min(report.held_out, key=lambda x: x.loss).step == 0
    assert all(torch.equal(p, start[n]) for n, p in parameters(model).items())
    assert masks.verify(model)


@pytest.mark.parametrize(
    ("losses", "factor"),
    [([], 1), ([2.0], 1), ([2.0, 1.0, 0.5], 1), ([2.0, 2.0], 1 / 4), ([2.0, 3.0, 1.0, 1.5, math.nan, 0.9], 1 / 64)],
    ids=str,
)
def test_the_rate_is_quartered_after_every_held_out_loss_that_is_not_the_lowest(losses, factor):
    assert backed_off(losses) == factor


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_rate_that_only_harms_is_lowered_until_training_helps(architecture, monkeypatch):
    rates, moments = [], []

    def see(optimizer: Any) -> None:
        rates.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0]["scale"])
        moments.append(len(optimizer.state))

    watch_steps(monkeypatch, see)
    _, _, report = tuned(architecture, steps=16, learning_rate=0.2, held_out=2)
    before, first, *later = (x.loss for x in report.held_out)
    assert first > before > min(later)
    settings = Finetune(steps=16, learning_rate=0.2)
    factors = [rate / learning_rate(settings, step / 16) for step, rate in enumerate(rates)]
    assert factors[:4] == [pytest.approx(1)] * 4
    assert factors[4:8] == [pytest.approx(1 / 4)] * 4
    assert (moments[3] > 0, moments[4], moments[5] > 0) == (True, 0, True), "begun anew, from the best weights"


# --- going on


class Stop(Exception):  # noqa: N818 - a test's own
    pass


def stop_after(step: int) -> Callable[[int, int, float], None]:
    def progress(done: int, _total: int, _loss: float) -> None:
        if done == step:
            raise Stop

    return progress


@pytest.mark.parametrize(
    ("architecture", "every", "stopped_at", "lora"),
    [("llama", 2, 4, None), ("gpt2", 3, 5, None), ("gpt2", 3, 5, {"rank": 4})],
)
def test_an_interrupted_one_goes_on_to_the_same_bits(architecture, every, stopped_at, lora, tmp_path, monkeypatch):
    """GPT-2 drops units, so the random state has to be that of the step too."""
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", every)
    given = {"steps": 8, "norms": True, "lora": lora, "held_out": 1}
    whole, _, expected = tuned(architecture, **given)
    checkpoint = tmp_path / "finetune.safetensors"
    with pytest.raises(Stop):
        tuned(architecture, checkpoint=checkpoint, progress=stop_after(stopped_at), **given)
    assert checkpoint.is_file()
    torch.manual_seed(stopped_at)  # whatever state another process is in
    told: list[int] = []
    resumed, _, report = tuned(
        architecture, checkpoint=checkpoint, progress=lambda done, *_: told.append(done), **given
    )
    assert told == list(range(stopped_at // every * every + 1, 9))
    assert report == expected
    assert all(torch.equal(p, parameters(resumed)[n]) for n, p in parameters(whole).items())


@pytest.mark.parametrize(
    ("rate", "lora", "best", "stopped_at"),
    [(0.4, None, 0, 1), (0.1, None, 6, 7), (0.4, {"rank": 4}, 4, 5)],
    ids=["the first steps harm", "the last steps harm", "the later steps of adapters harm"],
)
def test_one_that_goes_on_knows_the_best_weights_of_before(rate, lora, best, stopped_at, tmp_path, monkeypatch):
    """They are not those of the last step, which the checkpoint has too: the training became worse in between."""
    monkeypatch.setattr(module, "WARMUP", 0.5)
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", stopped_at)
    given = {"steps": 8, "learning_rate": rate, "teacher": "none", "lora": lora, "held_out": 1}
    whole, _, expected = tuned(**given)
    earlier = [x for x in expected.held_out if x.step <= stopped_at]
    assert min(earlier, key=lambda x: x.loss).step == best < stopped_at
    assert next(x.loss for x in expected.held_out if x.step > stopped_at) > min(x.loss for x in earlier)
    checkpoint = tmp_path / "finetune.safetensors"
    with pytest.raises(Stop):
        tuned(checkpoint=checkpoint, progress=stop_after(stopped_at), **given)
    resumed, _, report = tuned(checkpoint=checkpoint, **given)
    assert report == expected
    assert all(torch.equal(p, parameters(resumed)[n]) for n, p in parameters(whole).items())


def test_progress_is_told_after_every_step_and_a_finished_one_is_not_trained_again(tmp_path: Path) -> None:
    checkpoint = tmp_path / "finetune.safetensors"
    told: list[tuple[int, int, float]] = []
    whole, _, expected = tuned(checkpoint=checkpoint, progress=lambda *x: told.append(x))
    assert told == [(i + 1, 6, loss) for i, loss in enumerate(expected.losses)]
    again, _, report = tuned(checkpoint=checkpoint, progress=lambda *_: pytest.fail("it was finished"))
    assert report == expected
    assert all(torch.equal(p, parameters(again)[n]) for n, p in parameters(whole).items())


def test_a_damaged_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "finetune.safetensors"
    tuned(checkpoint=checkpoint)
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-100])
    with pytest.raises(ArtifactError, match=r"finetune\.safetensors"):
        tuned(checkpoint=checkpoint)
    checkpoint.write_bytes(whole)
    with pytest.raises(ArtifactError, match=r"finetune\.safetensors is damaged.*--restart"):
        tuned("qwen3", norms=True, checkpoint=checkpoint)


ROWS, VOCABULARY = 11, 23


def logits(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*(shape or (ROWS, VOCABULARY)), generator=generator, dtype=torch.float64)).to(dtype)


def reference(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum p log(p / q) literally."""
    p, q = torch.softmax(teacher, -1), torch.softmax(student, -1)
    return (p * (p.log() - q.log())).sum() / len(student)


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_the_divergence_and_its_gradient_are_those_of_the_definition(rows: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", rows * VOCABULARY)
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    expected = reference(student, teacher)
    (wanted,) = torch.autograd.grad(expected, student)
    loss = distillation_loss(student, teacher)
    (3.0 * loss).backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(student.grad, 3.0 * wanted, rtol=1e-10, atol=1e-14)
    assert teacher.grad is None


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_the_next_token_loss_and_its_gradient_are_those_of_the_definition(rows: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", rows * VOCABULARY)
    student = logits(2, 3, 5, VOCABULARY).requires_grad_()
    ids = torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(0))
    likelihoods = student.log_softmax(-1)
    expected = -sum(likelihoods[w, t, ids[w, t + 1]] for w in range(3) for t in range(4)) / 12
    (wanted,) = torch.autograd.grad(expected, student)  # type: ignore[arg-type]
    loss = next_token_loss(student, ids)
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


@pytest.mark.usefixtures("no_warmup")
@pytest.mark.parametrize("size", [50.0, 0.0])
def test_gains_beside_adapters_have_the_rates_that_they_have_without(size: float) -> None:
    steps = []
    for lora in (None, Lora(rank=2)):
        model, masks = pruned("gpt2")
        small = {n: p for n, p in model.named_parameters() if "ln_" in n and n.endswith(".weight")}
        for parameter in small.values():
            parameter.data.fill_(size)
        settings = Finetune(steps=1, learning_rate=1e-3, held_out=0, teacher="none", norms=True, lora=lora)
        finetune(model, masks, WINDOWS, settings)
        steps.append({name: float((p.detach() - size).abs().max()) for name, p in small.items()})
    without, beside = steps
    last = "transformer.ln_f.weight"  # reached by a gradient whatever stands before it
    if size:
        assert beside == pytest.approx(without, rel=1e-2)
        assert beside[last] == pytest.approx(1e-3 * size, rel=1e-2)
    else:
        assert beside[last] == pytest.approx(1e-3, rel=1e-2), "nothing has a size, so the rate is Adam's own"


def test_memory_that_runs_out_while_a_checkpoint_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "finetune.safetensors"
    tuned(checkpoint=checkpoint)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB")
    monkeypatch.setattr(torch.nn.Parameter, "copy_", Mock(side_effect=full))
    with pytest.raises(OutOfMemoryError, match=r"finetune\.safetensors: 2\.00 GiB did not fit in cuda:0"):
        tuned(checkpoint=checkpoint)
