"""What the tests of attention pruning share."""

from __future__ import annotations

import pytest

from compressx_attnprune import training


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps of mask mode, enough to see that they are taken."""
    monkeypatch.setattr(training, "STEPS", 5)
