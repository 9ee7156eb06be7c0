from __future__ import annotations

from pathlib import Path

import pytest
from tests.compressx.evaluation.conftest import tokenizer as tokenizer  # noqa: PLC0414 - a fixture


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the chosen blocks of one test from the next."""
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))
