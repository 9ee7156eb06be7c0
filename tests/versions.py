"""Run the tests of models, blocks and attention with other versions of a dependency, and print which pass.

    python tests/versions.py transformers==5.0.0 transformers==5.23.0 torch==2.9.0

Each is installed with what it needs into a folder of its own in build/versions, which is put before the installed
packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["tests/compressx/models", "tests/compressx/blocks", "tests/compressx_attnprune/test_layer.py"]


def tried(requirement: str) -> str:
    """Install a requirement apart and run the tests with it.

    Returns:
        pytest's last line, or that pip failed.
    """
    folder = ROOT / "build/versions" / re.sub(r"[^\w.]+", "-", requirement)
    log = folder.with_name(f"{folder.name}.log")
    folder.mkdir(parents=True, exist_ok=True)
    install = ["pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade", "--target", folder, requirement]
    test = ["pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short", *TESTS]
    with log.open("w", encoding="utf-8") as told:
        for command in (install, test):
            environment = {**os.environ, "PYTHONPATH": str(folder)} if command is test else None
            whole = [sys.executable, "-m", *command]
            done = subprocess.run(whole, cwd=ROOT, env=environment, stdout=told, stderr=told, check=False)
            if done.returncode:
                break
    last = log.read_text(encoding="utf-8").splitlines()[-1:] or ["pip failed"]
    return f"{last[0].strip('= ')} ({log.relative_to(ROOT)})"


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(str(__doc__))
    for asked in sys.argv[1:]:
        print(f"{asked:<24} {tried(asked)}", flush=True)
