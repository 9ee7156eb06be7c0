"""`compressx init | eval | generate | bench | apply | inspect | export | pack | unpack`: the commands for models."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compressx.cli.common import (
    PATH,
    Host,
    base_option,
    device_option,
    dtype_option,
    json_option,
    options_option,
    revision_option,
    show_or_json,
    takes_model,
    trust_option,
)
from compressx.runtime.files import json_text

if TYPE_CHECKING:
    from compressx.models.packed_folder import Sizes
    from compressx.prompts.selection import SelectorSettings
    from compressx.recipe.sources import ModelSource


@click.command("eval", epilog="Example: compressx eval runs/one --tasks hellaswag,arc_easy --limit 100")
@click.option("--masks", type=PATH, help="Masks to apply to the model first.")
@click.option("--against", metavar="DENSE", help="Dense model to compare predictions and answers with.")
@click.option("--recipe", type=PATH, help="Use this recipe's evaluate section.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set what to measure, such as evaluate.token_perplexity.samples=8, or select_tokens.KEY; may be "
              "repeated.")  # fmt: skip
@click.option("--tasks", metavar="TASK,TASK", help="Tasks of lm-evaluation-harness: names, or paths of YAML files.")
@click.option("--limit", help="Documents per task.")
@click.option("--trust-task-code", is_flag=True, default=None, help="Run tasks that are files, which can run code.")
@device_option
@json_option
@click.pass_obj
@takes_model
def eval_command(
    host: Host, source: ModelSource, masks: Path | None, against: str | None, recipe: Path | None,
    overrides: tuple[str, ...], device: str, as_json: bool, **lm_eval: Any,
) -> None:  # fmt: skip
    """Measure MODEL: an output folder, a model folder, a .gguf file or a hub id.

    Without --recipe and --tasks, measure the token perplexity on WikiText-2 and, --against a dense model, the fidelity
    to it. --tasks and the options below it are short for --set evaluate.lm_eval.KEY=VALUE.
    """
    from compressx.cli import tables, terminal
    from compressx.evaluation.saved import evaluate_saved, evaluate_section, source_of
    from compressx.prompts.selection import SelectorSettings
    from compressx.recipe.schema import load_recipe
    from compressx.report.flips import flips_in

    given = {key: json.dumps(value) if value is True else value for key, value in lm_eval.items() if value is not None}
    if "tasks" in given:
        given["tasks"] = json.dumps([task.strip() for task in given["tasks"].split(",")])
    asked = [*(f"evaluate.lm_eval.{key}={value}" for key, value in given.items()), *overrides]
    plugins = host.plugins()
    default = "token_perplexity" if against is None else "fidelity"
    settings, select = evaluate_section(recipe, asked, plugins, default=None if "tasks" in given else default)
    selecting = None if select is None else SelectorSettings(select, plugins)
    if recipe is not None and load_recipe(recipe, asked).recipe.model.trust_remote_code:
        source = source.model_copy(update={"trust_remote_code": True})
    trusted = source.trust_remote_code
    dense = None if against is None else source_of(against, dtype=source.dtype, trust_remote_code=trusted)
    with terminal.progress(quiet=as_json) as tell:
        figures = evaluate_saved(
            source, settings, plugins, masks=masks, against=dense, selecting=selecting, device=device,
            progress=lambda done, total: tell("evaluate", done, total, ""),
        )  # fmt: skip
    flips = {name: dataclasses.asdict(found) for (name, _), found in flips_in(figures).items()}
    told = figures["pruned"] if dense is None else {**figures, "flips": flips}
    show_or_json(told, tables.of_figures(figures), as_json=as_json)


@click.command("init", epilog="Example: compressx init ./my-model --output recipe.yaml")
@click.option("-o", "--output", type=PATH, help="New file to write it to; by default it is printed.")
@click.option("--pruner", help="Pruner of the rule, without a goal; by default sparsegpt.")
@click.option("--smaller", metavar="SHARE", help="Goal: a model smaller by this share, such as 25% or 0.25.")
@click.option("--faster", metavar="FACTOR", help="Goal: decode reads so many times fewer bytes, such as 1.2x.")
@click.option("--for", "runtime", type=click.Choice(["llama.cpp", "transformers"]),
              help="What the smaller or faster model is for; by default llama.cpp, in a Q8_0 file.")  # fmt: skip
@click.pass_obj
@takes_model
def init_command(
    host: Host, source: ModelSource, output: Path | None, pruner: str | None, smaller: str | None, faster: str | None,
    runtime: str | None,
) -> None:  # fmt: skip
    """Write a recipe for MODEL, with its linears and their sizes as comments.

    MODEL is a model folder, a .gguf file, a hub id or an output folder. Its config is read, but no weights. The recipe
    makes half of the weights zeros, in a model of the same size and speed, unless a goal is given.
    """
    from compressx.models.checkpoint import find_checkpoint
    from compressx.models.loading import load_skeleton
    from compressx.pipeline.goal import Goal, draft_for
    from compressx.planning.draft import draft
    from compressx.runtime.errors import ArtifactError
    from compressx.runtime.files import atomic_write

    goals = {option: text for option, text in (("smaller", smaller), ("faster", faster)) if text is not None}
    if len(goals) > 1 or (goals and pruner is not None):
        raise click.UsageError("--smaller, --faster and --pruner exclude one another; give one of them")
    if runtime is not None and not goals:
        raise click.UsageError("--for says what --smaller or --faster is for; give one of them, too")
    if output is not None and output.exists():
        raise ArtifactError(f"{output} exists and is not overwritten; name a new file after --output")
    name = str(source.path or source.id)
    if goals:
        text = draft_for(Goal(*goals.popitem(), runtime or "llama.cpp"), source, name, host.plugins())
    else:
        skeleton = load_skeleton(find_checkpoint(source))
        text = draft(source, name, skeleton, host.plugins(), pruner or "sparsegpt")
    if output is None:
        click.echo(text, nl=False)
        return
    atomic_write(output, text.encode())
    click.echo(f"written to {output}; next: compressx plan {shlex.quote(str(output))}")


@click.command("apply", epilog="Example: compressx apply runs/one/masks.safetensors ./tuned --output masked")
@click.argument("masks", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, help="Folder to write the masked model to.")
@click.option("--original", is_flag=True, help="Require the weights that were pruned, byte for byte.")
@takes_model
def apply_command(masks: Path, source: ModelSource, output: Path, original: bool) -> None:
    """Apply saved MASKS to MODEL, any checkpoint with the same shapes, and save it."""
    from compressx.evaluation.saved import apply_masks

    click.echo(apply_masks(masks, source, output, original=original))


@click.command("inspect", epilog="Example: compressx inspect runs/one --json")
@click.argument("model")
@click.option("--masks", type=PATH, help="Masks to compare with; by default those beside the model.")
@click.option("--base", metavar="MODEL", help="Model that it was tuned from: show what differs.")
@revision_option
@trust_option
@json_option
def inspect_command(
    model: str, masks: Path | None, base: str | None, revision: str | None, trust_remote_code: bool, as_json: bool
) -> None:  # fmt: skip
    """Count the zeros of MODEL, layer by layer: sparsity and pattern."""
    from compressx.cli import tables, terminal
    from compressx.evaluation.saved import source_of
    from compressx.masks.inspect import inspect_model
    from compressx.models.packed_folder import needs_base

    needed = base if needs_base(model) else None  # a packed fine-tune also needs it to be read
    source = source_of(model, revision=revision, trust_remote_code=trust_remote_code, base=needed)
    other = None if base is None else source_of(base, trust_remote_code=trust_remote_code)
    with terminal.under_way() as tell:
        found = inspect_model(source, masks, base=other, progress=tell)
    sections = [*tables.of_inspection(found), *(tables.of_packed(found.packed) if found.packed else ())]
    show_or_json(found.to_dict(), sections, as_json=as_json)


@click.command("generate", epilog='Example: compressx generate runs/one --prompt-file report.txt --question "Who?"')
@click.option("--prompt-file", type=PATH, help="File with the prompt, a long text; - reads standard input.")
@click.option("--prompt", help="The prompt itself.")
@click.option("--question", default="", help="Question after the prompt, of which every token is read.")
@click.option("--selector", help="Token selector; by default that of the run MODEL, else retrieval-heads.")
@click.option("--keep", metavar="N|FRACTION",
              help="Tokens of the prompt to read; by default that of the run MODEL, else 0.125.")  # fmt: skip
@options_option
@click.option("--full", is_flag=True, help="Read the whole prompt.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=50, show_default=True,
              help="Tokens to write at most.")  # fmt: skip
@click.option("--show-kept", is_flag=True, help="Also print what was read, on standard error.")
@device_option
@json_option
@click.pass_obj
@takes_model
def generate_command(
    host: Host, source: ModelSource, prompt_file: Path | None, prompt: str | None, question: str,
    max_new_tokens: int, show_kept: bool, device: str, as_json: bool, **selection: Any,
) -> None:  # fmt: skip
    """Let MODEL answer a long prompt of which it reads the selected tokens only, the likeliest token each time.

    MODEL is an output folder, a model folder, a .gguf file or a hub id. The answer is printed on standard output, what
    it took on standard error. The first blocks of the model read the whole prompt; a token selector chooses by their
    attention what the model reads.
    """
    from compressx.cli import tables, terminal
    from compressx.prompts.answer import answer_saved

    text = _prompt(prompt_file, prompt)
    selecting = _selecting(host, source, **selection)
    with terminal.under_way() as tell:
        answer = answer_saved(source, text, question, max_new_tokens, selecting=selecting, device=device, progress=tell)
    settings = None if selecting is None else selecting.settings
    if as_json:
        section = None if settings is None else settings.model_dump(mode="json")
        click.echo(json_text({**dataclasses.asdict(answer), "select_tokens": section}, indent=1))
        return
    click.echo(answer.text)
    if show_kept:
        click.echo(f"read: {answer.kept_text}", err=True)
    terminal.show(*tables.of_answer(answer, None if settings is None else settings.selector), stderr=True)


def _prompt(file: Path | None, prompt: str | None) -> str:
    """Return the prompt that one of the options gives."""
    from compressx.data.documents import read_text
    from compressx.runtime.errors import RecipeError

    if (file is None) == (prompt is None):
        raise RecipeError("expected one of --prompt-file and --prompt")
    name = "--prompt" if file is None else f"--prompt-file {file}"
    try:
        text = prompt or "" if file is None else sys.stdin.read() if file == Path("-") else read_text(file)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name}: standard input is not UTF-8 ({error.reason})") from error
    if not text.strip():
        raise RecipeError(f"{name} is empty; expected a text")
    return text


def _selecting(
    host: Host, source: ModelSource, *, selector: str | None, keep: str | None, options: Sequence[str], full: bool
) -> SelectorSettings | None:
    """Return how the prompt is shortened: as the run says, with what the options change."""
    from compressx.prompts.selection import SelectorSettings, changed_selection, saved_selection
    from compressx.recipe.document import assignments, read_plain
    from compressx.runtime.errors import RecipeError

    changes: dict[str, Any] = {} if selector is None else {"selector": selector}
    if keep is not None:
        changes["keep"] = read_plain(keep)
    if options:
        changes["options"] = assignments(options)
    if full and changes:
        raise RecipeError("--full reads the whole prompt; leave out --selector, --keep and --set")
    if full:
        return None
    selecting = SelectorSettings(changed_selection(saved_selection(source), changes, _flag), host.plugins())
    selecting.spec(lambda *loc: _flag("options", *loc))
    return selecting


def _flag(*loc: object) -> str:
    """Return the option that sets a key of `select_tokens`."""
    key, *inside = map(str, loc) if loc else ["selector"]
    if key == "options":
        return f"--set {'.'.join(inside)}".rstrip()
    return f"--{key}"


@click.command("bench", epilog="Example: compressx bench ./my-model runs/one --rounds 7 --threads 2")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--prompt-tokens", "prompt", type=click.IntRange(1), default=512, show_default=True,
              help="Of the prompt.")  # fmt: skip
@click.option("--new-tokens", "new", type=click.IntRange(2), default=64, show_default=True,
              help="Written after it; an end of text does not stop them.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True,
              help="Rounds that count; one before them does not.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Threads on the CPU; by default torch's choice.")
@dtype_option
@trust_option
@device_option
@json_option
def bench_command(models: tuple[str, ...], dtype: str, trust_remote_code: bool, as_json: bool, **asked: Any) -> None:
    """Time each MODEL reading a prompt (prefill) and writing after it (decode), in turn, round by round.

    MODEL is an output folder, a model folder, a hub id, or a .gguf file, which llama.cpp runs; give the dense model
    first, to which the others are compared.
    """
    from compressx.cli import terminal
    from compressx.evaluation.bench import time_in_turn
    from compressx.evaluation.saved import source_of

    sources = [source_of(model, dtype=dtype, trust_remote_code=trust_remote_code) for model in models]
    with terminal.under_way() as tell:
        speeds = time_in_turn(sources, **asked, progress=tell)
    show_or_json(dataclasses.asdict(speeds), speeds.sections(), as_json=as_json)


@click.command("export", epilog="Example: compressx export runs/one --like recipe.yaml --type Q8_0 -o one.gguf")
@click.option("--format", "name", default="gguf", show_default=True, help="Exporter.")
@click.option("-o", "--output", type=PATH, required=True, help="New file to write, or folder, as the format has it.")
@click.option("--type", "kind", help="Of a GGUF file's matrices: F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0 or Q4_1.")
@click.option("--like", help="GGUF file of the dense model, for metadata and tokenizer, or the recipe that prunes it.")
@options_option
@click.pass_obj
@takes_model
def export_command(
    host: Host, source: ModelSource, name: str, output: Path, kind: str | None, like: str | None,
    options: tuple[str, ...],
) -> None:  # fmt: skip
    """Write MODEL, an output folder, a model folder, a .gguf file or a hub id, in another format.

    --type and --like are short for --set type=VALUE and --set like=FILE.
    """
    from compressx.cli import terminal
    from compressx.evaluation.saved import export_saved, single_file_of
    from compressx.recipe.document import assignments

    if like is not None and Path(like).suffix in {".yaml", ".yml"}:
        like = str(single_file_of(Path(like)))
    short = {"type": kind, "like": like}
    given = assignments(options) | {key: value for key, value in short.items() if value is not None}
    begin = time.perf_counter()
    with terminal.under_way() as tell:
        tell(f"write {output}")
        size, note = export_saved(source, name, given, output, host.plugins())
    said = f": {note}" if note else ""
    click.echo(f"written to {output}, {size / 1e6:.4g} MB, in {time.perf_counter() - begin:.1f} s{said}")


@click.command("pack", epilog="Example: compressx pack runs/one")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, help="New folder to write; by default MODEL-packed.")
@click.option("--base", metavar="MODEL",
              help="Store only what differs from this model, a folder or hub id; unpacking needs it.")  # fmt: skip
@json_option
def pack_command(model: Path, output: Path | None, base: str | None, as_json: bool) -> None:
    """Write MODEL, an output folder or a model's folder, without its zeros, or without what a base model has, too.

    Nothing is lost: compressx unpack restores every byte, and compressx reads packed folders like others.
    """
    from compressx.models.checkpoint import find_local
    from compressx.models.packed_folder import pack_folder
    from compressx.runtime.errors import UnsupportedModelError

    if find_local(model).is_file():
        raise UnsupportedModelError(f"{model} is a GGUF file, which has a format of its own; pack reads safetensors")
    _rewrite(pack_folder, model, output, "packed", base, as_json=as_json)


@click.command("unpack", epilog="Example: compressx unpack runs/one-packed")
@click.argument("folder", type=PATH)
@click.option("-o", "--output", type=PATH, help="New folder to write; by default FOLDER-unpacked.")
@base_option
@json_option
def unpack_command(folder: Path, output: Path | None, base: str | None, as_json: bool) -> None:
    """Restore what compressx pack wrote to FOLDER, byte for byte; every tensor's sha256 is checked."""
    from compressx.models.checkpoint import find_local
    from compressx.models.packed_folder import unpack_folder

    find_local(folder)
    _rewrite(unpack_folder, folder, output, "unpacked", base, as_json=as_json)


def _rewrite(
    write: Callable[..., Sizes], folder: Path, output: Path | None, ending: str, base: str | None, *, as_json: bool
) -> None:
    """Pack or unpack a folder, by default into one beside it, and print the sizes."""
    from compressx.cli import tables, terminal
    from compressx.models.checkpoint import find_base
    from compressx.report.section import Section

    begin, against = time.perf_counter(), None if base is None else find_base(base)
    whole = folder.resolve()  # `.` has no name
    output = output or whole.with_name(f"{whole.name}-{ending}")
    with terminal.under_way() as tell:
        sizes = write(folder, output, base=against, progress=tell)
    seconds = time.perf_counter() - begin
    plain = {"output": str(output), "seconds": seconds, **sizes.to_dict()}
    sections = [*tables.of_packed(sizes), Section(note=f"written to {output} in {seconds:.1f} s")]
    show_or_json(plain, sections, as_json=as_json)
