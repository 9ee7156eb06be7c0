"""A further kind of plugin is a spec, a hook and a row: everything else works for it as it does for pruners."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel
from tests.compressx.plugins.conftest import Site, listed, refusal

from compressx.api import hooks
from compressx.cli import cli
from compressx.plugins import kinds
from compressx.plugins.kinds import PRUNER, Kind
from compressx.plugins.manager import load_plugins


@dataclasses.dataclass(frozen=True)
class QuantizerSpec:
    """What a further kind of plugin would offer."""

    name: str
    summary: str
    options: type[BaseModel]
    build: Callable[[Any], Any]


QUANTIZER = Kind("quantizer", "quantizers", QuantizerSpec)
QUANTIZES = """
from pydantic import BaseModel
import compressx
from tests.compressx.plugins.test_kinds import QuantizerSpec

class Options(BaseModel):
    pass

@compressx.hookimpl
def compressx_quantizers():
    return [QuantizerSpec(name, "a test", Options, print) for name in {names!r}]
"""


def offer_quantizers() -> None:
    """Offer quantizers to recipes."""


@pytest.fixture
def quantizing(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Where quantizers are a kind: the whole of what it takes is its spec, its hook and its row."""
    monkeypatch.setattr(hooks, "compressx_quantizers", hooks.hookspec(offer_quantizers), raising=False)
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, QUANTIZER))
    site.module("cx_bits", QUANTIZES.format(names=("rho", "entropy")))
    site.offers("cx_a", "wanda")
    return site


def test_what_a_plugin_offers_of_another_kind_is_found_by_its_name(quantizing: Site) -> None:
    plugins = load_plugins(modules=["cx_bits", "cx_a"])
    nothing = {kind.key: () for kind in kinds.KINDS}
    assert isinstance(plugins.find(QUANTIZER, "rho"), QuantizerSpec)
    assert [r.offers for r in plugins.records] == [
        {**nothing, "quantizers": ("rho", "entropy")},
        {**nothing, "pruners": ("wanda",)},
    ]
    assert refusal(lambda: plugins.find(QUANTIZER, "roh")) == (
        "no quantizer 'roh'; did you mean 'rho'? valid: entropy, rho; compressx plugins lists what is installed"
    )
    assert "did you mean" not in refusal(lambda: plugins.find(PRUNER, "rho"))
    quantizing.toml(listed("entropy", "cx_bits"))
    assert refusal(lambda: load_plugins(blocked=["entropy"]).find(QUANTIZER, "entropy")) == (
        "no quantizer 'entropy': plugin 'entropy' (plugins.toml) is blocked; drop -p no:entropy"
    )


def test_every_kind_is_shown_by_compressx_plugins(quantizing: Site) -> None:
    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["--plugin", "cx_bits", "plugins", *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    (record,) = json.loads(shown("--json"))
    offered = {kind.key: record[kind.key] for kind in kinds.KINDS if record[kind.key]}
    assert offered == {"quantizers": ["rho", "entropy"]}
    assert "quantizer rho, quantizer entropy" in " ".join(shown().split())
