"""Plant each fault of faults.txt in a copy of the project and see whether the fast tests catch it: `make planted`.

Each worker has a copy, and a process there that has imported what takes seconds, and nothing of the project's: it forks
for every fault.

`== FILE` begins the faults of a file, `ID: TESTS` a fault and the tests that guard it. The `-` lines are text that
stands once in the file, the `+` lines what replaces it (nothing, if there are none). `--slow` also runs the tests that
are marked slow, `--all` the whole suite. The exit status is 1 if a fault survives or if its text is not in the file:
change such a fault with the code. Numbers, masks, data on disk and hostile input are worth a fault; wording and speed
are not.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
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


class Copy:
    """A copy of the project with a process that runs pytest in it, in a fork for each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(shutil.copytree(PROJECT, folder, ignore=LEFT_OUT))
        own = {"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        self.forking = subprocess.Popen(
            [sys.executable, __file__, "--fork"], cwd=self.folder, env={"OMP_NUM_THREADS": "1", **os.environ, **own},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if status := self.pytest("--collect-only", "tests/test_planted.py"):
            raise SystemExit(f"without any fault pytest ends with {status}")

    def pytest(self, *arguments: str) -> int:
        """Run pytest on the copy as it is; return its exit status."""
        # What is imported before pytest begins cannot be rewritten, which pytest warns of.
        given = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]
        print(json.dumps(given), file=self.forking.stdin, flush=True)
        return int(self.forking.stdout.readline())


def fork() -> None:
    """Run pytest for each line of standard input, its arguments, and print the exit status."""
    pytest, *_ = map(importlib.import_module, ("pytest", "torch", "transformers.models.llama.modeling_llama"))
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            os.setsid()
            for stream in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            os._exit(pytest.main(json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        with contextlib.suppress(ProcessLookupError):  # unless a test has left processes that hang
            os.killpg(child, signal.SIGKILL)


def verdict(fault: Fault, copy: Copy, *, slow: bool, everything: bool) -> str:
    """Plant a fault in a copy, run the tests, and put the file back. One that hangs is caught by a time limit."""
    file = copy.folder / fault.file
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if before.count(fault.old) != 1:
        return "text moved"
    tests = ["tests"] if everything else fault.tests
    if missing := [test for test in tests if not (copy.folder / test).exists()]:
        return f"tests moved: {', '.join(missing)}"
    selected = [] if slow else ["-m", "not slow"]
    file.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
    try:
        status = copy.pytest("--timeout=120", *selected, *tests)
    finally:
        file.write_text(before, encoding="utf-8")
    return {0: "SURVIVED", 1: "caught"}.get(status, f"pytest ended with {status}")


def judged(planted: list[Fault], workers: int, **options: bool) -> Iterator[tuple[str, str, float]]:
    """Yield each fault's id, what became of it, and the seconds."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copies: Queue[Copy] = Queue()
        for worker in range(workers):
            copies.put(Copy(Path(folder, str(worker))))

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
    ask.add_argument("--fork", action="store_true", help=argparse.SUPPRESS)
    given = ask.parse_args()
    if given.fork:
        return fork()
    planted = faults(given.ids)
    left = 0
    for name, what, seconds in judged(planted, given.workers, slow=given.slow, everything=given.all):
        left += what != "caught"
        print(f"{name}\t{what}\t{seconds:.0f} s", flush=True)
    print(f"{len(planted)} faults, {left} not caught")
    sys.exit(left > 0)


if __name__ == "__main__":
    main()
