"""What OpenMP's threads do while they wait: it is decided before torch, which brings OpenMP, is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
IN_PLACE_OF_TORCH = f"""\
import os, sys
print(*(f"{{name}}={{os.environ[name]}}" for name in {POLICIES} if name in os.environ))
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in POLICIES:
        monkeypatch.delenv(name, raising=False)
    return dict(os.environ)


def started(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    ("own", "seen"),
    [
        ({}, "GOMP_SPINCOUNT=30000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY=ACTIVE"),
        ({"GOMP_SPINCOUNT": "300000"}, "GOMP_SPINCOUNT=300000"),
        ({"KMP_BLOCKTIME": "200"}, "KMP_BLOCKTIME=200"),
    ],
)
def test_torch_meets_threads_that_soon_sleep_at_barriers_unless_the_user_said_otherwise(
    project: Path, environment: dict[str, str], own: dict[str, str], seen: str
) -> None:
    (project / "torch.py").write_text(IN_PLACE_OF_TORCH)
    path = os.pathsep.join([str(project), *filter(None, [environment.get("PYTHONPATH")])])
    done = started({**environment, "PYTHONPATH": path, **own}, "-m", "compressx", "plan", "r.yaml", "--device", "cpu")
    assert done.stdout.split() == [seen], done.stderr


def test_a_program_that_imports_compressx_keeps_its_own(environment: dict[str, str]) -> None:
    asked = "import os, compressx; compressx.CompressxError; print('GOMP_SPINCOUNT' in os.environ)"
    assert started(environment, "-c", asked).stdout == "False\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torch's libgomp is Linux's")
def test_libgomp_takes_it(environment: dict[str, str]) -> None:
    told = started({**environment, "OMP_DISPLAY_ENV": "VERBOSE"}, "-m", "compressx", "plugins").stderr
    assert "GOMP_SPINCOUNT = '30000'" in told
