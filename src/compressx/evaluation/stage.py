"""The stages that measure the dense, the pruned and the fine-tuned model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from textwrap import shorten
from typing import Literal, cast

from compressx.api.record import RunReport
from compressx.evaluation.evaluators import check_evaluators, run_evaluators
from compressx.models.access import Access
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.planning.plan import Plan
from compressx.prompts.selection import selecting_of
from compressx.report.contents import evaluation
from compressx.report.section import Column, Section, counted, shaded, table
from compressx.runtime.errors import Mistakes
from compressx.stages.state import RunState, Stage, StageName


class EvaluateDense(Stage):
    """Measure the dense model, if the recipe evaluates anything; its figures are cached."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:  # noqa: ARG002 - of the model
        settings = state.recipe.evaluate or {}
        check_evaluators(settings, state.plugins, state.skeleton, state.tokenizer, mistakes, state.loaded)

    def run(self, state: RunState) -> None:
        if not state.evaluators:
            return
        with state.loaded.at("evaluate"):
            _measure(state, "dense", state.access, state.inputs.get("model"))

    def sections(self, report: RunReport) -> Iterator[Section]:
        yield from evaluation(report)
        yield from _needles(report)
        yield from _sample(report)


class EvaluatePruned(Stage):
    """Measure the pruned model: before it is fine-tuned, if it is, or as it was saved."""

    def __init__(self, *, saved: bool) -> None:
        """Make the stage before fine-tuning or, `saved`, the one at the end."""
        self.saved = saved

    def run(self, state: RunState) -> None:
        tunes = state.recipe.finetune is not None
        if not state.evaluators or not state.plan.linears or not (tunes or self.saved):
            return
        access = state.access
        if self.saved and state.checkpoint is not None and state.folder and isinstance(access, StreamedModel):
            access = open_streamed(state.checkpoint.at(state.folder / "model"), access.device)
        _measure(state, "finetuned" if tunes and self.saved else "pruned", access)


def _measure(
    state: RunState, of: Literal["dense", "pruned", "finetuned"], access: Access, fingerprint: str | None = None
) -> None:
    progress = partial(state.report_progress, cast("StageName", f"evaluate {of}"))
    progress(0, 1)
    figures = run_evaluators(
        access, state.tokenizer, state.evaluators, selecting=selecting_of(state), progress=progress,
        fingerprint=fingerprint, dense=None if of == "dense" else state.compared_with,
    )  # fmt: skip
    state.report_figures(of, figures)
    state.evaluation[of] = figures


def _needles(report: RunReport) -> Iterator[Section]:
    """Yield a grid of each model and way to read: a row for each depth, a column for each length of prompt."""
    for of, values in report.evaluation.items():
        cells = values.get("needle", {}).get("grid", ())
        depths, lengths = ([*dict.fromkeys(cell[key] for cell in cells)] for key in ("depth", "length"))
        for name in [key for key in (cells[0] if cells else ()) if key not in {"depth", "length"}]:
            found = {(cell["depth"], cell["length"]): cell[name] for cell in cells}
            rows = [[depth, *(found[depth, length] for length in lengths)] for depth in depths]
            columns = [Column("depth", ".0%"), *(Column(f"{length} tokens", ".0%", "heat") for length in lengths)]
            note = "Sentences hidden at a depth of a prompt: the share of questions about them that are answered."
            if name == "kept, selected":
                note = "Sentences hidden at a depth of a prompt: the share of their tokens that are selected."
            yield shaded(f"Needles, {of}: {name}", note, table(columns, rows), counted(cells, "cell"))


def _sample(report: RunReport) -> Iterator[Section]:
    """Yield what each model wrote after the same prompt, side by side."""
    if written := {of: values["sample"] for of, values in report.evaluation.items() if "sample" in values}:
        prompt = shorten(next(iter(written.values()))["prompt"], 300)
        found = table(
            [Column(of, look="prose") for of in written],
            [[said["text"].strip() or "(nothing that can be read)" for said in written.values()]],
        )
        yield Section("Sample", f'What each model writes after "{prompt}", the likeliest token each time.', found)
