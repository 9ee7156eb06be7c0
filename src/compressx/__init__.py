"""compressx prunes Hugging Face transformer language models.

The public names are those of `__init__.pyi`, which type checkers read. A name is imported when it is first used, so
that `import compressx` (and with it the command line's help) does not wait for torch.
"""

import ast
from importlib import import_module
from pathlib import Path

_MODULE_OF = {
    name.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for name in statement.names
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'compressx' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
