"""GGUF files of pruned models: what they hold, and that llama.cpp computes with them what transformers does."""

from __future__ import annotations

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from compressx.models.gguf_export import KINDS, stored_bytes, stored_type


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_takes_the_bytes_that_the_package_says(kind: str):
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert stored_bytes((64, 96), kind) == 64 * 96 // weights * size
    assert stored_bytes((1, 32), "Q4_0") == 32  # of which 18 are the tensor's


def test_norms_and_routers_stay_in_float_and_the_output_matrix_in_eight_bits():
    assert stored_type("blk.0.attn_norm.weight", (64,), "Q4_0", tied=True) == "F32"
    assert stored_type("blk.0.ffn_gate_inp.weight", (4, 64), "F16", tied=True) == "F32"
    assert stored_type("blk.0.ffn_up.weight", (96, 64), "Q4_0", tied=True) == "Q4_0"
    assert stored_type("blk.0.ffn_down.weight", (64, 1126), "Q4_0", tied=True) == "F16"
    assert stored_type("blk.0.ffn_down.weight", (64, 1126), "BF16", tied=True) == "BF16"
    assert stored_type("token_embd.weight", (128, 64), "Q4_1", tied=True) == "Q8_0"
    assert stored_type("token_embd.weight", (128, 64), "Q4_1", tied=False) == "Q4_1"
    assert stored_type("output.weight", (128, 64), "Q5_0", tied=False) == "Q8_0"
