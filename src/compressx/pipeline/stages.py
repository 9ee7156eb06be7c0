"""The stages of a run in their order, and what goes through all of them: the checks, the walk, the report."""

from __future__ import annotations

import logging

from compressx.allocation.stage import Allocate, within_budget
from compressx.api.record import RunReport
from compressx.blocks.difference import OpenBase, TakeFromBase
from compressx.blocks.stage import ChooseBlocks, Prune, Sensitivities
from compressx.evaluation.stage import EvaluateDense, EvaluatePruned
from compressx.models.architecture import find_blocks, refuse_prepared
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_skeleton, load_tokenizer
from compressx.pipeline.inputs import Inputs
from compressx.pipeline.saving import Export, Save
from compressx.planning.make import check_rules, make_plan
from compressx.prompts.selection import TokenSelection
from compressx.report.contents import details, head, of_run
from compressx.report.section import Section
from compressx.runtime.errors import Mistakes
from compressx.shrink.stage import Shrink
from compressx.stages.state import RunState, Stage
from compressx.training.stage import BlockReconstruction, FineTuning

STAGES: tuple[Stage, ...] = (
    OpenBase(), Inputs(), TokenSelection(), EvaluateDense(), TakeFromBase(), ChooseBlocks(), Sensitivities(),
    Allocate(), Prune(), BlockReconstruction(), EvaluatePruned(saved=False), FineTuning(), Shrink(), Save(),
    EvaluatePruned(saved=True), Export(),
)  # fmt: skip
"""To add a stage, write a class with those methods of `Stage` that it needs in its feature's package, and name it."""


def prepare(state: RunState) -> None:
    """Check a recipe as far as possible without loading weights, and plan it.

    Args:
        state: with the skeleton if the model is in memory; receives it, the tokenizer and the plan.
    """
    mistakes, plan = Mistakes(), None
    if state.skeleton is None:
        with mistakes.collected(), state.loaded.at("model"):
            checkpoint = find_checkpoint(state.recipe.model)
            find_blocks(skeleton := load_skeleton(checkpoint))
            state.checkpoint, state.skeleton = checkpoint, skeleton
            state.tokenizer = load_tokenizer(checkpoint)
    if state.skeleton is None:
        check_rules(state.loaded, state.plugins, None, mistakes)
    else:
        with mistakes.collected():
            refuse_prepared(state.skeleton, "pruned")
            plan = within_budget(state, make_plan(state.loaded, state.plugins, state.skeleton))
    for stage in STAGES:
        stage.check(state, plan, mistakes)
    mistakes.raise_all()
    assert plan is not None  # noqa: S101 - otherwise there is a mistake
    state.plan = plan
    state.log.write(logging.WARNING, plan.warning)


def walk(state: RunState) -> None:
    """Run every stage."""
    for stage in STAGES:
        if stage.everywhere or state.first:
            stage.run(state)


def sections(report: RunReport, recipe: str = "") -> tuple[Section, ...]:
    """Return every section of a report that there is something for; the first is the head."""
    of_stages = (section for stage in STAGES for section in stage.sections(report))
    return (*head(report), *of_stages, *of_run(report), *details(report, recipe))
