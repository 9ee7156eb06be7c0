"""`compressx bench`: how fast models are, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from compressx.cli.common import PATH, device_option, dtype_option, errors_for_users, revision_option, trust_option


@click.command(epilog="Example: compressx bench ./my-model runs/one --prompt-tokens 128,512 --output speed")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--prompt-tokens", "prompts", multiple=True, metavar="N,N...",
              help="Of the prompt. Default: 512, or what the model's positions leave.")  # fmt: skip
@click.option("--new-tokens", "news", multiple=True, default=["64"], show_default=True, metavar="N,N...",
              help="Written after it, exactly: an end of text does not stop them.")  # fmt: skip
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences at a time.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Rounds that count; one before them does not.")
@click.option("--threads", type=int, help="Threads on the CPU; by default torch's choice.")
@click.option("--semi-structured", is_flag=True, help="Convert 2:4 weights for the sparse tensor cores of a GPU.")
@click.option("--output", type=PATH, help="Folder for bench.md, bench.json and bench.svg.")
@dtype_option
@revision_option
@trust_option
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
@errors_for_users
def bench(
    models: tuple[str, ...], prompts: tuple[str, ...], news: tuple[str, ...], batch: int, rounds: int,
    threads: int | None, semi_structured: bool, output: Path | None, dtype: str, revision: str | None,
    trust_remote_code: bool, device: str, as_json: bool,
) -> None:  # fmt: skip
    """Time each MODEL reading prompts (prefill) and writing after them (decode), in turn, round by round.

    MODEL is an output folder, a model folder, a .gguf file or a hub id; give the dense model first, to which the others
    are compared. Each is loaded in a process of its own, so memory is measured for each.
    """
    from compressx.cli import terminal
    from compressx.evaluation.bench import BenchSettings
    from compressx.evaluation.bench import bench as timed
    from compressx.evaluation.saved import source_of
    from compressx.report.speeds import Length
    from compressx.runtime.files import os_errors_named

    read, written = _numbers("--prompt-tokens", prompts or ("512",)), _numbers("--new-tokens", news)
    lengths = [Length(p, n) for p in read for n in written]
    asked = BenchSettings(tuple(lengths), batch, rounds, device, threads, semi_structured, fit=not prompts)
    asked.check()
    if output is not None:
        with os_errors_named("write", output):  # before the minutes that timing takes
            output.mkdir(parents=True, exist_ok=True)
    sources = [source_of(m, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code) for m in models]
    with terminal.under_way() as tell:
        found = timed(sources, asked, progress=tell)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
    else:
        terminal.show(*found.sections())
    files = [] if output is None else found.write(output)  # last, so that no figure is lost if it fails
    if files and not as_json:
        click.echo(f"written to {', '.join(map(str, files))}")


def _numbers(option: str, given: tuple[str, ...]) -> list[int]:
    """Read whole numbers, separated by commas or given one by one; equal ones count once."""
    from compressx.runtime.errors import RecipeError

    words = [word.strip() for text in given for word in text.split(",")]
    for word in words:
        if not word.isdecimal():
            raise RecipeError(
                f"{option} {','.join(given)}: {word!r} is no whole number; expected as in {option} 128,512"
            )
    return list(dict.fromkeys(map(int, words)))
