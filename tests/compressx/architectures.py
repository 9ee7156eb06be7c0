"""Which architectures a test that needs one of each kind tries, where all would say the same again."""

from __future__ import annotations

KINDS = ("llama", "gpt2", "gemma3", "mixtral", "phi3", "opt", "bloom", "stablelm")
"""Grouped keys, transposed and fused weights, windows and post-norms, experts, split biases, ALiBi, parallel blocks."""
