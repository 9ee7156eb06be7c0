"""Prompts are shortened and answered on a pretended accelerator as on the CPU."""

from __future__ import annotations

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.built_in import SELECTORS
from tests.compressx.prompts.selectors import EARLY, prompts

import compressx
from compressx.prompts.scores import read_scores
from compressx.testing import tiny_model, tiny_tokens
from compressx.testing.selectors import SelectorSubject


def test_the_same_tokens_are_selected_on_the_device() -> None:
    ids = prompts(2)
    expected = compressx.select_tokens(tiny_model("llama"), ids, keep=20, **EARLY)
    with pretended_accelerator():
        found = compressx.select_tokens(tiny_model("llama").to("cuda"), ids.to("cuda"), keep=20, **EARLY)
        assert found.input_ids.device.type == "cuda"
        assert torch.equal(found.input_ids.cpu(), expected.input_ids)
        assert torch.equal(found.attention_mask.cpu(), expected.attention_mask)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_answers_on_the_device_of_the_scores_and_seldom_waits(name: str) -> None:
    spec = SELECTORS[name]
    with pretended_accelerator() as device:
        ready = SelectorSubject(spec, spec.options(), "llama", "cuda").ready()
        ids = tiny_tokens(sequences=1)[0].to("cuda")
        scores = read_scores(ready.access, ready.found, ids, ready.rows)
        with device.counted() as counts:
            places = ready.selector.select(scores, len(ids) // 2)
        assert places.device == scores.device
    assert counts.synchronisations <= 4, counts.places()
