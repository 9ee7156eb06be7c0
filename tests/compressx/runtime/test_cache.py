"""The cache: where it is, and that it never costs or falsifies a result."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from compressx.runtime.cache import cache_folder, cached, write_json
from compressx.runtime.errors import ArtifactError


def test_the_environment_chooses_the_folder_or_it_is_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("COMPRESSX_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, **_: str(tmp_path / name))
    assert cache_folder() == tmp_path / "compressx"


def test_json_is_written_and_an_error_names_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": [1, 2.5]})
    assert json.loads(path.read_text()) == {"x": [1, 2.5]}
    with pytest.raises(ArtifactError, match=r"b\.json/x\.json"):
        write_json(path / "x.json", 1)


class Values:
    """Computes a value, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, float]:
        self.calls += 1
        return {"value": 0.1 + (self.calls - 1)}


def test_a_key_is_computed_once_whatever_the_order_of_its_parts_and_another_anew(tmp_path: Path) -> None:
    value = Values()
    first = cached({"a": 1, "b": {"c": 2, "d": 3}}, value, tmp_path)
    assert first == cached({"b": {"d": 3, "c": 2}, "a": 1}, value, tmp_path) == {"value": 0.1}
    assert value.calls == 1
    for key in ({"a": 1}, {"a": 2}, {"a": "1"}, {"b": 1}):
        cached(key, value, tmp_path)
    assert value.calls == 5


@pytest.mark.parametrize(
    "damage", [b"", b'{"key": {"a": 1}, "val', b"\xff\xfe", b"[]", b'{"key": {"a": 2}, "value": 7}']
)
def test_a_damaged_file_is_ignored_and_rewritten(tmp_path: Path, damage: bytes) -> None:
    value = Values()
    cached({"a": 1}, value, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert cached({"a": 1}, value, tmp_path) == cached({"a": 1}, value, tmp_path) == {"value": 1.1}
    assert value.calls == 2


def test_a_folder_that_cannot_be_written_costs_the_caching_and_not_the_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="compressx"):
        assert cached({}, Values(), tmp_path / "file") == {"value": 0.1}
    assert "not cached" in caplog.text
