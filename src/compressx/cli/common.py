"""What the commands share: the options before them, how errors are shown, and options of several."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from compressx.plugins.manager import Plugins

_Command = TypeVar("_Command", bound=Callable[..., None])


class _Expanded(click.Path):
    """A path in which `~` is the home folder also where a shell leaves it alone, as after `--output=`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Path(str(super().convert(value, param, ctx))).expanduser()


PATH = _Expanded(path_type=Path)


@dataclass(frozen=True)
class Host:
    """What the options before the command say."""

    modules: tuple[str, ...]
    blocked: tuple[str, ...]

    def plugins(self, *, told: bool = True) -> Plugins:
        """Load the plugins that these options leave; one that fails is warned of unless it is `told` otherwise."""
        from compressx.plugins.manager import load_plugins

        if self.modules:  # a console script does not look for modules in the working folder, `python -m` does
            sys.path.insert(0, str(Path.cwd()))
        plugins = load_plugins(modules=self.modules, blocked=self.blocked)
        for record in plugins.records:
            if told and record.status == "failed":
                click.echo(
                    f"warning: plugin {record.name!r} failed to load and is left out: {record.error}; `required` in "
                    "plugins.toml makes that an error, and -p no:NAME leaves it out silently",
                    err=True,
                )
        return plugins


def is_first() -> bool:
    """Whether this process is alone or the first of those that `torchrun` started: the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


class Terminated(KeyboardInterrupt):
    """SIGTERM, which `timeout`, SLURM and Kubernetes send, and which ends a command as Ctrl-C does."""


@contextmanager
def terminated_by_sigterm() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM, for the length of a `with`, unless the signal is ignored or handled already.

    Of several processes SIGTERM ends each at once, as by default: one that waits for another runs no handler.
    """
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if several or current_thread() is not main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the clearing up
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def errors_for_users(command: _Command) -> _Command:
    """Print a `CompressxError` as one message and exit with 2; let everything else show its traceback.

    Ctrl-C exits with 130 and SIGTERM with 143, and the first process says how to go on.
    """

    @wraps(command)
    @terminated_by_sigterm()
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from compressx.runtime.errors import CompressxError

        try:
            command(*args, **kwargs)
        except CompressxError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt as stopped:
            word, status = ("terminated", 143) if isinstance(stopped, Terminated) else ("interrupted", 130)
            told = {
                "run": "; finished blocks are kept, and --resume goes on after them",
                "sweep": "; finished runs and blocks are kept, and the same command goes on after them",
            }
            if is_first():
                click.echo(f"{word}{told.get(command.__name__, '')}", err=True)
            sys.exit(status)

    return wrapped  # type: ignore[return-value]


set_option = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
                    help="Override a recipe value, such as calibration.samples=8; may be repeated.")  # fmt: skip


device_option = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
trust_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the model; only if you trust it."
)
revision_option = click.option("--revision", help="Branch, tag or commit of a model on the hub.")
dtype_option = click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
)
