"""Run the tests of models, blocks and attention with other versions of a dependency: `make versions`.

    python tests/versions.py transformers==5.16.0 transformers==5.23.0

Each is installed with what it needs into a folder of its own in build/versions, which is put before the installed
packages, and has a log beside it. The exit status is 1 if a version cannot be installed or fails a test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["tests/compressx/models", "tests/compressx/blocks", "tests/compressx_attnprune/test_layer.py"]


def verdict(requirement: str) -> tuple[bool, str]:
    """Install a requirement apart and run the tests with it; returns whether they passed, and the log's last line."""
    folder = ROOT / "build/versions" / re.sub(r"[^\w.]+", "-", requirement)
    log = folder.with_name(f"{folder.name}.log")
    folder.mkdir(parents=True, exist_ok=True)
    install = ["pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade", "--target", folder, requirement]
    test = ["pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short", *TESTS]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with log.open("w", encoding="utf-8") as told:
        passed = all(
            subprocess.run(
                [sys.executable, "-m", *command], cwd=ROOT, env=env, stdout=told, stderr=told, check=False
            ).returncode == 0
            for command, env in ((install, None), (test, environment))
        )  # fmt: skip
    *_, last = ["", *log.read_text(encoding="utf-8").splitlines()]
    return passed, f"{last} ({log.relative_to(ROOT)})"


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(str(__doc__))
    failed = False
    for requirement in sys.argv[1:]:
        passed, line = verdict(requirement)
        failed |= not passed
        print(f"{requirement:<24} {'passed' if passed else 'FAILED'}: {line}", flush=True)
    sys.exit(failed)
