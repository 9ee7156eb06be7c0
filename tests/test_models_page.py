"""The page of models says what is so: each cell of its table is computed anew."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks as attention
from transformers import AutoConfig, AutoModelForCausalLM

from compressx import Block, Unstructured, UnsupportedModelError, find_projections, find_units
from compressx.api.patterns import UnitKind
from compressx.models.architecture import architecture_of, text_config
from compressx.planning.make import _matrices as matrices
from compressx.shrink.cuts import RemainingUnits, smaller
from compressx.testing import TINY_CONFIGS, tiny_model
from compressx_attnprune import layer

PAGE = Path("docs/models.md").read_text(encoding="utf-8").partition("\n## GGUF")[0]
COLUMNS = ("attnprune", "neurons", "kv-groups", "blocks")


def table() -> dict[str, dict[str, str]]:
    """Return the cells by model type and column."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("|---|")[2], re.MULTILINE)
    return {kind: dict(zip(COLUMNS, cells.split(" | "), strict=True)) for kind, cells in rows}


def blocks_of(model: Any) -> list[Block]:
    found = architecture_of(model)
    return [
        Block(i, fqn, module, found.inside(fqn), (), text_config(model))
        for i, (fqn, module) in enumerate(found.blocks.items())
    ]


def attends(blocks: list[Block]) -> str:
    said = set()
    for block in blocks:
        try:
            found = find_projections(block)
        except UnsupportedModelError:
            said.add("other")  # linear attention, or keys of another block
            continue
        try:
            layer.check(block, dict.fromkeys((found.query.name, found.key.name), Unstructured(0.5, "joint")))
            said.add("yes")
        except UnsupportedModelError:
            said.add("no")
    return "no" if "no" in said else "yes" if "yes" in said else "none"


def shrinks(model: Any, kind: UnitKind) -> str:
    kept = []
    for block in blocks_of(model):
        try:
            found = find_units(kind, block)
        except UnsupportedModelError:
            continue
        for units in found:
            keep = torch.ones(units.count, dtype=torch.bool)
            keep[: units.count // 2] = False
            kept.append(RemainingUnits(units, keep))
    if not kept:
        return "no"
    return tried(model, kept) if any(not one.keep.all() for one in kept) else "one"


def tried(model: Any, kept: list[RemainingUnits], *dropped: str) -> str:
    try:
        smaller(model, kept, dropped)
    except UnsupportedModelError:
        return "no"
    return "yes"


def is_so(cells: Mapping[str, str], column: str, found: str) -> bool:
    """Compare a cell with what was found; `in blocks with ...` is a yes of some blocks."""
    said = cells[column].partition(":")[0].split()[0]
    return {"in": "yes"}.get(said, said) == found


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_each_cell_of_the_table_is_what_the_plan_says(name: str):
    kind = TINY_CONFIGS[name][0]
    with torch.device("meta"):
        model = tiny_model(name)
    blocks, cells = blocks_of(model), table()[kind]
    assert is_so(cells, "attnprune", attends(blocks))
    assert is_so(cells, "blocks", tried(model, [], blocks[1].fqn))
    assert is_so(cells, "neurons", shrinks(model, "neurons"))
    groups = shrinks(model, "kv-groups")
    assert is_so(cells, "kv-groups", groups) or groups == "one"


def test_the_table_has_every_architecture_and_the_list_all_attention_that_is_tested():
    assert list(table()) == sorted({kind for kind, _ in TINY_CONFIGS.values()})
    tested = {attention.MORE_CONFIGS[name][0] for name in attention.EVERY if name in attention.MORE_CONFIGS}
    listed = set(re.findall(r"`(\w+)`", PAGE.partition("also tested on")[2].partition("and refuses")[0]))
    assert listed == tested - set(table())
    refused = {kind for kind, _ in attention.MORE_CONFIGS.values()} - tested - set(table())
    assert set(re.findall(r"`(\w+)`", PAGE.partition("and refuses")[2].partition(".")[0])) == refused


@pytest.mark.slow
def test_the_shares_of_blocks_that_stay_dense_are_those_of_the_models_in_their_default_sizes():
    said = PAGE.partition("In transformers' default sizes they are")[2].partition(". The plan")[0]
    listed = {
        kind: int(percent)
        for percent, kinds in re.findall(r"(\d+)% of((?:,? (?:and )?`\w+`)+)", said)
        for kind in re.findall(r"`(\w+)`", kinds)
    }
    assert listed
    for kind in (*listed, "llama4_text", "jetmoe", "gpt_oss", "mixtral"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
        found = architecture_of(model)
        every, left = matrices(found, model)
        assert round(100 * left / every) == listed.get(kind, 0), kind
