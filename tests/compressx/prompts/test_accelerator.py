"""Prompts are shortened and answered on a pretended accelerator as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compressx.prompts.selectors import EARLY, PROTECT, prompts

import compressx
from compressx.testing import pretended_accelerator, tiny_model


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
