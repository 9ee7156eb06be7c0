"""A first recipe for a model, with what its author needs to know as comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from torch import nn

from compressx.api.names import folded
from compressx.api.patterns import Unstructured
from compressx.api.pruner import Block, Linear, PrunerSpec
from compressx.models.architecture import Architecture, architecture_of, text_config
from compressx.planning.make import make_plan
from compressx.planning.targets import kinds
from compressx.plugins.kinds import PRUNER
from compressx.plugins.manager import Plugins
from compressx.recipe.document import flow
from compressx.recipe.rules import matches
from compressx.recipe.schema import load_recipe
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import CompressxError, UnsupportedModelError, blamed_on, one_line

_SPARSITY = 0.5
_SEQUENCE = 2048


def draft(source: ModelSource, name: str, skeleton: nn.Module, plugins: Plugins, pruner: str) -> str:
    """Write a recipe that prunes half of the weights in a model's blocks, with comments about this model.

    The output is named after `name`, what the user calls the model. Only shapes of the skeleton are read.

    Raises:
        PluginError: no such pruner.
        UnsupportedModelError: the model is not supported, or not by this pruner.
    """
    plugins.find(PRUNER, pruner)
    found = architecture_of(skeleton)
    positions = getattr(text_config(skeleton), "max_position_embeddings", None)
    length = min(_SEQUENCE, positions or _SEQUENCE)
    called = Path(name).expanduser().resolve().name.removesuffix(".gguf")  # a hub id's last part, too
    recipe: dict[str, Any] = {
        "model": source.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        "calibration": {"dataset": "wikitext", "samples": 128, "sequence_length": length},
        "evaluate": {"token_perplexity": {"dataset": "wikitext", "samples": 64, "sequence_length": length}},
        "output": f"runs/{called}-50",
    }
    taken = {spec.name: _taken(spec, found, skeleton, recipe, plugins) for spec in plugins.offers["pruners"].values()}
    chosen, refusal = taken[pruner]
    if not chosen:
        able = ", ".join(name for name, (rule, _) in taken.items() if rule) or "there is none"
        raise UnsupportedModelError(
            f"{pruner} prunes none of this model's linears: {refusal}; give --pruner one that does: {able}"
        )
    few = [r for n, (r, _) in taken.items() if r and r["targets"] != ["*"] and n != pruner and "pattern" not in chosen]
    rules = [f"  # - {flow(only)}  # before the next rule" for only in few]
    rules.append(f"  - {flow(chosen)}  # half of the {chosen.get('pattern', 'weights')}")
    if "pattern" in chosen:  # experts go with it only, and not every config can describe what the others leave
        rules.append(f"{'' if _whole(chosen) else '# '}shrink: true  # write the smaller model")
    return "\n".join(
        [
            *_described(found, skeleton, name),
            "#",
            "# Pruners, and which linears of this model they take (`compressx plugins` lists where they come from):",
            *(f"#   {n:12} {_takes(t, why)}" for n, (t, why) in taken.items()),
            "",
            f"model: {flow(recipe['model'])}",
            f"calibration: {flow(recipe['calibration'])}  # or c4, python-docs (offline), {{text: FILES}}",
            "prune:  # the first rule that matches a linear takes it",
            *rules,
            "# ignore: [layers: [0, -1]]  # layers or globs that no rule takes",
            f"evaluate: {flow(recipe['evaluate'])}  # before and after; without samples, on all of the text",
            f"output: {flow(recipe['output'])}",
            "",
        ]
    )


def _described(found: Architecture, skeleton: nn.Module, name: str) -> list[str]:
    """Return comments with the model's linears, their sizes, and what cannot be pruned."""
    every = {**found.linears, **found.outside}
    total = sum(p.numel() for p in skeleton.parameters())
    inside = sum(_weights(x) for x in found.linears.values())
    rows = [(x.name, f"{x.out_features} x {x.in_features}, {_weights(x) / 1e6:.1f} M") for x in every.values()]
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


def _weights(linear: Linear) -> int:
    return linear.out_features * linear.in_features


def _whole(rule: Mapping[str, Any]) -> bool:
    return rule.get("pattern") == "experts"


def _takes(rule: Mapping[str, Any], why: str) -> str:
    if not rule:
        return f"none: {why}"
    if "pattern" in rule:
        return f"whole {rule['pattern']}, with pattern: {rule['pattern']}"
    targets = rule["targets"]
    return "all" if targets == ["*"] else f"only {' and '.join(targets)}, in a rule of their own"


def _taken(
    spec: PrunerSpec, found: Architecture, skeleton: nn.Module, recipe: dict[str, Any], plugins: Plugins
) -> tuple[dict[str, Any], str]:
    """Return a rule that a pruner takes on this model: of all linears, or a kind or two; else why there is none.

    A pruner of whole units alone gets the first of its patterns that the model has.
    """
    refusals: list[CompressxError] = []
    first: list[dict[str, Any]] = [{}] if spec.groups else [{"pattern": unit} for unit in spec.units]
    few = ({"targets": targets} for targets in _accepted(spec, found, skeleton, refusals))
    for given in chain(first, few):
        rule = {"targets": ["*"], "pruner": spec.name, **given, "sparsity": _SPARSITY}
        try:
            make_plan(load_recipe({**recipe, "prune": [rule], "shrink": _whole(rule)}), plugins, skeleton)
        except CompressxError as error:
            refusals.append(error)
        else:
            return rule, ""
    # That the model is not supported says more than that some linears are not.
    message = next((e for e in refusals if isinstance(e, UnsupportedModelError)), refusals[0])
    return {}, re.sub(r".*prune\[0\]\S*: ", "", " ".join(str(message).split()))


def _accepted(
    spec: PrunerSpec, found: Architecture, skeleton: nn.Module, refusals: list[CompressxError]
) -> Iterable[list[str]]:
    """Yield the kinds, alone or in pairs, that a pruner's check accepts in the first block that has them."""
    tried: set[tuple[str, ...]] = set()
    for index, (fqn, module) in enumerate(found.blocks.items()):
        linears = found.inside(fqn)
        block = Block(index, fqn, module, linears, (), text_config(skeleton))
        names = [*kinds(linears)]
        for some in chain(combinations(names, 1), combinations(names, 2)):
            if some in tried or spec.check is None or not spec.groups:  # without groups only units are pruned
                continue
            tried.add(some)
            patterns = {
                n: Unstructured(_SPARSITY, spec.groups[0]) for n in linears if any(matches(glob, n) for glob in some)
            }
            try:
                with blamed_on(f"check of pruner {spec.name!r} failed on {fqn}"):
                    spec.check(block, patterns, spec.options())
            except CompressxError as error:
                refusals.append(error)
            else:
                yield [*some]
