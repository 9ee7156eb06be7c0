"""`compressx run | plan | schema | sweep | compare`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from compressx.cli.common import (
    PATH,
    Host,
    device_option,
    is_first,
    json_option,
    set_option,
    show_or_json,
)

replace_option = click.option(
    "--replace", is_flag=True, help="Replace another recipe's finished run in the output, and your own files there."
)


@click.command("run", epilog="Example: compressx run recipe.yaml --set calibration.samples=8")
@click.argument("recipe", type=PATH)
@set_option
@device_option
@click.option("--resume", is_flag=True, help="Continue an interrupted run after its last block or checkpoint.")
@click.option("--restart", is_flag=True, help="Discard an interrupted run and start over.")
@replace_option
@click.option("-v", "--verbose", is_flag=True, help="Also print the figures of each layer.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors and warnings.")
@click.pass_obj
def run_command(
    host: Host, recipe: Path, overrides: tuple[str, ...], device: str, resume: bool, restart: bool, replace: bool,
    verbose: bool, quiet: bool,
) -> None:  # fmt: skip
    """Prune the model of RECIPE and write its output folder."""
    started = time.perf_counter()  # what is imported below counts
    for both, options in ((verbose and quiet, "--verbose and --quiet"), (resume and restart, "--resume and --restart")):
        if both:
            raise click.UsageError(f"{options} exclude each other; give one of them")
    from compressx.cli import tables, terminal
    from compressx.pipeline.run import loaded_recipe, run
    from compressx.pipeline.stages import sections

    plugins = host.plugins()
    loaded = loaded_recipe(recipe, overrides, plugins)
    quiet = quiet or not is_first()
    with terminal.progress(quiet=quiet, verbose=verbose) as tell:
        report = run(
            loaded, plugins=plugins, progress=tell, device=device,
            resume=resume, restart=restart, replace=replace, started=started,
        )  # fmt: skip
    if not quiet:
        terminal.show(*sections(report))
        if report.layers and (advice := tables.full_size(loaded.recipe, plugins)):
            click.echo(advice)
        click.echo(f"written to {loaded.recipe.output}")


@click.command("plan", epilog="Example: compressx plan recipe.yaml --time")
@click.argument("recipe", type=PATH)
@set_option
@json_option
@click.option("--time", "timed", is_flag=True, help="Load the model, prune one block, and say how long a run takes.")
@replace_option
@device_option
@click.pass_obj
def plan_command(
    host: Host, recipe: Path, overrides: tuple[str, ...], as_json: bool, timed: bool, replace: bool, device: str
) -> None:  # fmt: skip
    """Check RECIPE and show what would happen to every linear, and what memory and disk a run needs."""
    from compressx.cli import tables
    from compressx.models.access import device_for
    from compressx.pipeline.footprint import footprint
    from compressx.pipeline.run import loaded_recipe
    from compressx.pipeline.sizes import disk_bytes, memory_bytes
    from compressx.pipeline.stages import prepare
    from compressx.stages.state import RunState

    where = device_for(device)
    plugins = host.plugins()
    loaded = loaded_recipe(recipe, overrides, plugins)
    state = RunState(loaded, plugins, where, measured=False, replace=replace)
    prepare(state)
    model = {"model": found} if (found := footprint(state)) else {}
    sizes = {"memory_bytes": memory_bytes(state), "disk_bytes": disk_bytes(state, state.plan)}
    measured = None
    if timed:
        from compressx.cli.terminal import progress
        from compressx.pipeline.timed import time_run

        with progress() as tell:
            measured = time_run(state, tell)
    time = {} if measured is None else {"time": measured.to_dict()}
    sections = [
        *tables.of_plan(state.plan),
        *tables.of_footprint(found),
        *tables.of_sizes(**sizes),
        *tables.of_time(measured),
    ]
    show_or_json({**state.plan.to_dict(), **model, **sizes, **time}, sections, as_json=as_json)
    if not as_json and state.plan.linears and (advice := tables.full_size(loaded.recipe, plugins)):
        click.echo(advice)


@click.command("schema", epilog="Example: compressx schema > recipe.schema.json")
@click.pass_obj
def schema_command(host: Host) -> None:
    """Print the JSON schema of recipes, with the options of all that the loaded plugins offer, for editors."""
    from compressx.recipe.schema import json_schema

    offers = {key: {n: spec.options for n, spec in named.items()} for key, named in host.plugins().offers.items()}
    show_or_json(json_schema(offers), (), as_json=True)


@click.command("compare", epilog="Example: compressx compare runs/one runs/two --output compared")
@click.argument("runs", nargs=-1, required=True, type=PATH)
@click.option("-o", "--output", type=PATH, help="Folder for compare.md, compare.csv and compare.svg.")
@click.option("--table", "pivoted", is_flag=True, help="Print methods by sparsities, for a paper.")
@click.option("--format", "form", type=click.Choice(["text", "markdown", "csv", "latex"]), help="Of --table.")
@click.option("--measure", metavar="NAME", help="What --table shows, by its name in report.json; default a perplexity.")
def compare_command(
    runs: tuple[Path, ...], output: Path | None, pivoted: bool, form: str | None, measure: str | None
) -> None:
    """Compare the output folders RUNS side by side; with --output, write table and plot too."""
    from compressx.cli import terminal
    from compressx.report.compare import side_by_side

    found = side_by_side(runs)
    if pivoted or form or measure:
        _show_table(runs, form, measure)
    else:
        terminal.show(*found.sections())
    if output is not None:
        click.echo(f"written to {', '.join(map(str, found.write(output)))}", err=form is not None)


def _show_table(
    runs: Sequence[Path], form: str | None = None, measure: str | None = None, methods: Sequence[str] = ()
) -> None:
    """Print methods by sparsities, in a format; warnings beside one for programs go to standard error."""
    from compressx.cli import terminal
    from compressx.report.pivot import FORMATS, pivot

    shown, *warnings = pivot(runs, measure, methods)
    if (write := FORMATS.get(form or "text")) is None:
        terminal.show(shown)
    else:
        click.echo(write(shown), nl=False)
    terminal.show(*warnings, stderr=write is not None)


class _Lists(click.Command):
    """Takes several values after `--methods` and `--sparsities`, up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option before each value, as click wants it."""
        repeated, option = list[str](), ""
        for word in args:
            if word.startswith("-"):
                option = word if word in ("--methods", "--sparsities") else ""
            elif option and repeated[-1] != option:
                repeated.append(option)
            repeated.append(word)
        return super().parse_args(ctx, repeated)


@click.command("sweep", cls=_Lists, epilog="Example: compressx sweep recipe.yaml --grid prune.0.sparsity=0.4,0.5,0.6")
@click.argument("recipe", type=PATH)
@click.option(
    "--grid",
    "axes",
    multiple=True,
    metavar="KEY=VALUE,VALUE...",
    help="Values of a recipe key, such as prune.1.sparsity=0.4,0.5; repeated, every combination is run.",
)
@click.option("--methods", multiple=True, metavar="METHOD...", help="Pruners, or such as attnprune:qk+sparsegpt.")
@click.option("--sparsities", multiple=True, metavar="SPARSITY...", help="Of --methods, such as 0.5 0.6 2:4.")
@click.option("--seeds", type=click.IntRange(1), help="Run each with so many seeds of calibration, from 0.")
@set_option
@click.option(
    "-o", "--output", type=PATH, help="Folder for all runs; by default the recipe's output with -sweep appended."
)
@device_option
@click.option("--restart", is_flag=True, help="Start interrupted runs over instead of continuing them.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but the comparison, errors and warnings.")
@click.pass_obj
def sweep_command(
    host: Host, recipe: Path, axes: tuple[str, ...], methods: tuple[str, ...], sparsities: tuple[str, ...],
    seeds: int | None, overrides: tuple[str, ...], output: Path | None, device: str, restart: bool, quiet: bool,
) -> None:  # fmt: skip
    """Run RECIPE for every combination of values, or by every method at every sparsity, then compare.

    A second call continues where the first stopped.
    """
    from compressx.cli import terminal
    from compressx.pipeline.sweep import check_runs, runs_by_name, runs_of
    from compressx.report.compare import side_by_side
    from compressx.report.section import counted
    from compressx.runtime.errors import noted

    if bool(axes) == bool(methods) or bool(methods) != bool(sparsities) or (seeds and not methods):
        raise click.UsageError("expected either --grid KEY=VALUE,VALUE..., or --methods with --sparsities and --seeds")
    plugins = host.plugins()
    if axes:
        cells = runs_of(recipe, axes, overrides, output, plugins)
    else:
        cells = runs_by_name(recipe, methods, sparsities, seeds, overrides, output, plugins)
    quiet = quiet or not is_first()
    check_runs(cells, plugins)  # all of them, before the first run
    done: list[Path] = []
    for number, cell in enumerate(cells, start=1):
        with terminal.progress(quiet=quiet) as tell, noted(lambda: counted(done, "finished run") if done else ""):
            ran = cell.run(plugins, tell, device, restart=restart)
        done.append(cell.output)
        if not quiet:
            click.echo(f"[{number}/{len(cells)}] {cell.output}" + ("" if ran else ": finished before"))
    if not is_first():
        return
    found = side_by_side(done)
    written = found.write(cells[0].output.parent)
    if methods:
        _show_table(done, methods=[cell.values[0] for cell in cells])
    else:
        terminal.show(*found.sections())
    click.echo(f"written to {', '.join(map(str, written))}")
