"""Pytest fixtures for authors of plugins; in a conftest: `pytest_plugins = ["compressx.testing.fixtures"]`."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from compressx.testing.models import tiny_model, tiny_tokens


@pytest.fixture
def tiny_llama() -> Any:
    """Give a Llama: grouped queries, rotary embeddings, no biases."""
    return tiny_model("llama")


@pytest.fixture
def tiny_gpt2() -> Any:
    """Give a GPT-2: learned positions, fused query, key and value, weights stored [in_features, out_features]."""
    return tiny_model("gpt2")


@pytest.fixture
def tiny_gemma3() -> Any:
    """Give a Gemma 3: query and key norms, sliding windows."""
    return tiny_model("gemma3")


@pytest.fixture
def tiny_tied() -> Any:
    """Give a Llama whose head is its embedding."""
    return tiny_model("llama-tied")


@pytest.fixture
def tiny_moe() -> Any:
    """Give a Mixtral: four experts behind a router, fused into one parameter each."""
    return tiny_model("mixtral")


@pytest.fixture
def calibration_tokens() -> Tensor:
    """Give token ids [8, 32] for any of the tiny models."""
    return tiny_tokens()
