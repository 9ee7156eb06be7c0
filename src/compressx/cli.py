"""The command line: `compressx run | plan | plugins`.

Exit status: 0 done, 2 an error that the user can mend (one message, no traceback), 1 a defect (with its traceback) or a
check that failed, 130 interrupted. Output is plain when standard output is not a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from compressx._version import __version__

if TYPE_CHECKING:
    from compressx.plugins.manager import Plugins

_Command = TypeVar("_Command", bound=Callable[..., None])


@dataclass(frozen=True)
class _Host:
    """What the options before the command say."""

    modules: tuple[str, ...]
    blocked: tuple[str, ...]

    def plugins(self) -> Plugins:
        from compressx.plugins.manager import load_plugins

        if self.modules:  # a console script does not look for modules in the working folder, `python -m` does
            sys.path.insert(0, str(Path.cwd()))
        return load_plugins(modules=self.modules, blocked=self.blocked)


def _errors_for_users(command: _Command) -> _Command:
    """Print a `CompressxError` as one message and exit with 2; let everything else show its traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from compressx.errors import CompressxError

        try:
            command(*args, **kwargs)
        except CompressxError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted; finished blocks are kept, and --resume goes on after them", err=True)
            sys.exit(130)

    return wrapped  # type: ignore[return-value]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="compressx")
@click.option(
    "--plugin",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Load a plugin module, from the working folder too; may be repeated.",
)
@click.option("-p", "blocked", multiple=True, metavar="no:NAME", help="Block a plugin before it is imported.")
@click.pass_context
def cli(context: click.Context, modules: tuple[str, ...], blocked: tuple[str, ...]) -> None:
    """Prune Hugging Face transformer language models by recipe."""
    for value in blocked:
        if not value.startswith("no:") or value == "no:":
            raise click.BadParameter(f"expected no:NAME, got {value!r}", param_hint="-p")
    context.obj = _Host(modules, tuple(b.removeprefix("no:") for b in blocked))


_set = click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
                    help="Override a recipe value, such as calibration.samples=8; may be repeated.")  # fmt: skip


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@_set
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--resume", is_flag=True, help="Go on with an interrupted run, after its last block or checkpoint.")
@click.option("--restart", is_flag=True, help="Begin anew where an interrupted run has left finished blocks.")
@click.option("-v", "--verbose", is_flag=True, help="A line for every pruned layer, with its figures and curves.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing but errors.")
@click.pass_obj
@_errors_for_users
def run(
    host: _Host, recipe: Path, overrides: tuple[str, ...], device: str, resume: bool, restart: bool, verbose: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Prune the model of RECIPE and write its output folder."""
    from compressx import terminal
    from compressx.pipeline.run import run as run_recipe
    from compressx.recipe.schema import load_recipe

    loaded = load_recipe(recipe, overrides)
    plugins = host.plugins()
    quiet = quiet or os.environ.get("RANK", "0") != "0"  # of several processes the first speaks
    if verbose and not quiet:
        plugins.manager.register(terminal.LayerLines(), name="terminal")
    with terminal.progress(quiet=quiet) as tell:
        report = run_recipe(
            loaded, plugins=plugins, progress=tell, device=device,  # type: ignore[arg-type]
            resume=resume, restart=restart,
        )  # fmt: skip
    if not quiet:
        terminal.print_summary(report, loaded.recipe.output)


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@_set
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.pass_obj
@_errors_for_users
def plan(host: _Host, recipe: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check RECIPE and show what would happen to every linear, without loading weights."""
    from compressx import terminal
    from compressx.pipeline.run import plan as plan_recipe

    planned = plan_recipe(recipe, plugins=host.plugins(), overrides=overrides)
    if as_json:
        click.echo(json.dumps(planned.to_dict(), indent=1))
    else:
        terminal.print_plan(planned)


@cli.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
@click.pass_context
@_errors_for_users
def plugins(context: click.Context, as_json: bool) -> None:
    """Show every plugin: where it came from, whether it loaded, and its pruners."""
    if context.invoked_subcommand is not None:
        return
    from compressx import terminal

    records = context.obj.plugins().records
    if as_json:
        import dataclasses

        click.echo(json.dumps([dataclasses.asdict(r) for r in records], indent=1))
    else:
        terminal.print_plugins(records)


@plugins.command("new")
@click.argument("name")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(), help="Where it goes; here by default.")
@click.pass_obj
@_errors_for_users
def plugins_new(host: _Host, name: str, folder: Path) -> None:
    """Write a plugin package compressx-NAME with a working pruner called NAME, and its tests."""
    from compressx.errors import PluginError
    from compressx.plugins.scaffold import check_name, new_plugin

    check_name(name)
    loaded = host.plugins()
    if name in loaded.pruners or any(name == r.name for r in loaded.records):
        raise PluginError(f"there is a plugin or pruner {name!r} already, and no two may share a name; choose another")
    written = new_plugin(name, folder)
    where = written if written.is_absolute() else f"./{written.as_posix()}"  # to pip a bare name is one of PyPI's
    click.echo(f"wrote {written}; next:\n  pip install {where}\n  compressx plugins check {name}")


@plugins.command("check")
@click.argument("name")
@click.option(
    "--set", "options", multiple=True, metavar="OPTION=VALUE", help="An option of the pruner; may be repeated."
)
@click.option("--architecture", "architectures", multiple=True, help="Check on this one; may be repeated.")
@click.pass_obj
@_errors_for_users
def plugins_check(host: _Host, name: str, options: tuple[str, ...], architectures: tuple[str, ...]) -> None:
    """Put the pruner NAME, or every pruner of the plugin NAME, through what a pruner promises; 1 when a check fails."""
    from compressx import terminal
    from compressx.recipe.yamlfile import assignments
    from compressx.testing.conformance import conformance, known_architectures

    loaded = host.plugins()
    offered = next((r.pruners for r in loaded.records if r.name == name and r.status == "loaded"), ())
    chosen = known_architectures(architectures)
    given = assignments(options)
    failed = False
    for spec in [loaded.pruner(pruner) for pruner in offered or (name,)]:
        failed |= terminal.print_conformance(spec.name, conformance(spec, options=given, architectures=chosen))
    if failed:
        sys.exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    cli.main(args=None if arguments is None else list(arguments), prog_name="compressx")
