"""The command line: `compressx COMMAND`.

Exit status: 0 success; 1 a bug (with its traceback) or a failed check; 2 an error that the user can fix (one message,
no traceback); 130 interrupted; 143 terminated. Output is plain if standard output is not a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from compressx.cli.common import Host
from compressx.cli.models import apply, bench, evaluate, export, generate, init, inspect, pack, unpack
from compressx.cli.plugins import plugins
from compressx.cli.runs import compare, plan, run, schema, sweep
from compressx.runtime.code import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: compressx init ./my-model")
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
    init,
    run,
    plan,
    schema,
    sweep,
    compare,
    evaluate,
    bench,
    generate,
    apply,
    inspect,
    export,
    pack,
    unpack,
    plugins,
):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    # OpenMP reads this when torch is imported. Threads that spin at barriers take the cores from whatever else runs.
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    cli.main(args=None if arguments is None else list(arguments), prog_name="compressx")
