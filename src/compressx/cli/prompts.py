"""`compressx generate`: the answer to a long prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compressx.cli.common import (
    PATH,
    Host,
    device_option,
    dtype_option,
    errors_for_users,
    plugin_names,
    revision_option,
    trust_option,
)

if TYPE_CHECKING:
    from compressx.prompts.prepare import Selecting
    from compressx.recipe.sources import ModelSource


@click.command(epilog='Example: compressx generate runs/one --prompt-file report.txt --question "Who signed it?"')
@click.argument("model")
@click.option("--prompt-file", type=PATH, help="File with the prompt, a long text; - reads standard input.")
@click.option("--prompt", help="The prompt itself.")
@click.option("--question", default="", help="Question after the prompt, of which every token is read.")
@click.option("--selector", shell_complete=plugin_names,
              help="Token selector; by default that of the run MODEL, else retrieval-heads.")  # fmt: skip
@click.option("--keep", metavar="N|FRACTION",
              help="Tokens of the prompt to read; by default that of the run MODEL, else 0.125.")  # fmt: skip
@click.option(
    "--set", "options", multiple=True, metavar="OPTION=VALUE", help="An option of the selector; may be repeated."
)
@click.option("--full", is_flag=True, help="Read the whole prompt.")
@click.option("--max-new-tokens", type=int, default=50, show_default=True, help="Tokens to write at most.")
@click.option("--show-kept", is_flag=True, help="Also print what was read, on standard error.")
@dtype_option
@revision_option
@trust_option
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print the answer and what it took as JSON.")
@click.pass_obj
@errors_for_users
def generate(
    host: Host, /, model: str, prompt_file: Path | None, prompt: str | None, question: str, full: bool,
    max_new_tokens: int, show_kept: bool, dtype: str, revision: str | None, trust_remote_code: bool, device: str,
    as_json: bool, **selection: Any,
) -> None:  # fmt: skip
    """Let MODEL answer a long prompt of which it reads the selected tokens only, the likeliest token each time.

    MODEL is an output folder, a model folder, a .gguf file or a hub id. The answer is printed on standard output, what
    it took on standard error. The first blocks of the model read the whole prompt; a token selector chooses by their
    attention what the model reads.
    """
    from compressx.cli import tables, terminal
    from compressx.evaluation.saved import source_of
    from compressx.prompts.saved import answer_saved
    from compressx.runtime.errors import RecipeError

    if max_new_tokens < 1:
        raise RecipeError(f"--max-new-tokens {max_new_tokens}: expected at least 1")
    text = _prompt(prompt_file, prompt)
    source = source_of(model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    selecting = _selecting(host, source, selection, full=full)
    with terminal.under_way() as tell:
        answer = answer_saved(source, text, question, max_new_tokens, selecting=selecting, device=device, progress=tell)
    settings = None if selecting is None else selecting.settings
    if as_json:
        section = None if settings is None else settings.model_dump(mode="json")
        click.echo(json.dumps({**dataclasses.asdict(answer), "select_tokens": section}, indent=1))
        return
    click.echo(answer.text)
    if show_kept:
        click.echo(f"read: {answer.kept_text}", err=True)
    terminal.show(*tables.of_answer(answer, None if settings is None else settings.selector), stderr=True)


def _prompt(file: Path | None, prompt: str | None) -> str:
    """Return the prompt that one of the options gives."""
    from compressx.data.documents import read_text
    from compressx.runtime.errors import RecipeError

    if file is None and prompt is None:
        raise RecipeError("expected --prompt-file or --prompt")
    if file is not None and prompt is not None:
        raise RecipeError("--prompt-file and --prompt exclude each other; leave out one")
    if file is None:
        name, text = "--prompt", prompt or ""
    elif file == Path("-"):
        name = "--prompt-file -: standard input"
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise RecipeError(f"{name} is not UTF-8 ({error.reason})") from error
    else:
        name, text = f"--prompt-file {file}", read_text(file)
    if not text.strip():
        raise RecipeError(f"{name} is empty; expected a text")
    return text


def _selecting(host: Host, source: ModelSource, given: dict[str, Any], *, full: bool) -> Selecting | None:
    """Return how the prompt is shortened: as the run says, with what the options change."""
    from compressx.prompts.prepare import Selecting
    from compressx.prompts.saved import changed_selection, saved_selection
    from compressx.recipe.document import assignments, read_plain
    from compressx.runtime.errors import RecipeError

    changes: dict[str, Any] = {}
    if given["selector"] is not None:
        changes["selector"] = given["selector"]
    if given["keep"] is not None:
        changes["keep"] = read_plain(given["keep"])
    if given["options"]:
        changes["options"] = assignments(given["options"])
    if full:
        if changes:
            key = next(iter(changes))
            option = next(iter(changes["options"]), "") if key == "options" else ""
            raise RecipeError(f"--full reads the whole prompt; leave out {_flag(key, option)}".rstrip())
        return None
    selecting = Selecting(changed_selection(saved_selection(source), changes, _flag), host.plugins())
    selecting.spec(lambda *loc: _flag("options", *loc))
    return selecting


def _flag(*loc: object) -> str:
    """Return the option that sets a key of `select_tokens`."""
    key, *inside = map(str, loc) if loc else ["selector"]
    if key == "options":
        return f"--set {'.'.join(inside)}".rstrip()
    return f"--{key}"
