"""Plant each fault of faults.json in a copy of the project and see whether the fast tests catch it: `make planted`.

Each row names a file, a text that stands in it once, what to put in its place, and the tests that guard it. `--slow`
runs the tests that are marked slow, too, and `--all` the whole suite instead of those that a row names. The exit status
is 1 if a fault survives or if the text of a row is not there: such a row is to be changed with the code, not dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

PROJECT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", ".*_cache", "__pycache__", ".coverage*")


def rows(ids: list[str]) -> list[dict[str, Any]]:
    """Return the faults with these ids, or all."""
    faults: list[dict[str, Any]] = json.loads((PROJECT / "tests/planted/faults.json").read_text(encoding="utf-8"))
    if unknown := {*ids} - {fault["id"] for fault in faults}:
        raise SystemExit(f"no such faults: {', '.join(sorted(unknown))}")
    return [fault for fault in faults if not ids or fault["id"] in ids]


def verdict(fault: dict[str, Any], copy: Path, *, slow: bool, everything: bool) -> str:
    """Plant a fault in a copy, run the tests, and put the file back."""
    file = copy / fault["file"]
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if before.count(fault["old"]) != 1:
        return "text moved"
    tests = ["tests"] if everything else fault["tests"]
    if missing := [test for test in tests if not (copy / test).exists()]:
        return f"tests moved: {', '.join(missing)}"
    selected = [] if slow else ["-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *selected, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    file.write_text(before.replace(fault["old"], fault["new"]), encoding="utf-8")
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    finally:
        file.write_text(before, encoding="utf-8")
    return {0: "SURVIVED", 1: "caught"}.get(done.returncode, f"pytest ended with {done.returncode}")


def judged(faults: list[dict[str, Any]], workers: int, **options: bool) -> Iterator[tuple[str, str, float]]:
    """Yield each fault's id, what became of it, and the seconds; each worker has a copy of the project."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copies: Queue[Path] = Queue()
        for worker in range(workers):
            copies.put(Path(shutil.copytree(PROJECT, Path(folder, str(worker)), ignore=LEFT_OUT)))

        def judge(fault: dict[str, Any]) -> tuple[str, str, float]:
            copy, started = copies.get(), time.perf_counter()
            try:
                return fault["id"], verdict(fault, copy, **options), time.perf_counter() - started
            finally:
                copies.put(copy)

        yield from pool.map(judge, faults)


def main() -> None:
    """Print one line for each fault, and how many were not caught."""
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    ask.add_argument("ids", nargs="*", help="of the faults to plant; all by default")
    ask.add_argument("--slow", action="store_true", help="run the slow tests, too")
    ask.add_argument("--all", action="store_true", help="run the whole suite")
    ask.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = ask.parse_args()
    faults = rows(given.ids)
    left = 0
    for name, what, seconds in judged(faults, given.workers, slow=given.slow, everything=given.all):
        left += what != "caught"
        print(f"{name}\t{what}\t{seconds:.0f} s", flush=True)
    print(f"{len(faults)} faults, {left} not caught")
    sys.exit(left > 0)


if __name__ == "__main__":
    main()
