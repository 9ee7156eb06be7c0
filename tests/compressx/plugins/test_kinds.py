"""A second kind of plugin is a spec, a hook and a row: everything else works for it as it does for pruners."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel
from tests.compressx.plugins.conftest import Site, refusal

from compressx.api import hooks
from compressx.cli import cli
from compressx.plugins import kinds
from compressx.plugins.kinds import PRUNER, Kind
from compressx.plugins.manager import load_plugins


@dataclasses.dataclass(frozen=True)
class SelectorSpec:
    """What a second kind of plugin would offer."""

    name: str
    summary: str
    options: type[BaseModel]
    build: Callable[[Any], Any]


SELECTOR = Kind("token selector", "token_selectors", SelectorSpec)
SELECTS = """
from pydantic import BaseModel
import compressx
from tests.compressx.plugins.test_kinds import SelectorSpec

class Options(BaseModel):
    pass

@compressx.hookimpl
def compressx_token_selectors():
    return [SelectorSpec(name, "a test", Options, print) for name in {names!r}]
"""


def offer_selectors() -> None:
    """Offer token selectors to recipes."""


@pytest.fixture
def selecting(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Where token selectors are a kind: the whole of what it takes is its spec, its hook and its row."""
    monkeypatch.setattr(hooks, "compressx_token_selectors", hooks.hookspec(offer_selectors), raising=False)
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, SELECTOR))
    site.module("cx_tokens", SELECTS.format(names=("rho", "entropy")))
    site.offers("cx_a", "wanda")
    return site


def test_what_a_plugin_offers_of_another_kind_is_found_by_its_name(selecting: Site) -> None:
    plugins = load_plugins(modules=["cx_tokens", "cx_a"])
    assert isinstance(plugins.find(SELECTOR, "rho"), SelectorSpec)
    assert [r.offers for r in plugins.records] == [
        {"pruners": (), "token_selectors": ("rho", "entropy")},
        {"pruners": ("wanda",), "token_selectors": ()},
    ]
    assert refusal(lambda: plugins.find(SELECTOR, "roh")) == (
        "no token selector 'roh'; did you mean 'rho'? valid: entropy, rho; compressx plugins lists what is installed"
    )
    assert "did you mean" not in refusal(lambda: plugins.find(PRUNER, "rho"))


def test_what_is_offered_of_another_kind_is_checked_like_a_pruner(selecting: Site) -> None:
    selecting.install("dist", more="cx_more")
    selecting.module("cx_more", SELECTS.format(names=["rho"]).replace("SelectorSpec(", "compressx.PrunerSpec("))
    (record,) = load_plugins().records
    assert str(record.error).endswith("which is not a SelectorSpec")


def test_one_name_has_one_owner_in_each_kind(selecting: Site) -> None:
    selecting.module("cx_more", SELECTS.format(names=["rho"]))
    assert refusal(lambda: load_plugins(modules=["cx_tokens", "cx_more"])) == (
        "token selector 'rho' is offered by plugin 'cx_tokens' (--plugin cx_tokens) and by plugin 'cx_more' "
        "(--plugin cx_more); block one of them"
    )
    selecting.offers("cx_alike", "rho")
    alike = load_plugins(modules=["cx_tokens", "cx_alike"])
    assert type(alike.find(SELECTOR, "rho")) is not type(alike.find(PRUNER, "rho"))


def test_a_misspelt_hook_of_another_kind_is_refused(selecting: Site) -> None:
    selecting.module("cx_more", SELECTS.format(names=["x"]).replace("compressx_token_selectors", "compressx_selectors"))
    told = refusal(lambda: load_plugins(modules=["cx_more"]))
    assert "function 'compressx_selectors' is not a hook; did you mean 'compressx_token_selectors'?" in told


def test_plugins_toml_declares_names_of_every_kind(selecting: Site) -> None:
    table = '[[plugin]]\nname = "tokens"\nmodule = "cx_tokens"\ntoken_selectors = '
    selecting.toml(f'{table}["rho"]\n')
    assert refusal(load_plugins) == (
        "plugin 'tokens' (plugins.toml:1) registers the token_selectors rho, entropy, but plugins.toml declares rho"
    )
    selecting.toml(f'{table}["rho", "entropy"]\npruners = []\n')
    assert load_plugins().records[0].status == "loaded"
    assert refusal(lambda: load_plugins(blocked=["tokens"]).find(SELECTOR, "rho")) == (
        "no token selector 'rho': plugin 'tokens' (plugins.toml) is blocked; drop -p no:tokens"
    )


def test_every_kind_is_shown_by_compressx_plugins(selecting: Site) -> None:
    def shown(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["--plugin", "cx_tokens", "plugins", *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    (record,) = json.loads(shown("--json"))
    assert (record["pruners"], record["token_selectors"]) == ([], ["rho", "entropy"])
    assert "token_selectors" in shown()
    assert "rho, entropy" in shown()
