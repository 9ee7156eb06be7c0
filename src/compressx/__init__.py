"""compressx prunes Hugging Face transformer language models.

This module is the public API. Names are imported when they are first used, so that `import compressx` (and with it
the command line's help) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from compressx.api.hooks import hookimpl
from compressx.runtime.code import __version__

if TYPE_CHECKING:
    from compressx.api.evaluator import EvaluatedModel, Evaluator, EvaluatorSpec, ReadingEvaluator
    from compressx.api.exporter import Exporter, ExporterSpec, FinishedModel, PlannedModel
    from compressx.api.patterns import (
        NM,
        FixedMask,
        Owners,
        Pattern,
        Structured,
        UnitKind,
        Units,
        Unstructured,
        competing,
        count_dropped,
        drop_lowest,
        keep_mask,
        keep_masks,
    )
    from compressx.api.projections import Projections, Rows, find_projections, head_size
    from compressx.api.pruner import (
        Block,
        BlockCall,
        DepthSearch,
        Divergences,
        Linear,
        NoOptions,
        PreparingPruner,
        Pruner,
        PruneResult,
        PrunerSpec,
        RoutedStatistic,
        Statistic,
    )
    from compressx.api.record import BlockReport, LayerReport, RunReport
    from compressx.api.selector import AttentionRows, ModelFacts, Needle, TokenSelector, TokenSelectorSpec
    from compressx.api.statistics import Covariance, FeatureNorms, Hessian, SequenceSample
    from compressx.models.units import find_units
    from compressx.pipeline.memory import PrunedModel, prune
    from compressx.pipeline.run import plan, run
    from compressx.plugins.manager import Plugins, load_plugins
    from compressx.prompts.answer import Answer, generate
    from compressx.prompts.selection import Selected, select_tokens
    from compressx.runtime.errors import (
        ArtifactError,
        CalibrationError,
        CompressxError,
        PluginError,
        RecipeError,
        UnsupportedModelError,
    )

_HOME = {
    "runtime.errors": ["ArtifactError", "CalibrationError", "CompressxError", "PluginError", "RecipeError",
               "UnsupportedModelError"],
    "api.evaluator": ["EvaluatedModel", "Evaluator", "EvaluatorSpec", "ReadingEvaluator"],
    "api.exporter": ["Exporter", "ExporterSpec", "FinishedModel", "PlannedModel"],
    "api.patterns": ["NM", "FixedMask", "Owners", "Pattern", "Structured", "UnitKind", "Units", "Unstructured",
                 "competing", "count_dropped", "drop_lowest", "keep_mask", "keep_masks"],
    "api.projections": ["Projections", "Rows", "find_projections", "head_size"],
    "plugins.manager": ["Plugins", "load_plugins"],
    "api.pruner": ["Block", "BlockCall", "DepthSearch", "Divergences", "Linear", "NoOptions",
               "PreparingPruner", "PruneResult", "Pruner", "PrunerSpec", "RoutedStatistic", "Statistic"],
    "api.record": ["BlockReport", "LayerReport", "RunReport"],
    "models.units": ["find_units"],
    "pipeline.memory": ["PrunedModel", "prune"],
    "pipeline.run": ["plan", "run"],
    "api.selector": ["AttentionRows", "ModelFacts", "Needle", "TokenSelector", "TokenSelectorSpec"],
    "api.statistics": ["Covariance", "FeatureNorms", "Hessian", "SequenceSample"],
    "prompts.answer": ["Answer", "generate"],
    "prompts.selection": ["Selected", "select_tokens"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "NM",
    "Answer",
    "ArtifactError",
    "AttentionRows",
    "Block",
    "BlockCall",
    "BlockReport",
    "CalibrationError",
    "CompressxError",
    "Covariance",
    "DepthSearch",
    "Divergences",
    "EvaluatedModel",
    "Evaluator",
    "EvaluatorSpec",
    "Exporter",
    "ExporterSpec",
    "FeatureNorms",
    "FinishedModel",
    "FixedMask",
    "Hessian",
    "LayerReport",
    "Linear",
    "ModelFacts",
    "Needle",
    "NoOptions",
    "Owners",
    "Pattern",
    "PlannedModel",
    "PluginError",
    "Plugins",
    "PreparingPruner",
    "Projections",
    "PruneResult",
    "PrunedModel",
    "Pruner",
    "PrunerSpec",
    "ReadingEvaluator",
    "RecipeError",
    "RoutedStatistic",
    "Rows",
    "RunReport",
    "Selected",
    "SequenceSample",
    "Statistic",
    "Structured",
    "TokenSelector",
    "TokenSelectorSpec",
    "UnitKind",
    "Units",
    "Unstructured",
    "UnsupportedModelError",
    "__version__",
    "competing",
    "count_dropped",
    "drop_lowest",
    "find_projections",
    "find_units",
    "generate",
    "head_size",
    "hookimpl",
    "keep_mask",
    "keep_masks",
    "load_plugins",
    "plan",
    "prune",
    "run",
    "select_tokens",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'compressx' has no attribute {name!r}")
    value = getattr(import_module(f"compressx.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
