"""Pruners that are one function, which scores the weights of a linear."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, create_model
from torch import Tensor

from compressx.api.hooks import hookimpl
from compressx.api.patterns import Group, Pattern, UnitKind, keep_masks
from compressx.api.pruner import Block, NoOptions, PruneResult, PrunerSpec, Statistic
from compressx.api.statistics import FeatureNorms, Hessian

Score: TypeAlias = Callable[..., Tensor]

_INPUTS = ("weight", "norms", "hessian")


def score_pruner(
    name: str, summary: str = "", *, groups: tuple[Group, ...] = get_args(Group), nm: bool = True,
    units: tuple[UnitKind, ...] = (),
) -> Callable[[Score], Callable[[], list[PrunerSpec]]]:  # fmt: skip
    """Make a pruner of a function that scores the weights of a linear; those of the lowest scores are dropped.

    The function returns finite scores [out_features, in_features], and names what it needs:

    - `weight`: float32 [out_features, in_features], not to be changed;
    - `norms`: ||X_j||_2 of each input feature over all calibration tokens, float32 [in_features];
    - `hessian`: X^T X over all calibration tokens, float32 [in_features, in_features].

    Without the last two the pruner needs no calibration. Keyword-only parameters are the options of a recipe; their
    types are their annotations, or those of their defaults. The other arguments are those of `PrunerSpec`; the summary
    is by default the first line of the function's docstring.

    Returns:
        A decorator, which leaves the hook `compressx_pruners` in the place of the function: called without arguments,
        it returns the `PrunerSpec`.
    """

    def offered(score: Score) -> Callable[[], list[PrunerSpec]]:
        inputs, options = _parameters(name, score)
        line = summary or (inspect.getdoc(score) or name).splitlines()[0]
        build = lambda chosen: _ScorePruner(score, inputs, chosen)  # noqa: E731
        spec = PrunerSpec(name, line, options, build, groups, nm, units, separable=True)

        @hookimpl(specname="compressx_pruners")
        def offer() -> list[PrunerSpec]:
            return [spec]

        offer.__module__, offer.__doc__ = score.__module__, score.__doc__
        return offer

    return offered


def _parameters(name: str, score: Score) -> tuple[list[str], type[BaseModel]]:
    """Return which inputs a score function asks for, and the model of its options."""
    inputs, options = [], {}
    for parameter in inspect.signature(score, eval_str=True).parameters.values():
        default = parameter.default
        kind = type(default) if parameter.annotation is parameter.empty else parameter.annotation
        if parameter.kind is not parameter.KEYWORD_ONLY and parameter.name in _INPUTS:
            inputs.append(parameter.name)
            continue
        fault = ""
        if parameter.kind is not parameter.KEYWORD_ONLY:
            fault = f"a score has no input {parameter.name!r}; it takes {', '.join(_INPUTS)}, and options after a *"
        elif kind in (type, type(None)):
            fault = f"the option {parameter.name!r} needs a type, or a default that has one"
        if fault:
            raise TypeError(f"pruner {name!r}: {fault}")
        options[parameter.name] = (kind, ... if default is parameter.empty else default)
    forbid = ConfigDict(extra="forbid")
    return inputs, create_model(f"{name} options", __config__=forbid, **options) if options else NoOptions  # type: ignore[call-overload]


@dataclass(frozen=True)
class _ScorePruner:
    """Asks a function for scores."""

    score: Score
    inputs: Collection[str]
    options: BaseModel

    def observe(self, block: Block, name: str) -> Statistic | None:
        width = block.linears[name].in_features
        return Hessian(width) if "hessian" in self.inputs else FeatureNorms(width) if "norms" in self.inputs else None

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> dict[str, PruneResult]:
        scores = {name: self._scores(block, name, stats.get(name)) for name in patterns}
        return {name: PruneResult(keep) for name, keep in keep_masks(scores, patterns).items()}

    def _scores(self, block: Block, name: str, statistic: Statistic | None) -> Tensor:
        weight = block.linears[name].weight.float()
        known: dict[str, Any] = {"weight": weight}
        if isinstance(statistic, Hessian):
            known |= {"norms": statistic.diagonal.sqrt().float(), "hessian": statistic.matrix}
        elif isinstance(statistic, FeatureNorms):
            known["norms"] = statistic.norms
        chosen = {option: getattr(self.options, option) for option in type(self.options).model_fields}
        scores = self.score(**{name: known[name].to(weight.device) for name in self.inputs}, **chosen)
        if scores.shape != weight.shape:
            raise ValueError(f"{name}: expected scores {list(weight.shape)}, got {list(scores.shape)}")
        return scores
