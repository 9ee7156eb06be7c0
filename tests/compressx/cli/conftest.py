"""A saved tiny model, which the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.compressx.saved import save_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a saved tiny model, its tokenizer of whole words, and a text of those words."""
    return save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama").parent
