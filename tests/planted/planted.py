"""Plant each fault of faults.txt in a copy of the project and see whether the fast tests catch it: `make planted`.

`== FILE` begins the faults of a file, `ID: TESTS` a fault and the tests that guard it. The `-` lines are text that
stands once in the file, the `+` lines what replaces it (nothing, if there are none). `--slow` also runs the tests that
are marked slow, `--all` the whole suite. The exit status is 1 if a fault survives or if its text is not in the file:
change such a fault with the code. Numbers, masks, data on disk and hostile input are worth a fault; wording and speed
are not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

PROJECT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.txt")
_ROW = re.compile(
    r"^== (?P<file>.+)$|^(?P<id>[\w-]+): (?P<tests>.+)\n(?P<old>(?:- .*\n)+)(?P<new>(?:\+ .*\n)*)", re.MULTILINE
)
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", ".*_cache", "__pycache__", ".coverage*")


@dataclass(frozen=True)
class Fault:
    """One mistake to plant: `new` in the place of `old` in a file, and the tests that have to fail for it."""

    id: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str


def faults(ids: Iterable[str] = ()) -> list[Fault]:
    """Read the faults with these ids, or all."""
    found: list[Fault] = []
    file = ""
    text = FAULTS.read_text(encoding="utf-8")
    if rest := _ROW.sub("", text).strip():
        raise SystemExit(f"{FAULTS}: no fault, and no file: {rest.splitlines()[0]}")
    for row in _ROW.finditer(text):
        file = row["file"] or file
        if row["id"]:
            old, new = ("\n".join(line[2:] for line in row[part].splitlines()) for part in ("old", "new"))
            found.append(Fault(row["id"], file, tuple(row["tests"].split()), old, new))
    if unknown := {*ids} - {fault.id for fault in found}:
        raise SystemExit(f"no such faults: {', '.join(sorted(unknown))}")
    return [fault for fault in found if not ids or fault.id in ids]


def verdict(fault: Fault, copy: Path, *, slow: bool, everything: bool) -> str:
    """Plant a fault in a copy, run the tests, and put the file back."""
    file = copy / fault.file
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if before.count(fault.old) != 1:
        return "text moved"
    tests = ["tests"] if everything else fault.tests
    if missing := [test for test in tests if not (copy / test).exists()]:
        return f"tests moved: {', '.join(missing)}"
    selected = [] if slow else ["-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *selected, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    file.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    finally:
        file.write_text(before, encoding="utf-8")
    return {0: "SURVIVED", 1: "caught"}.get(done.returncode, f"pytest ended with {done.returncode}")


def judged(planted: list[Fault], workers: int, **options: bool) -> Iterator[tuple[str, str, float]]:
    """Yield each fault's id, what became of it, and the seconds; each worker has a copy of the project."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copies: Queue[Path] = Queue()
        for worker in range(workers):
            copies.put(Path(shutil.copytree(PROJECT, Path(folder, str(worker)), ignore=LEFT_OUT)))

        def judge(fault: Fault) -> tuple[str, str, float]:
            copy, started = copies.get(), time.perf_counter()
            try:
                return fault.id, verdict(fault, copy, **options), time.perf_counter() - started
            finally:
                copies.put(copy)

        yield from pool.map(judge, planted)


def main() -> None:
    """Print one line for each fault, and how many were not caught."""
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    ask.add_argument("ids", nargs="*", help="of the faults to plant; all by default")
    ask.add_argument("--slow", action="store_true", help="run the slow tests, too")
    ask.add_argument("--all", action="store_true", help="run the whole suite")
    ask.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = ask.parse_args()
    planted = faults(given.ids)
    left = 0
    for name, what, seconds in judged(planted, given.workers, slow=given.slow, everything=given.all):
        left += what != "caught"
        print(f"{name}\t{what}\t{seconds:.0f} s", flush=True)
    print(f"{len(planted)} faults, {left} not caught")
    sys.exit(left > 0)


if __name__ == "__main__":
    main()
