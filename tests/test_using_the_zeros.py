"""The page on what zeros are good for, against the libraries that it names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

_PAGE = (Path(__file__).parents[1] / "docs/tutorial/using-the-zeros.md").read_text(encoding="utf-8")
_SENTENCE = re.search(r"(`F16`[^.;]*) keep zeros; ([^.;]*) lose them", _PAGE)
_TYPES = {
    kind: word
    for types, word in zip(_SENTENCE.groups() if _SENTENCE else (), ("kept", "lost"), strict=False)
    for kind in re.findall(r"`(\w+)`", types)
}


def test_the_page_has_types_that_keep_zeros_and_types_that_lose_them() -> None:
    assert set(_TYPES.values()) == {"kept", "lost"}
    assert {"F16", "Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1"} <= set(_TYPES)


@pytest.mark.parametrize("kind", _TYPES)
def test_zeros_are_kept_or_lost_by_a_type_of_gguf_as_the_page_says(kind: str) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((64, 256)).astype(np.float32) * 0.02
    dropped = random.random(weight.shape) < 0.5
    weight[dropped] = 0
    stored = quants.quantize(weight, GGMLQuantizationType[kind])
    loaded = quants.dequantize(stored, GGMLQuantizationType[kind])
    assert np.allclose(loaded, weight, atol=0.01)
    kept = float((loaded[dropped] == 0).mean())
    assert kept == 1 if _TYPES[kind] == "kept" else kept < 0.1
