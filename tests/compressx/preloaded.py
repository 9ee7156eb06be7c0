"""Imported by the fork server of test_resume.py, so that a forked run starts at once."""

from __future__ import annotations

import transformers.models.llama.modeling_llama  # noqa: F401 - to have it
