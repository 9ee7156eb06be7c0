"""`compressx plugins`, with the subcommands `new` and `check`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click

from compressx.cli.common import PATH, Host, errors_for_users, plugin_names


@click.group(invoke_without_command=True, epilog="Example: compressx plugins --json")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
@click.pass_context
@errors_for_users
def plugins(context: click.Context, as_json: bool) -> None:
    """Show every plugin: where it came from, whether it loaded, and what it offers."""
    if context.invoked_subcommand is not None:
        return
    from compressx.cli import tables, terminal

    records = context.obj.plugins(warn=False).records
    if as_json:
        click.echo(json.dumps([r.as_json() for r in records], indent=1))
    else:
        terminal.show(*tables.of_plugins(records))


@plugins.command("new", epilog="Example: compressx plugins new my-pruner --folder work")
@click.argument("name")
@click.option("--kind", type=click.Choice(["pruner", "structured", "selector", "evaluator", "exporter"]),
              default="pruner", show_default=True,
              help="What it offers; structured is a pruner of whole units.")  # fmt: skip
@click.option("--folder", type=PATH, default=Path(), help="Folder to create it in; by default the current one.")
@click.pass_obj
@errors_for_users
def plugins_new(host: Host, name: str, kind: str, folder: Path) -> None:
    """Write a plugin package compressx-NAME with a working example called NAME of a kind, and its tests."""
    from compressx.plugins.scaffold import check_name, new_plugin
    from compressx.runtime.errors import PluginError

    check_name(name)
    loaded = host.plugins()
    if any(name in offered for offered in loaded.offers.values()) or any(name == r.name for r in loaded.records):
        raise PluginError(f"{name!r} exists already, as a plugin or in one; choose another name")
    written = new_plugin(name, folder, kind)
    where = written if written.is_absolute() else f"./{written.as_posix()}"  # pip takes a bare name for a PyPI project
    click.echo(f"wrote {written}; next:\n  pip install -e {shlex.quote(str(where))}\n  compressx plugins check {name}")


@plugins.command("check", epilog="Example: compressx plugins check wanda --architecture llama")
@click.argument("name", shell_complete=plugin_names)
@click.option(
    "--set", "options", multiple=True, metavar="OPTION=VALUE", help="An option of what is checked; may be repeated."
)
@click.option(
    "--architecture", "architectures", multiple=True, help="Check only on this architecture; may be repeated."
)
@click.option("-v", "--verbose", is_flag=True, help="Print every failure, also those of one cause.")
@click.pass_obj
@errors_for_users
def plugins_check(
    host: Host, name: str, options: tuple[str, ...], architectures: tuple[str, ...], verbose: bool
) -> None:
    """Run the conformance checks on all that the plugin NAME offers, or on what is called NAME.

    Exits with 1 on failure.
    """
    from compressx.cli import tables, terminal
    from compressx.recipe.document import assignments
    from compressx.recipe.validation import validate_options
    from compressx.testing.conformance import conformance, known_architectures

    specs = host.plugins().named(name)
    chosen = known_architectures(architectures)
    given = assignments(options)
    failed = False
    for spec in specs:
        validate_options(spec.options, given, lambda *loc: f"--set {'.'.join(map(str, loc))}")
    for spec in specs:
        found = terminal.checked(spec.name, conformance(spec, options=given, architectures=chosen))
        terminal.show(*tables.of_checks(spec.name, found, every=verbose))
        failed |= any(outcome.status == "failed" for outcome in found)
    if failed:
        sys.exit(1)
