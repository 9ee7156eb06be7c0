"""`compressx plugins`, with the subcommands `new` and `check`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compressx.cli.common import PATH, Host, json_option, options_option, show_or_json

if TYPE_CHECKING:
    from compressx.plugins.discovery import PluginRecord
    from compressx.report.section import Section
    from compressx.testing.conformance import Outcome


@click.group(invoke_without_command=True, epilog="Example: compressx plugins --json")
@json_option
@click.pass_context
def plugins(context: click.Context, as_json: bool) -> None:
    """Show every plugin: where it came from, whether it loaded, and what it offers."""
    if context.invoked_subcommand is not None:
        return
    records = context.obj.plugins(warn=False).records
    show_or_json([r.as_json() for r in records], _of_plugins(records), as_json=as_json)


def _of_plugins(records: Sequence[PluginRecord]) -> Iterator[Section]:
    """Yield one row for each plugin, and below it why those that failed did."""
    from compressx.plugins.kinds import KINDS
    from compressx.report.section import Section, table

    rows = []
    for r in records:
        named = [f"{kind.name} {name}" for kind in KINDS for name in r.offers.get(kind.key, ())]
        rows.append((r.name, r.version, r.source, r.status, ", ".join(named), r.distribution))
    yield Section(table=table(["name", "version", "source", "status", "offers", "distribution"], rows))
    yield from (Section(note=f"{record.name}: {record.error}") for record in records if record.error)


@plugins.command("new", epilog="Example: compressx plugins new my-pruner --folder work")
@click.argument("name")
@click.option("--kind", type=click.Choice(["pruner", "selector", "evaluator", "exporter"]),
              default="pruner", show_default=True, help="What it offers.")  # fmt: skip
@click.option("--folder", type=PATH, default=Path(), help="Folder to create it in; by default the current one.")
@click.pass_obj
def plugins_new(host: Host, name: str, kind: str, folder: Path) -> None:
    """Write a plugin package compressx-NAME with a working example called NAME of a kind, and its tests."""
    from compressx.plugins.scaffold import new_plugin
    from compressx.runtime.errors import PluginError

    loaded = host.plugins()
    if any(name in offered for offered in loaded.offers.values()) or any(name == r.name for r in loaded.records):
        raise PluginError(f"{name!r} exists already, as a plugin or in one; choose another name")
    written = new_plugin(name, folder, kind)
    where = written if written.is_absolute() else f"./{written.as_posix()}"  # pip takes a bare name for a PyPI project
    click.echo(f"wrote {written}; next:\n  pip install -e {shlex.quote(str(where))}\n  compressx plugins check {name}")


@plugins.command("check", epilog="Example: compressx plugins check wanda --architecture llama")
@click.argument("name")
@options_option
@click.option(
    "--architecture", "architectures", multiple=True, help="Check only on this architecture; may be repeated."
)
@click.pass_obj
def plugins_check(host: Host, name: str, options: tuple[str, ...], architectures: tuple[str, ...]) -> None:
    """Run the conformance checks on all that the plugin NAME offers, or on what is called NAME.

    Exits with 1 on failure.
    """
    from compressx.cli import terminal
    from compressx.recipe.document import assignments
    from compressx.recipe.validation import validate_options
    from compressx.testing.conformance import ARCHITECTURES, conformance

    specs = host.plugins().named(name)
    given = assignments(options)
    failed = False
    for spec in specs:
        validate_options(spec.options, given, lambda *loc: f"--set {'.'.join(map(str, loc))}")
    for spec in specs:
        found: list[Outcome] = []
        with terminal.under_way() as tell:
            for outcome in conformance(spec, options=given, architectures=architectures or ARCHITECTURES):
                found.append(outcome)
                tell(f"checking {spec.name} on {outcome.architecture}: {outcome.check}")
        terminal.show(*_of_checks(spec.name, found))
        failed |= any(outcome.status == "failed" for outcome in found)
    if failed:
        sys.exit(1)


def _of_checks(name: str, found: Sequence[Outcome]) -> Iterator[Section]:
    """Yield what each check of a plugin found on each architecture, and why those that failed did, once a cause."""
    from compressx.report.section import Section, table
    from compressx.testing.conformance import by_cause

    architectures = [*dict.fromkeys(o.architecture for o in found if o.architecture)] or [""]
    refused = {o.architecture for o in found if o.status == "refused"}
    words = {"passed": "ok", "failed": "FAILED", "refused": "refused", "skipped": "-"}
    cells: dict[str, dict[str, str]] = {}  # a refused architecture has no other checks
    for o in found:
        row = cells.setdefault(o.check, {a: "refused" if a in refused else "" for a in architectures})
        row |= dict.fromkeys([o.architecture] if o.architecture else architectures, words[o.status])
    yield Section(table=table([name, *architectures], [(check, *row.values()) for check, row in cells.items()]))
    for first, *more in by_cause(o for o in found if o.status in ("failed", "refused")):
        also = f"\n    and {len(more)} more for this cause" if more else ""
        yield Section(note=f"{words[first.status]}: {first}{also}")
    passed, failed = (sum(o.status == status for o in found) for status in ("passed", "failed"))
    also = f", {len(refused)} architectures refused" if refused else ""
    yield Section(note=f"{name}: {passed} checks passed, {failed} failed{also}")
