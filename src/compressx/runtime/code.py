"""Which code made a result: the version, digests of sources, and versions of libraries."""

from __future__ import annotations

import hashlib
import importlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"


def code_digest(package: str) -> str:
    """Return the first 8 digits of the sha256 of a package's, or a single module's, Python sources.

    Unlike the version, it changes with every edit of an editable install.
    """
    module = importlib.import_module(package)
    files = sorted(path for place in getattr(module, "__path__", ()) for path in Path(place).rglob("*.py"))
    digest = hashlib.sha256()
    for path in files or [Path(module.__file__ or "")]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


_version = cache(metadata.version)  # the whole description of a package is parsed for it


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that reports and logs name."""
    libraries = ("torch", "transformers", "lm_eval", "datasets", "safetensors")
    return {"python": platform.python_version(), **{name: _version(name) for name in libraries}}


def code_versions(*others: str) -> dict[str, str]:
    """Return what decides a result: compressx's code, versions of torch, transformers, NumPy and others."""
    libraries = ("torch", "transformers", "numpy", *others)
    own = f"{__version__}, code {code_digest('compressx')}"
    return {"compressx": own, **{name: _version(name) for name in libraries}}
