"""Shared by the commands: global options, error handling, and common options."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, NoReturn

import click

from compressx.runtime.errors import CompressxError, memory_named, printable

if TYPE_CHECKING:
    from compressx.plugins.manager import Plugins
    from compressx.report.section import Section


class _Expanded(click.Path):
    """A path with `~` expanded, which a shell does not do after `--output=`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(str(super().convert(value, param, ctx))).expanduser()


PATH = _Expanded(path_type=Path)

_GO_ON = {"run": "--resume continues", "sweep": "the same command continues"}
"""How to go on after an interrupted command."""


@dataclass(frozen=True)
class Host:
    """The global options, given before the command."""

    modules: tuple[str, ...]
    blocked: tuple[str, ...]

    def plugins(self, *, warn: bool = True) -> Plugins:
        """Load the plugins, with a warning for each that fails."""
        from compressx.plugins.manager import load_plugins

        if self.modules:  # unlike `python -m`, a console script does not import from the working directory
            sys.path.insert(0, str(Path.cwd()))
        plugins = load_plugins(modules=self.modules, blocked=self.blocked)
        for record in plugins.records:
            if warn and record.status == "failed":
                click.echo(
                    f"warning: plugin {record.name!r} failed to load and is skipped: {record.error}; -p no:NAME skips "
                    "it silently",
                    err=True,
                )
        return plugins


def is_first() -> bool:
    """Return whether this process prints: the only one, or the first under `torchrun`."""
    return os.environ.get("RANK", "0") == "0"


class Terminated(KeyboardInterrupt):
    """SIGTERM, from `timeout`, SLURM or Kubernetes; handled like Ctrl-C."""


@contextmanager
def terminated_by_sigterm() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, for the duration of a `with`, unless the signal is ignored or handled already.

    Under `torchrun` SIGTERM keeps its default, because a process that waits for another does not run handlers.
    """
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several or current_thread() is not main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def errors_for_users(context: click.Context) -> Iterator[None]:
    """Print a `CompressxError` as one message and exit with 2; other exceptions show their traceback.

    Ctrl-C exits with 130 and SIGTERM with 143, with a hint how to continue.
    """
    try:
        with memory_named("what the command computes"):
            yield
    except CompressxError as error:
        said = printable(str(error))
    except RuntimeError as error:
        if "home directory" not in str(error):  # of Path.expanduser
            raise
        said = "there is no such home folder as a path names with ~; write the path in full, or set HOME"
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or "standard output"  # files that are written have a message of their own
        said = f"cannot write {where}: {error.strerror}; free some space there"
    except KeyboardInterrupt as stopped:
        word, status = ("terminated", 143) if isinstance(stopped, Terminated) else ("interrupted", 130)
        if (notes := getattr(stopped, "__notes__", None)) is not None:  # of `noted`
            kept, go_on = " and ".join(filter(None, reversed(notes))), _GO_ON[str(context.invoked_subcommand)]
            word += f"; kept: {kept}; {go_on}" if kept else "; nothing was finished, nothing is kept"
        if is_first():
            click.echo(word, err=True)
        sys.exit(status)
    else:
        return
    click.echo(f"error: {said}", err=True)
    sys.exit(2)


class Commands(click.Group):
    """Commands whose errors are printed in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Read the arguments of a command and run it."""
        with terminated_by_sigterm(), errors_for_users(ctx):
            return super().invoke(ctx)


def show_or_json(plain: object, sections: Iterable[Section], *, as_json: bool) -> None:
    """Print what a command found on standard output, as JSON or as sections."""
    from compressx.cli import terminal
    from compressx.runtime.files import json_text

    if as_json:
        click.echo(json_text(plain, indent=1))
    else:
        terminal.show(*sections)


set_option = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
                          help="Override a recipe value, such as calibration.samples=8; may be repeated.")  # fmt: skip
options_option = click.option("--set", "options", multiple=True, metavar="OPTION=VALUE",
                              help="An option of what is named; may be repeated.")  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
device_option = click.option(
    "--device", default="auto", show_default=True,
    help="auto (CUDA if available), cpu, cuda, or one GPU, such as cuda:1.",
)  # fmt: skip
trust_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the model; only if you trust it."
)
revision_option = click.option("--revision", help="Branch, tag or commit of a model on the hub.")
base_option = click.option(
    "--base", metavar="MODEL", help="Model that a packed fine-tune, or masks of one, differ from: folder or hub id."
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"], case_sensitive=False),
    default="auto",
    show_default=True,
)


def takes_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the argument MODEL and the options that say how it is loaded; it is called with a `source`."""

    @click.argument("model")
    @trust_option
    @revision_option
    @base_option
    @dtype_option
    @wraps(command)
    def wrapped(
        *args: Any, model: str, dtype: str, base: str | None, revision: str | None, trust_remote_code: bool, **more: Any
    ) -> None:
        from compressx.evaluation.saved import source_of

        source = source_of(model, dtype=dtype, base=base, revision=revision, trust_remote_code=trust_remote_code)
        command(*args, source=source, **more)

    return wrapped
