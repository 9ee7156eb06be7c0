"""The model card: `README.md` in the folder of the pruned model, which the hub shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressx.api.record import RunReport
from compressx.blocks.stage import by_module
from compressx.models.checkpoint import Checkpoint, license_of
from compressx.pipeline.stages import STAGES
from compressx.planning.plan import Plan
from compressx.recipe.document import dump_yaml, flow
from compressx.recipe.schema import LoadedRecipe
from compressx.report.contents import evaluation, model_name
from compressx.report.markdown import to_markdown
from compressx.report.section import Section, Table

_USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder, or the id of its repository
tokenizer = AutoTokenizer.from_pretrained(".")
print(model.config.compressx)  # sparsity, patterns and pruners
"""


def card(loaded: LoadedRecipe, plan: Plan, report: RunReport, checkpoint: Checkpoint, tokenizer: Any = None) -> str:
    """Return the content of the model card.

    Args:
        loaded: the recipe; the card leaves out its output folder.
        plan: the executed plan.
        report: what the run did.
        checkpoint: of the dense model, whose license is carried over if it is known.
        tokenizer: as `load_tokenizer` returns it.
    """
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=loaded.recipe.model.id, **license_of(checkpoint), library_name="transformers",
        pipeline_tag="text-generation",
        tags=["compressx", *(["pruned", _left(report).replace(" ", "-")] if report.layers else [])],
    )  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n\n{to_markdown([*_sections(loaded, plan, report, tokenizer)])}"


def _sections(loaded: LoadedRecipe, plan: Plan, report: RunReport, tokenizer: Any) -> Iterator[Section]:
    hub_id = loaded.recipe.model.id
    name = hub_id or Path(model_name(report.model)).name
    linked = f"[{hub_id}](https://huggingface.co/{hub_id})" if hub_id else name
    if report.layers:
        before, after = report.shrink.get("parameters", (1, 1 - report.sparsity * report.targeted))
        yield Section(
            f"{name}, {1 - after / before:.0%} {_left(report)}",
            f"{linked}, pruned by compressx {report.compressx}: {_became(report)}",
        )
    else:
        yield Section(name, f"{linked} as it is, measured by compressx {report.compressx}. Nothing is pruned.")
    done = " ".join(line for stage in STAGES for line in stage.sentences(report))
    for method in by_module(report):
        yield replace(
            method,
            title="Method",
            note=done,
            table=_without(method.table, "seconds"),
        )
    for measured in evaluation(report):
        yield replace(measured, note="On the texts of the recipe's `evaluate` section, below.")
    if (text := loaded.recipe.calibration) is not None and plan.needs_calibration:
        sources = text.model_dump(mode="json", by_alias=True, exclude_none=True, include={"dataset", "datasets"})
        told_of = f"{text.samples} sequences of {text.sequence_length} tokens, drawn with seed {text.seed} from"
        yield Section("Calibration", f"{told_of} `{flow(*sources.values())}`.")
    use, told = _USE, f"Written with transformers {report.versions['transformers']}. "
    told += "Where version 4 wrote the dense model's config, it reads this one, too; otherwise take version 5."
    if (differs := getattr(tokenizer, "differs", None)) is not None:
        told += f" `AutoTokenizer` and tokenizer.json make different tokens: {differs}. Those of the file are right."
        use = _USE.replace("AutoTokenizer", "PreTrainedTokenizerFast")
    yield Section("Use", told, text=use, language="py")
    if report.layers and not report.shrink and report.became == "zero":
        yield Section(
            "Train it further",
            "Training makes zeros nonzero again, unless the masks are held. `compressx apply masks.safetensors TRAINED "
            "--output SPARSE` sets them to zero again; `masks.safetensors` is in the folder of the run.",
        )
    values: dict[str, Any] = loaded.recipe.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"output", "export"}
    )
    note = "Save it as `recipe.yaml`, add `output: FOLDER`, and run `compressx run recipe.yaml`."
    yield Section("Recipe", note, text=dump_yaml(values), language="yaml")


def _left(report: RunReport) -> str:
    return "smaller" if report.shrink else report.share.replace("sparsity", "sparse")


def _became(report: RunReport) -> str:
    """Return what became of the weights that were pruned."""
    pruned = f"{report.sparsity:.2%} of the weights of {report.linears}"
    if not report.shrink:
        dense = "The weights are stored dense: files are as large as those of the dense model."
        return f"{pruned} are {report.became}. {dense}"
    before, after = report.shrink["parameters"]
    numbers = ", ".join(f"{name} {now} instead of {was}" for name, (was, now) in report.shrink["config"].items())
    return (
        f"{after:,} parameters instead of {before:,} ({numbers}). {pruned} were pruned; what goes whole is left out of "
        "this model, which is an ordinary one that transformers loads."
    )


def _without(table: Table, name: str) -> Table:
    """Return a table without one of its columns."""
    kept = [i for i, column in enumerate(table.columns) if column.name != name]
    return Table(tuple(table.columns[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in table.rows))
