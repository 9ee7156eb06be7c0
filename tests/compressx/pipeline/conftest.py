"""An empty working folder, saved tiny models, and no figures but where a test is about them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.saved import save_tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give the folder of a saved tiny model by its architecture, made once."""
    return cache(lambda name: save_tiny(tmp_path_factory.mktemp("saved") / "model", name))


@pytest.fixture(scope="session")
def model(models: Any) -> Path:
    return models("llama")


@pytest.fixture(autouse=True)
def _in_tmp(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out, which take five times as long as all else that a tiny run does."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("compressx.report.figures.draw", lambda *_: ())


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights can be loaded: what is refused has to be refused before."""
    monkeypatch.setattr("compressx.pipeline.inputs.open_model", lambda *_: pytest.fail("weights were loaded"))


@pytest.fixture
def drawn() -> None:
    """Ask for the figures."""
