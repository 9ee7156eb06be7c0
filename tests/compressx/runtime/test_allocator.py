"""Freed memory stays in the process during a run, and only then."""

from __future__ import annotations

import subprocess
import sys

import pytest

from compressx.runtime import modes
from compressx.runtime.modes import freed_memory_kept, return_freed_memory

GLIBC = modes._glibc("mallopt") is not None

FAULTS = """
import resource
import psutil, torch
from compressx.runtime.modes import freed_memory_kept

def fresh(megabytes, count):
    # Pages, as a share of all, of arrays that are asked for and freed again and again; the first rounds fill the heap.
    for done in range(8):
        if done == 4:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        made = [torch.ones(megabytes * 2**18) for _ in range(count)]
        del made
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * 4096 / 2**20 / (4 * megabytes * count)

with freed_memory_kept():
    print(fresh(24, 6), fresh(2, 50))
    inside = psutil.Process().memory_info().rss
print((inside - psutil.Process().memory_info().rss) / 2**20)
"""


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_arrays_take_the_pages_of_those_before_them_until_the_end_of_the_with():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    large, small, returned = map(float, done.stdout.split())
    assert large < 0.05
    assert small < 0.05
    assert returned > 120  # MiB


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str | int, ...]]:
    """What glibc is asked for."""
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    made: list[tuple[str | int, ...]] = []
    monkeypatch.setattr(modes, "_glibc", lambda name: lambda *values: made.append((name, *values)))
    return made


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("MALLOC_MMAP_MAX_", "65536"), ("MALLOC_MMAP_THRESHOLD_", "131072"),
     ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.mmap_threshold=131072")],
)  # fmt: skip
def test_settings_of_the_environment_are_left_alone(name, value, calls, monkeypatch):
    monkeypatch.setenv(name, value)
    with freed_memory_kept():
        pass
    assert calls == []


KEPT = [("mallopt", -3, 2**25), ("mallopt", -1, -1)]
RETURNED = [("mallopt", -3, 2**25), ("mallopt", -1, 2**26), ("malloc_trim", 0)]


def test_the_first_run_sets_and_the_last_one_restores(calls):
    with freed_memory_kept():
        with freed_memory_kept():
            pass
        assert calls == [*KEPT, RETURNED[-1]]
    assert calls == [*KEPT, RETURNED[-1], *RETURNED]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_left_alone(system, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(modes.ctypes, "CDLL", None)
    with freed_memory_kept():
        return_freed_memory()


def test_a_c_library_without_these_functions_is_left_alone(monkeypatch):
    monkeypatch.setattr(modes.ctypes, "CDLL", lambda _: object())
    with freed_memory_kept():
        return_freed_memory()
