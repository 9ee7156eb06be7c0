"""`report.html`: a run's report as one page that needs no network, for narrow and wide screens, light and dark."""

from __future__ import annotations

import base64
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from compressx.api.record import SUMMARY_COLUMNS, BlockReport, LayerReport, RunReport, kind_of, total_sparsity
from compressx.report.markdown import allocation_table, block_table, layer_rows, model_name, reconstruction_table
from compressx.runtime.files import os_errors_named

_COLOURS = {"#ffffff": "none", "#000000": "currentColor", "#dddddd": "var(--line)"}
"""What a drawing's ground, lines and grid become, so that they follow the page."""


@dataclass(frozen=True)
class _Shown:
    """A figure within the page: an SVG as markup, or a PNG as a data URI."""

    caption: str
    svg: Any = None
    data: str = ""


def page(report: RunReport, recipe: str, folder: Path) -> str:
    """Return the content of `report.html`.

    Args:
        report: what the run did.
        recipe: the recipe as resolved, YAML.
        folder: the output folder, which holds the files that `report.figures` names.

    Raises:
        ArtifactError: a figure's file that cannot be read.
    """
    figures = [_figure(number, f, folder) for number, f in enumerate(report.figures)]
    return str(
        _template().render(
            report=report,
            model=model_name(report.model),
            cards=_cards(report),
            summary_columns=SUMMARY_COLUMNS,
            heat=_heat(report.blocks),
            bars=_bars(report.blocks),
            by_block=block_table(report.blocks).told,
            stages=[[name, f"{value:.1f}"] for name, value in report.seconds.items()],
            curves=[f for f in figures if f.svg is not None],
            maps=[f for f in figures if f.svg is None],
            allocation=allocation_table(report.allocation) if report.allocation else None,
            reconstruction=reconstruction_table(report.blocks),
            layers=layer_rows(report),
            skipped=[[s["name"], s["reason"]] for s in report.skipped],
            plugins=[[p[k] or "" for k in ("name", "version", "source", "module")] for p in report.plugins],
            recipe=recipe,
        )
    )


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader("compressx.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["plain"] = lambda text: text.replace("`", "")
    environment.filters["coded"] = lambda text: Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped
    return environment.get_template("report.html.jinja")


def _cards(report: RunReport) -> list[tuple[str, str, str]]:
    """Say what matters most: name, value, note."""
    cards = [("sparsity", f"{report.sparsity:.2%}", f"of {len(report.layers)} linears")]
    measured = [row for row in report.evaluation_rows() if not row[0].endswith("stderr")]
    for name, dense, *others in measured[:2]:
        changed = others[-2:]
        cards.append((name.replace("_", " "), changed[0], f"dense {dense}, {changed[1]}"))
    total = report.seconds.get("total", sum(report.seconds.values()))
    minutes = f"{total / 60:.1f} min" if total >= 120 else f"{total:.0f} s"
    cards.append(("time", minutes, ", ".join(dict.fromkeys(layer.pruner for layer in report.layers))))
    cards.append(("peak memory", f"{report.peak_memory_bytes / 2**30:.1f} GiB", ""))
    return cards


def _heat(blocks: Sequence[BlockReport]) -> Mapping[str, Any]:
    """Lay out sparsities in percent: a row for each block, a column for each kind of linear; experts are averaged."""
    kinds = list(dict.fromkeys(kind_of(layer.name) for block in blocks for layer in block.layers))
    rows = []
    for block in blocks:
        alike: dict[str, list[LayerReport]] = defaultdict(list)
        for layer in block.layers:
            alike[kind_of(layer.name)].append(layer)
        rows.append((_number(block), [100 * total_sparsity(alike[k]) if k in alike else None for k in kinds]))
    return {"kinds": kinds, "rows": rows}


def _bars(blocks: Sequence[BlockReport]) -> Mapping[str, Any]:
    """Lay out each block's error, where any has one, and its seconds: as text, and in percent of the largest."""
    measured: dict[str, tuple[list[float | None], str]] = {
        "output error": ([block.output_error for block in blocks], "#.2g"),
        "seconds": ([block.seconds for block in blocks], ".1f"),
    }
    columns = {}
    for name, (values, form) in measured.items():
        most = max((x for x in values if x is not None), default=0.0) or 1.0
        if any(x is not None for x in values):
            columns[name] = [("", 0.0) if x is None else (format(x, form), 100 * x / most) for x in values]
    rows = zip(map(_number, blocks), *columns.values(), strict=True)
    return {"columns": list(columns), "rows": [(number, cells) for number, *cells in rows]}


def _number(block: BlockReport) -> str:
    return str(block.index) if block.fqn else block.name


def _figure(number: int, figure: Mapping[str, str], folder: Path) -> _Shown:
    path = folder / figure["file"]
    with os_errors_named("read", path):
        content = path.read_bytes()
    if path.suffix == ".svg":
        return _Shown(figure["caption"], svg=_inline(content.decode(), f"f{number}-"))
    return _Shown(figure["caption"], data="data:image/png;base64," + base64.b64encode(content).decode())


def _inline(svg: str, prefix: str) -> Any:
    """Make a drawing part of the page: its colours follow the page's, and its ids differ from other drawings'."""
    from markupsafe import Markup

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for drawn, followed in _COLOURS.items():
        svg = svg.replace(drawn, followed)
    return Markup(svg)  # noqa: S704 - drawn by matplotlib, which escapes its texts
