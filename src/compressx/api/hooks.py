"""The hooks that a plugin may implement, all of them, each one typed function.

Mark an implementation with `compressx.hookimpl`. An implementation may take fewer arguments than its spec, never
others: pluggy refuses unknown ones when the plugin is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from compressx.api.evaluator import EvaluatorSpec
    from compressx.api.exporter import ExporterSpec
    from compressx.api.pruner import PrunerSpec
    from compressx.api.record import BlockReport, RunReport
    from compressx.api.selector import TokenSelectorSpec

hookspec = pluggy.HookspecMarker("compressx")
hookimpl = pluggy.HookimplMarker("compressx")


@hookspec
def compressx_pruners() -> Iterable[PrunerSpec]:  # type: ignore[empty-body]
    """Offer pruners to recipes. Names must be unique over all plugins."""


@hookspec
def compressx_token_selectors() -> Iterable[TokenSelectorSpec]:  # type: ignore[empty-body]
    """Offer token selectors, which shorten prompts. Names must be unique over all plugins."""


@hookspec
def compressx_evaluators() -> Iterable[EvaluatorSpec]:  # type: ignore[empty-body]
    """Offer evaluators, which measure models. Names must be unique over all plugins."""


@hookspec
def compressx_exporters() -> Iterable[ExporterSpec]:  # type: ignore[empty-body]
    """Offer exporters, which write models in other formats. Names must be unique over all plugins."""


@hookspec
def compressx_block_pruned(report: BlockReport) -> None:
    """Be called after each decoder block that this run prunes, and once for linears outside the blocks.

    Args:
        report: which block (`fqn` is empty outside the blocks), the sparsity of its linears, figures and seconds.
    """


@hookspec
def compressx_run_finished(report: RunReport, output: Path) -> None:
    """Be called at the end of a run, when its output folder is complete.

    Args:
        report: the whole report, as in `report.json`.
        output: the finished folder; files that a plugin adds here are kept.
    """
