"""The command line: `compressx-attnprune figure2`.

Exit status as for `compressx`: 0 success, 2 a user error (one message, no traceback), 1 an internal error, 130
interrupted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from compressx import __version__
from compressx_attnprune.figure2.settings import QUICK, Settings


class _Number(click.ParamType):  # type: ignore[type-arg]  # not generic at run time
    """An integer from `low` to `high`, or a float strictly between them; or an increasing list of them."""

    name = "number"

    def __init__(self, kind: type[int | float], low: float, high: float, *, many: bool = False) -> None:
        self.kind, self.low, self.high, self.many = kind, low, high, many

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a value, or fail with the expected range."""
        if not self.many:
            return self._one(value, param, ctx)
        numbers = tuple(self._one(part, param, ctx) for part in value.split(","))
        if any(after <= before for before, after in pairwise(numbers)):
            self.fail(f"{value!r} is not strictly increasing", param, ctx)
        return numbers

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:  # noqa: ARG002 - click's
        """Return INT or FLOAT, with `,...` for a list."""
        return ("INT" if self.kind is int else "FLOAT") + (",..." if self.many else "")

    def _one(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        try:
            number = self.kind(text)
        except ValueError:
            number = float("nan")  # outside any range
        if self.kind is int and self.low <= number <= self.high:
            return number
        if self.kind is float and self.low < number < self.high:
            return number
        wanted = (
            f"from {self.low:g} to {self.high:g}" if self.kind is int else f"above {self.low:g}, below {self.high:g}"
        )
        return self.fail(f"{text.strip()!r} is not a {'whole ' * (self.kind is int)}number {wanted}", param, ctx)


def _setting(name: str, kind: click.ParamType[Any], text: str) -> Callable[..., Any]:
    """Make the option for a field of `Settings`, with its defaults in the help."""
    usual, quick = (_shown(getattr(s, name)) for s in (Settings(), QUICK))
    default = usual if usual == quick else f"{usual}; quick: {quick}"
    return click.option(f"--{name.replace('_', '-')}", name, type=kind, help=f"{text}  [default: {default}]")


def _shown(value: object) -> str:
    return ",".join(f"{v:g}" for v in value) if isinstance(value, tuple) else str(value)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="compressx-attnprune")
def cli() -> None:
    """Experiments of attention-aware pruning (Attention Weights Pruning, arXiv 2410.11261)."""


@cli.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="New or empty folder to write.")
@click.option("--quick", is_flag=True, help="Smaller constants that take seconds.")
@_setting("seeds", _Number(int, 2, 1000), "Random problems that are reported.")
@_setting("tuning_seeds", _Number(int, 1, 1000), "Separate problems for choosing lambda, for each n and rho.")
@_setting("width", _Number(int, 2, 1024), "d, number of features of X.")
@_setting("tokens", _Number(int, 2, 8192), "n of the panels over lambda and rho.")
@_setting("rank", _Number(int, 1, 1024), "Rank of W_Q and W_K after truncation.")
@_setting("scale", _Number(float, 0, 100), "Standard deviation of the entries of W_Q and W_K before truncation.")
@_setting("sparsity", _Number(float, 0, 1), "rho of the panels over lambda and n.")
@_setting("regularizations", _Number(float, 0, 1e6, many=True), "Grid of lambda.")
@_setting("token_counts", _Number(int, 2, 8192, many=True), "Grid of n.")
@_setting("sparsities", _Number(float, 0, 1, many=True), "Grid of rho, the pruning ratio.")
@_setting("optimizer", click.Choice(["line-search", "momentum"]), "Monotone line search, or the published momentum.")
@_setting("steps", _Number(int, 1, 1_000_000), "Maximum number of steps; momentum always takes all.")
@_setting("tolerance", _Number(float, 0, 1), "Line-search stops at this RMS of the projected gradient / lambda.")
@_setting("step_size", _Number(float, 0, 1e6), "Step size of momentum.")
@_setting("momentum", _Number(float, 0, 1), "Momentum coefficient.")
@click.option(
    "--threads",
    type=_Number(int, 1, 1024),
    default="1",
    show_default=True,
    help="Torch threads. More do not speed up matrices of a few hundred tokens.",
)
def figure2(output: Path, quick: bool, threads: int, **given: Any) -> None:
    """Draw the paper's Figure 2: attention error against lambda, n and the pruning ratio.

    Writes figure2.csv, figure2.json, figure2.svg and figure2.png into a new folder. The paper does not give its
    constants; the ones used here are recorded in figure2.json.
    """
    import torch

    from compressx import CompressxError
    from compressx_attnprune.figure2 import output as written
    from compressx_attnprune.figure2.experiment import measure

    torch.set_num_threads(threads)
    started = time.monotonic()

    def log(line: str) -> None:
        click.echo(f"{time.monotonic() - started:6.1f} s  {line}", err=True)

    try:
        settings = replace(QUICK if quick else Settings(), **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        with written.output_folder(output.expanduser()) as folder:
            figure = measure(settings, log)
            written.write(figure, folder)
    except CompressxError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("interrupted; nothing was written", err=True)
        sys.exit(130)
    log(f"wrote {output}")
    click.echo(written.to_markdown(figure, "n") + "\n\n" + written.to_markdown(figure, "rho"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    cli.main(args=None if arguments is None else list(arguments), prog_name="compressx-attnprune")
