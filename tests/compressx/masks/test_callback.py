"""Masks in transformers' Trainer and TRL's SFTTrainer: zeros stay, checkpoints are plain, and resuming works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.two_of_four import pruned
from torch.nn.utils import parametrize
from transformers import AutoTokenizer, LlamaForCausalLM, Trainer, TrainingArguments

from compressx.masks import merge_adapters, squash
from compressx.masks.callback import MaskCallback
from compressx.testing import save_tiny_model, tiny_tokens

ROWS = [{"input_ids": ids, "labels": ids} for ids in tiny_tokens(sequences=8, length=16)]


def arguments(folder: Path, kind: Any = TrainingArguments, **given: Any) -> Any:
    settings = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "per_device_train_batch_size": 2, **given}
    return kind(
        output_dir=str(folder), use_cpu=True, report_to="none", logging_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_training_gives_the_weights_that_held_masks_give(tmp_path: Path) -> None:
    """Gradients are masked before they are clipped."""
    (ours, masks), (held, _) = pruned(), pruned()
    Trainer(ours, arguments(tmp_path, save_strategy="no"), train_dataset=ROWS, callbacks=[MaskCallback(masks)]).train()
    sparsifier = masks.to_torch_ao(held)
    Trainer(held, arguments(tmp_path, save_strategy="no"), train_dataset=ROWS).train()
    squash(sparsifier)
    assert masks.verify(ours)
    assert not same(ours, pruned()[0])
    assert same(ours, held)
    assert all(not p._backward_hooks for p in ours.parameters())


def test_checkpoints_hold_the_zeros_under_plain_names_and_training_goes_on_from_them(tmp_path: Path) -> None:
    whole, masks = pruned()
    Trainer(whole, arguments(tmp_path), train_dataset=ROWS, callbacks=[MaskCallback(masks)]).train()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert same(saved, whole)
    assert masks.verify(saved)
    resumed, _ = pruned(seed=1)
    masks.save(file := tmp_path / "masks.safetensors")
    trainer = Trainer(resumed, arguments(tmp_path), train_dataset=ROWS, callbacks=[MaskCallback(file)])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(resumed, whole)
    assert not any(parametrize.is_parametrized(module) for module in resumed.modules())


def test_an_optimizer_that_moves_weights_without_gradients_moves_no_zero(tmp_path: Path) -> None:
    class Drifting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(1e-3)

    model, masks = pruned()
    optimizer = Drifting(model.parameters(), lr=1e-3)
    Trainer(
        model, arguments(tmp_path, save_strategy="no"), train_dataset=ROWS, callbacks=[MaskCallback(masks)],
        optimizers=(optimizer, None),
    ).train()  # fmt: skip
    assert masks.verify(model)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_trls_trainer_trains_weights_or_adapters_under_the_masks(lora: bool, tmp_path: Path) -> None:
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    from datasets import Dataset

    words = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "tiny", "llama"))
    model, masks = pruned()
    trainer = trl.SFTTrainer(
        model, arguments(tmp_path, trl.SFTConfig, save_strategy="no", max_length=16, packing=False),
        train_dataset=Dataset.from_list([{"text": "w3 w5 w7 w11 w13 w17"}] * 8), processing_class=words,
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear") if lora else None,
        callbacks=[MaskCallback(masks)],
    )  # fmt: skip
    trainer.train()
    trained = trainer.model
    if lora:
        trained, outside = merge_adapters(trained, masks)
        assert outside == 0.0
    assert masks.verify(trained)
    fresh = pruned()[0]
    assert all(not torch.equal(trained.get_submodule(n).weight, fresh.get_submodule(n).weight) for n in masks)
