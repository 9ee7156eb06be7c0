"""The command line: `compressx COMMAND`.

Exit status: 0 success; 1 a bug (with its traceback) or a failed check; 2 an error that the user can fix (one message,
no traceback); 130 interrupted; 143 terminated. Output is plain if standard output is not a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from compressx.cli import models, runs
from compressx.cli.common import Commands, Host
from compressx.cli.plugins import plugins
from compressx.runtime.code import __version__


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: compressx init ./my-model"
)
@click.version_option(__version__, prog_name="compressx")
@click.option(
    "--plugin",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Load a plugin: a module, also of the working directory, or path/to/file.py; may be repeated.",
)
@click.option("-p", "blocked", multiple=True, metavar="no:NAME", help="Block a plugin before it is imported.")
@click.pass_context
def cli(context: click.Context, modules: tuple[str, ...], blocked: tuple[str, ...]) -> None:
    """Prune Hugging Face transformer language models by recipe."""
    for value in blocked:
        if not value.startswith("no:") or value == "no:":
            raise click.BadParameter(f"expected no:NAME, got {value!r}", param_hint="-p")
    context.obj = Host(modules, tuple(b.removeprefix("no:") for b in blocked))


for _command in (
    models.init_command, runs.run_command, runs.plan_command, runs.schema_command, runs.sweep_command,
    runs.compare_command, models.eval_command, models.bench_command, models.generate_command, models.apply_command,
    models.inspect_command, models.export_command, models.pack_command, models.unpack_command, plugins,
):  # fmt: skip
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    # OpenMP reads this when torch is imported. Threads that spin at barriers take the cores from whatever else runs;
    # those that never spin cost a fifth on idle cores (docs/questions.md).
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
        os.environ["GOMP_SPINCOUNT"] = "30000"
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as by >&-: the next file that is opened would get its number, and what is printed
            os.open(os.devnull, os.O_RDWR)
        elif name != "stdin" and stream is getattr(sys, f"__{name}__"):
            stream.reconfigure(errors="backslashreplace")  # what the terminal cannot show is escaped
    cli.main(args=None if arguments is None else list(arguments), prog_name="compressx")
