"""`compressx init | eval | apply | inspect`: commands for one model, and for masks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

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


@click.command("eval", epilog="Example: compressx eval runs/one --tasks hellaswag,arc_easy --limit 100")
@click.argument("model")
@click.option("--masks", type=PATH, help="Masks to apply to the model first.")
@click.option("--recipe", type=PATH, help="Use this recipe's evaluate section.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set what to measure, such as evaluate.token_perplexity.samples=8, or select_tokens.KEY; may be "
              "repeated.")  # fmt: skip
@click.option("--tasks", metavar="TASK,TASK", help="Tasks of lm-evaluation-harness: names, or paths of YAML files.")
@click.option("--limit", help="Documents per task.")
@click.option("--trust-task-code", is_flag=True, default=None, help="Run Python code that task files bring.")
@dtype_option
@revision_option
@trust_option
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_obj
@errors_for_users
def evaluate(
    host: Host, /, model: str, masks: Path | None, recipe: Path | None, overrides: tuple[str, ...], dtype: str,
    revision: str | None, trust_remote_code: bool, device: str, as_json: bool, **lm_eval: Any,
) -> None:  # fmt: skip
    """Measure MODEL: an output folder, a model folder, a .gguf file or a hub id.

    Without --recipe and --tasks, measure the token perplexity on WikiText-2. --tasks and the options below it are
    short for --set evaluate.lm_eval.KEY=VALUE.
    """
    from compressx.cli import tables, terminal
    from compressx.evaluation.saved import evaluate_saved, measures, source_of
    from compressx.prompts.prepare import Selecting
    from compressx.recipe.schema import load_recipe

    given = {key: json.dumps(value) if value is True else value for key, value in lm_eval.items() if value is not None}
    if "tasks" in given:
        given["tasks"] = json.dumps([task.strip() for task in given["tasks"].split(",")])
    asked = [*(f"evaluate.lm_eval.{key}={value}" for key, value in given.items()), *overrides]
    plugins = host.plugins()
    settings, select = measures(recipe, asked, plugins, perplexity="tasks" not in given)
    selecting = None if select is None else Selecting(select, plugins)
    trusted = trust_remote_code or (recipe is not None and load_recipe(recipe, asked).recipe.model.trust_remote_code)
    source = source_of(model, dtype=dtype, revision=revision, trust_remote_code=trusted)
    with terminal.progress(quiet=as_json) as tell:
        figures = evaluate_saved(
            source, settings, plugins, masks=masks, selecting=selecting, device=device,
            progress=lambda done, total: tell("evaluate", done, total, ""),
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        terminal.show(*tables.of_figures(figures))


@click.command(epilog="Example: compressx init ./my-model --output recipe.yaml")
@click.argument("model")
@click.option("--output", type=PATH, help="New file to write it to; by default it is printed.")
@click.option("--pruner", default="sparsegpt", show_default=True, shell_complete=plugin_names,
              help="Pruner of the first rule.")  # fmt: skip
@dtype_option
@revision_option
@trust_option
@click.pass_obj
@errors_for_users
def init(
    host: Host, model: str, output: Path | None, pruner: str, dtype: str, revision: str | None, trust_remote_code: bool
) -> None:
    """Write a recipe for MODEL, with its linears, their sizes and the pruners that take them as comments.

    MODEL is a model folder, a .gguf file, a hub id or an output folder. Its config is read, but no weights.
    """
    from compressx.cli.tables import full_size
    from compressx.evaluation.saved import source_of
    from compressx.models.checkpoint import find_checkpoint
    from compressx.models.loading import load_skeleton
    from compressx.planning.draft import draft
    from compressx.runtime.errors import ArtifactError
    from compressx.runtime.files import os_errors_named

    if output is not None and output.exists():
        raise ArtifactError(f"{output} exists and is not overwritten; name a new file after --output")
    source = source_of(model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    text = draft(source, model, load_skeleton(find_checkpoint(source)), host.plugins(), pruner)
    if output is None:
        click.echo(text, nl=False)
        return
    with os_errors_named("write", output), output.open("x", encoding="utf-8") as file:
        file.write(text)
    click.echo(f"written to {output}; next: compressx plan {shlex.quote(str(output))}\nits run's {full_size()}")


@click.command(epilog="Example: compressx apply runs/one/masks.safetensors ./tuned --output masked")
@click.argument("masks", type=PATH)
@click.argument("model")
@click.option("--output", type=PATH, required=True, help="Folder to write the masked model to.")
@click.option("--original", is_flag=True, help="Require the weights that were pruned, byte for byte.")
@dtype_option
@revision_option
@trust_option
@errors_for_users
def apply(
    masks: Path, model: str, output: Path, original: bool, dtype: str, revision: str | None, trust_remote_code: bool
) -> None:
    """Apply saved MASKS to MODEL, any checkpoint with the same shapes, and save it."""
    from compressx.cli import tables, terminal
    from compressx.evaluation.saved import apply_masks, source_of

    source = source_of(model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    terminal.show(*tables.of_applied(apply_masks(masks, source, output, original=original), output))


@click.command(epilog="Example: compressx inspect runs/one --json")
@click.argument("model")
@click.option("--masks", type=PATH, help="Masks to compare with; by default those beside the model.")
@revision_option
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@errors_for_users
def inspect(model: str, masks: Path | None, revision: str | None, trust_remote_code: bool, as_json: bool) -> None:
    """Count the zeros of MODEL, layer by layer: sparsity, pattern, whether 2:4 holds."""
    from compressx.cli import tables, terminal
    from compressx.cli.files import of_sizes
    from compressx.evaluation.saved import source_of
    from compressx.masks.inspect import inspect as look

    found = look(source_of(model, revision=revision, trust_remote_code=trust_remote_code), masks)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=1))
    else:
        terminal.show(*tables.of_inspection(found), *(of_sizes(found.packed) if found.packed else ()))
