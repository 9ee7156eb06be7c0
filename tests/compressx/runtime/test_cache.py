"""The cache: where it is, and that it never costs or falsifies a result."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from compressx.runtime.cache import cache_folder, cached, write_json
from compressx.runtime.errors import ArtifactError


def test_the_environment_chooses_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_without_a_choice_the_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COMPRESSX_CACHE", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, **_: str(tmp_path / name))
    assert cache_folder() == tmp_path / "compressx"


def test_json_is_written_whole_with_its_folders_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": [1, 2.5]})
    write_json(path, {"x": [3]})
    assert json.loads(path.read_text()) == {"x": [3]}
    assert list(path.parent.iterdir()) == [path]


def test_json_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"file/x\.json"):
        write_json(tmp_path / "file" / "x.json", 1)


class TestCached:
    @pytest.fixture
    def calls(self) -> list[float]:
        return []

    def value(self, calls: list[float]) -> dict[str, float]:
        calls.append(0.1 + len(calls))
        return {"value": calls[-1]}

    def test_a_key_is_computed_once_whatever_the_order_of_its_parts(self, tmp_path: Path, calls: list[float]) -> None:
        first = cached({"a": 1, "b": {"c": 2, "d": 3}}, lambda: self.value(calls), tmp_path)
        again = cached({"b": {"d": 3, "c": 2}, "a": 1}, lambda: self.value(calls), tmp_path)
        assert first == again == {"value": 0.1}
        assert len(calls) == 1

    def test_another_key_is_computed_anew(self, tmp_path: Path, calls: list[float]) -> None:
        for key in ({"a": 1}, {"a": 2}, {"a": "1"}, {"b": 1}):
            cached(key, lambda: self.value(calls), tmp_path)
        assert len(calls) == 4

    @pytest.mark.parametrize(
        "damage", [b"", b'{"key": {"a": 1}, "val', b"\xff\xfe", b"[]", b'{"key": {"a": 2}, "value": 7}']
    )
    def test_a_damaged_file_is_ignored_and_rewritten(self, tmp_path: Path, calls: list[float], damage: bytes) -> None:
        cached({"a": 1}, lambda: self.value(calls), tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_bytes(damage)
        assert cached({"a": 1}, lambda: self.value(calls), tmp_path) == {"value": 1.1}
        assert cached({"a": 1}, lambda: self.value(calls), tmp_path) == {"value": 1.1}
        assert len(calls) == 2

    def test_a_folder_that_cannot_be_written_costs_the_caching_and_not_the_value(
        self, tmp_path: Path, calls: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").touch()
        with caplog.at_level(logging.WARNING, logger="compressx"):
            assert cached({}, lambda: self.value(calls), tmp_path / "file") == {"value": 0.1}
        assert "not cached" in caplog.text
