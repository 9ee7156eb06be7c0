"""Imported by the fork server of test_resume.py, so that a forked run starts at once."""

from __future__ import annotations

import matplotlib.backends.backend_agg
import matplotlib.backends.backend_svg  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
