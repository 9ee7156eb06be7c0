"""A first recipe for a model, with what its author needs to know as comments."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

from torch import nn

from compressx.api.names import folded
from compressx.api.pruner import PrunerSpec
from compressx.models.architecture import Architecture, architecture_of, positions_of
from compressx.planning.make import make_plan
from compressx.planning.targets import kinds
from compressx.plugins.kinds import PRUNER
from compressx.plugins.manager import Plugins
from compressx.recipe.document import flow
from compressx.recipe.schema import load_recipe
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import CompressxError, UnsupportedModelError, one_line

_SPARSITY = 0.5
_SEQUENCE = 2048


def draft(source: ModelSource, name: str, skeleton: nn.Module, plugins: Plugins, pruner: str) -> str:
    """Write a recipe that prunes half of the weights in a model's blocks, with comments about this model.

    The output is named after `name`, what the user calls the model. Only shapes of the skeleton are read.
    """
    spec = plugins.find(PRUNER, pruner)
    found, length = architecture_of(skeleton), min(_SEQUENCE, positions_of(skeleton))
    called = Path(name).expanduser().resolve().name.removesuffix(".gguf")  # a hub id's last part, too
    recipe: dict[str, Any] = {
        "model": source.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        "calibration": {"dataset": "wikitext", "samples": 128, "sequence_length": length},
        "evaluate": {"token_perplexity": {"dataset": "wikitext", "samples": 64, "sequence_length": length}},
        "output": f"runs/{called}-50",
    }
    rule = _rule(spec, found, skeleton, recipe, plugins)
    lines = [
        *described(found, skeleton, name),
        "",
        f"model: {flow(recipe['model'])}",
        f"calibration: {flow(recipe['calibration'])}  # or c4, python-docs (offline), {{text: FILES}}",
        "prune:  # the first rule that matches a linear takes it",
        f"  - {flow(rule)}  # half of the {rule.get('pattern', 'weights')}",
        "# ignore: [layers: [0, -1]]  # layers or globs that no rule takes",
        f"evaluate: {flow(recipe['evaluate'])}  # before and after; without samples, on all of the text",
        f"output: {flow(recipe['output'])}",
    ]
    if "pattern" in rule:  # experts go with it only, and not every config can describe what the others leave
        lines.append(f"{'' if rule['pattern'] == 'experts' else '# '}shrink: true  # write the smaller model")
    return "\n".join([*lines, ""])


def described(found: Architecture, skeleton: nn.Module, name: str) -> list[str]:
    """Return comments with the model's linears, their sizes, and what cannot be pruned."""
    every = {**found.linears, **found.outside}
    total = sum(p.numel() for p in skeleton.parameters())
    weights = {name: x.out_features * x.in_features for name, x in every.items()}
    inside = sum(weights[name] for name in found.linears)
    rows = [(n, f"{x.out_features} x {x.in_features}, {weights[n] / 1e6:.1f} M") for n, x in every.items()]
    linears = [f"{folds}: {f'{count} of ' if count > 1 else ''}{size}" for folds, count, (size,) in folded(rows)]
    outside = [f"{n}: outside the blocks; `*` leaves it dense, a target {n!r} prunes it" for n in found.outside]
    unprunable = [f"{n}: {reason}" for n, _, (reason,) in folded(found.unprunable.items())]
    return [
        f"# {one_line(name)}: {type(skeleton).__name__},",
        f"# {len(found.blocks)} decoder blocks, {total / 1e6:.1f} M weights,",
        f"# {inside / 1e6:.1f} M of them in linears of the blocks.",
        "#",
        "#   compressx plan FILE    shows what would happen; compressx run FILE does it",
        "#",
        "# Linears, rows by columns:",
        *(f"#   {line}" for line in linears),
        "# Not pruned:",
        *(f"#   {line}" for line in [*outside, *unprunable]),
    ]


def _rule(
    spec: PrunerSpec, found: Architecture, skeleton: nn.Module, recipe: dict[str, Any], plugins: Plugins
) -> dict[str, Any]:
    """Return a rule that a pruner takes on this model: of all linears, or a kind or two.

    A pruner of whole units alone gets the first of its patterns that the model has.
    """
    refusals: list[CompressxError] = []
    tried: list[dict[str, Any]] = [{}] if spec.groups else [{"pattern": unit} for unit in spec.units]
    if spec.groups and spec.check is not None:
        names = [*kinds(found.linears)]
        tried += [{"targets": [*some]} for count in (1, 2) for some in combinations(names, count)]
    for given in tried:
        rule = {"targets": ["*"], "pruner": spec.name, **given, "sparsity": _SPARSITY}
        whole = given.get("pattern") == "experts"  # which go with it only
        try:
            make_plan(load_recipe({**recipe, "prune": [rule], "shrink": whole}), plugins, skeleton)
        except CompressxError as error:
            refusals.append(error)
        else:
            return rule
    # That the model is not supported says more than that some linears are not.
    message = next((e for e in refusals if isinstance(e, UnsupportedModelError)), refusals[0])
    why = re.sub(r".*prune\[0\]\S*: ", "", " ".join(str(message).split()))
    raise UnsupportedModelError(f"{spec.name} prunes none of this model's linears: {why}; give another --pruner")
