"""The cache: where it is, and that it never costs or falsifies a result."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.cli.commands import refused

from compressx.runtime.cache import cache_folder, cached
from compressx.runtime.errors import ArtifactError


def test_the_environment_chooses_the_folder_or_it_is_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("COMPRESSX_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, **_: str(tmp_path / name))
    assert cache_folder() == tmp_path / "compressx"


class Values:
    """Computes a value, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, float]:
        self.calls += 1
        return {"value": 0.1 + (self.calls - 1)}


def test_a_key_is_computed_once_whatever_the_order_of_its_parts_and_another_anew(tmp_path: Path) -> None:
    value = Values()
    first = cached({"a": 1, "b": {"c": 2, "d": 3}}, value, tmp_path, dict[str, float])
    assert first == cached({"b": {"d": 3, "c": 2}, "a": 1}, value, tmp_path, dict[str, float]) == {"value": 0.1}
    assert value.calls == 1
    for key in ({"a": 1}, {"a": 2}, {"a": "1"}, {"b": 1}):
        cached(key, value, tmp_path, dict[str, float])
    assert value.calls == 5


@pytest.mark.parametrize(
    "damage",
    [b"", b'{"key": {"a": 1}, "val', b"\xff\xfe", b"[]", b'{"key": {"a": 2}, "value": {"value": 7.0}}', b"[" * 100_000,
     *(b'{"key": {"a": 1}, "value": %s}' % x for x in (b"7", b"null", b"[1]", b'{"value": "1"}', b'{"value": [1]}'))],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_rewritten(tmp_path: Path, damage: bytes) -> None:
    value = Values()
    cached({"a": 1}, value, tmp_path, dict[str, float])
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert [cached({"a": 1}, value, tmp_path, dict[str, float]) for _ in range(2)] == [{"value": 1.1}] * 2
    assert value.calls == 2


def test_a_folder_that_cannot_be_written_costs_the_caching_and_not_the_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="compressx"):
        assert cached({}, Values(), tmp_path / "file", Any) == {"value": 0.1}
    assert "not cached" in caplog.text


@pytest.fixture
def _homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user of a container whom it does not know, in a folder of his own."""
    for name in ("HOME", "USERPROFILE", "HOMEDRIVE", "XDG_CACHE_HOME", "COMPRESSX_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(who: object) -> None:
        raise KeyError(who)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("pwd.getpwnam", unknown)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_homeless")
def test_without_a_home_folder_values_are_computed_and_not_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "no home folder for the cache; set HOME, or COMPRESSX_CACHE"
    assert cached({}, Values(), "evaluations", dict[str, float]) == {"value": 0.1}
    assert f"{told}; the result is not cached" in caplog.text
    assert not [*tmp_path.iterdir()], "no folder named ~"
    for chosen in ("~/cache", "~nobody-of-that-name/cache"):
        monkeypatch.setenv("COMPRESSX_CACHE", chosen)
        with pytest.raises(ArtifactError, match=told):
            cache_folder()


@pytest.mark.usefixtures("_homeless")
@pytest.mark.parametrize("path", ["~/r.yaml", "~nobody-of-that-name/r.yaml"])
def test_a_path_in_a_home_folder_that_is_not_there_is_refused_in_one_line(tmp_path: Path, path: str) -> None:
    (tmp_path / "r.yaml").write_text(
        "model: ./m\nprune: [{targets: ['*'], pruner: magnitude, sparsity: 0.5}]\noutput: o\n"
    )
    told = "there is no such home folder as a path names with ~; write the path in full, or set HOME"
    assert told in refused("plan", path)
    for changed in (f"output={path}", f"model={{path: {path}}}", f"evaluate={{lm_eval: {{tasks: ['{path}']}}}}"):
        assert told in refused("plan", "r.yaml", "--set", changed)


def test_what_json_cannot_say_is_returned_and_not_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for value in (float("nan"), float("inf")):
        assert repr(cached({"n": 1}, lambda value=value: value, tmp_path, float)) == repr(value)
    assert "the result is not cached" in caplog.text
    assert cached({"n": 1}, lambda: 2.0, tmp_path, float) == 2.0
