"""Run tests with other versions of Python and of a dependency: `make versions`.

    python tests/versions.py python3.11 transformers==5.16.0

An interpreter of PATH installs into an environment of its own as `make test` does, and runs all fast tests. A
requirement is installed with what it needs into a folder that is put before the installed packages, and tests of
models, blocks and attention are run. All is in build/versions, each with a log beside it. The exit status is 1 if a
version cannot be installed or fails a test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["tests/compressx/models", "tests/compressx/blocks", "tests/compressx_attnprune/test_layer.py"]
PYTEST = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short"]


def verdict(asked: str) -> tuple[bool, str]:
    """Install an interpreter's environment or a requirement and run the tests; return success, and the last line."""
    folder = ROOT / "build/versions" / re.sub(r"[^\w.]+", "-", asked).strip("-")
    log = folder.with_name(f"{folder.name}.log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = asked.startswith("python")
    if own:
        install = ["make", f"VENV={folder}", f"PYTHON={asked}", f"{folder}/.installed-dev"]
        test = [f"{folder}/bin/python", *PYTEST, "-n", "auto", "--dist", "worksteal"]
    else:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
        install, test = [*pip, "--target", str(folder), asked], [sys.executable, *PYTEST, *TESTS]
    before = {} if own else {"PYTHONPATH": str(folder)}
    with log.open("w", encoding="utf-8") as told:
        passed = all(
            subprocess.run(
                command, cwd=ROOT, env={**os.environ, **more}, stdout=told, stderr=told, check=False
            ).returncode == 0
            for command, more in ((install, {}), (test, before))
        )  # fmt: skip
    *_, last = ["", *log.read_text(encoding="utf-8").splitlines()]
    return passed, f"{last} ({log.relative_to(ROOT)})"


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(str(__doc__))
    failed = False
    for asked in sys.argv[1:]:
        passed, line = verdict(asked)
        failed |= not passed
        print(f"{asked:<24} {'passed' if passed else 'FAILED'}: {line}", flush=True)
    sys.exit(failed)
