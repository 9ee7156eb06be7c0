"""A new plugin package, complete: a pruner that works, its tests, and the entry point by which pip makes it known."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from compressx.runtime.errors import ArtifactError, PluginError
from compressx.runtime.files import atomic_write

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "compressx-@name@"
version = "0.1.0"
description = "A pruner for compressx"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["compressx"]

[project.optional-dependencies]
test = ["pytest"]

# The left side is the plugin's name, by which -p no:@name@ blocks it; the right side the module with the hooks.
[project.entry-points.compressx]
@name@ = "compressx_@module@"

[tool.hatch.build.targets.wheel]
packages = ["src/compressx_@module@"]
"""

_README = """\
# compressx-@name@

A pruner for compressx, which prunes Hugging Face transformer language models.

```sh
pip install -e './compressx-@name@[test]'
compressx plugins                 # shows @name@
compressx plugins check @name@    # every promise of a pruner, on tiny models
```

In a recipe:

```yaml
prune:
  - {targets: ["*"], pruner: @name@, sparsity: 0.5, options: {power: 1.0}}
```

Tests: `pytest ./compressx-@name@`.
"""

_MODULE = '''\
"""The pruner `@name@`: a weight is worth its size times a power of its input's norm."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, Field

from compressx import Block, FeatureNorms, Pattern, PruneResult, PrunerSpec, Statistic, hookimpl, keep_masks


class Options(BaseModel):
    """What a recipe may say under `options`."""

    power: float = Field(1.0, ge=0, description="of the input norms; 0 is magnitude pruning")


class Pruner:
    """Decides for the linears of one decoder block."""

    def __init__(self, options: Options) -> None:
        self.power = options.power

    def observe(self, block: Block, name: str) -> Statistic:
        """Say what calibration has to measure of a linear's input."""
        return FeatureNorms(block.linears[name].in_features)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> Mapping[str, PruneResult]:
        """Score every weight, higher = keep; keep_masks makes masks of the scores with the right counts."""
        scores = {
            name: block.linears[name].weight.float().abs() * stats[name].norms ** self.power for name in patterns
        }
        return {name: PruneResult(keep) for name, keep in keep_masks(scores, patterns).items()}


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer the pruner to recipes."""
    return [PrunerSpec("@name@", "size times a power of the input norm", Options, Pruner, separable=True)]
'''

_TEST = """\
from compressx import load_plugins
from compressx.testing import check_pruner

from compressx_@module@ import compressx_pruners

(SPEC,) = compressx_pruners()


def test_the_pruner_keeps_every_promise():
    check_pruner(SPEC)


def test_installing_the_package_makes_the_pruner_known():
    assert "@name@" in load_plugins().pruners
"""


def check_name(name: str) -> None:
    """Refuse a name that no package or recipe could carry.

    Raises:
        PluginError: another form than lower-case words joined by - or _.
    """
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"no plugin can be named {name!r}; expected lower-case letters and digits, words joined by - or _, such as "
            "'my-pruner'"
        )


def new_plugin(name: str, parent: Path) -> Path:
    """Write a plugin package `compressx-NAME` with a working pruner called NAME.

    Args:
        name: of the pruner and the plugin.
        parent: where the folder goes.

    Returns:
        The folder.

    Raises:
        PluginError: a name that cannot be one.
        ArtifactError: the folder is there already, or cannot be written.
    """
    check_name(name)
    folder = parent.expanduser() / f"compressx-{name}"
    if folder.exists():
        raise ArtifactError(f"{folder} is there already; choose another name or --folder, or remove it")
    module = name.replace("-", "_")
    files = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"src/compressx_{module}/__init__.py": _MODULE,
        f"tests/test_{module}.py": _TEST,
    }
    try:
        for place, text in files.items():
            atomic_write(folder / place, text.replace("@name@", name).replace("@module@", module).encode())
    except ArtifactError:
        shutil.rmtree(folder, ignore_errors=True)  # half a package would be in the way of the next try
        raise
    return folder
