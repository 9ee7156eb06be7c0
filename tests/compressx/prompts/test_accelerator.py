"""Prompts are shortened and answered on a pretended accelerator as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.built_in import SELECTORS
from tests.compressx.prompts.selectors import EARLY, PROTECT, prompts

import compressx
from compressx.prompts.scores import read_scores
from compressx.testing import tiny_model, tiny_tokens
from compressx.testing.selectors import SelectorSubject


@pytest.mark.parametrize("asked", [EARLY, {"selector": "random", "protect": PROTECT}], ids=["gemfilter", "random"])
def test_the_same_tokens_are_selected_on_the_device(asked: dict[str, Any]) -> None:
    ids = prompts(2)
    expected = compressx.select_tokens(tiny_model("llama"), ids, keep=20, **asked)
    with pretended_accelerator():
        found = compressx.select_tokens(tiny_model("llama").to("cuda"), ids.to("cuda"), keep=20, **asked)
        assert found.input_ids.device.type == "cuda"
        assert [places.tolist() for places in found.places] == [places.tolist() for places in expected.places]
        assert torch.equal(found.input_ids.cpu(), expected.input_ids)
        assert torch.equal(found.attention_mask.cpu(), expected.attention_mask)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_answers_on_the_device_of_the_scores_and_seldom_waits(name: str) -> None:
    spec = SELECTORS[name]
    with pretended_accelerator() as device:
        subject = SelectorSubject(spec, spec.options(), "llama", "cuda")
        wanted = subject.observed(subject.selector())
        ids = tiny_tokens(sequences=1)[0].to("cuda")
        scores = read_scores(subject.access, subject.found, ids, wanted)
        with device.counted() as counts:
            places = subject.selector().select(scores, len(ids) // 2)
        assert places.device == scores.device
    assert counts.synchronisations <= 4, counts.places()
