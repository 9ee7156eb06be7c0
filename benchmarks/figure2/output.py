"""Write Figure 2 as `figure2.csv`, `figure2.json`, `figure2.svg` and `figure2.png`.

The same figure gives the same bytes, except for the versions in the JSON.
"""

from __future__ import annotations

import csv
import io
import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from experiment import BASELINES, OURS, Figure, Panel, Point

from compressx import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CSV_COLUMNS = ("panel", "method", "lambda", "n", "rho", "seeds", "mean", "ci95_low", "ci95_high")

_METHODS = (*BASELINES, OURS)
_STYLES = dict(zip(_METHODS, (("#0072b2", "s"), ("#009e73", "^"), ("#7f7f7f", "D"), ("#d55e00", "o")), strict=True))

Row: TypeAlias = dict[str, str | int | float | None]


def write(figure: Figure, folder: Path) -> None:
    """Write all files into a folder."""
    (folder / "figure2.csv").write_text(to_csv(figure), encoding="utf-8")
    (folder / "figure2.json").write_text(json.dumps(to_json(figure), indent=1) + "\n", encoding="utf-8")
    plot(figure, folder)


def rows(figure: Figure) -> list[Row]:
    """Return one row for each point, with the columns of `CSV_COLUMNS`."""
    return [
        {
            "panel": p.panel,
            "method": p.method,
            "lambda": p.regularization,
            "n": p.tokens,
            "rho": p.sparsity,
            "seeds": len(p.errors),
            "mean": p.mean,
            "ci95_low": p.mean - p.half_width,
            "ci95_high": p.mean + p.half_width,
        }
        for p in figure.points
    ]


def to_csv(figure: Figure) -> str:
    """Return the means and confidence intervals as CSV; `lambda` is empty where a method has none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(figure))
    return text.getvalue()


def to_json(figure: Figure) -> dict[str, Any]:
    """Return constants, seeds, versions, chosen lambdas with their tuning errors, and each seed's error."""
    settings = figure.settings
    return {
        "error": "||P~ - P||_F^2 / ||P||_F^2, the ratio of squared norms",
        "settings": asdict(settings),
        "reported_seeds": list(settings.reported),
        "tuning_seeds": list(settings.tuning),
        "versions": {
            "compressx": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "matplotlib")},
        },
        "chosen_lambda": [
            {
                "n": c.tokens,
                "rho": c.sparsity,
                "lambda": c.regularization,
                "tuning_errors": [{"lambda": value, "mean": error} for value, error in c.tuning_errors.items()],
            }
            for c in figure.choices
        ],
        "points": [row | {"errors": list(p.errors)} for row, p in zip(rows(figure), figure.points, strict=True)],
    }


def plot(figure: Figure, folder: Path) -> None:
    """Draw the three panels as `figure2.svg` and `figure2.png`, with 95% confidence bands."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    settings = figure.settings
    size, ratio = f"$n = {settings.tokens}$", rf"$\rho = {settings.sparsity:g}$"
    with mpl.rc_context():
        mpl.rcdefaults()  # ignore the user's style
        mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
        mpl.rcParams["svg.hashsalt"] = "figure2"  # reproducible ids
        canvas = Canvas(figsize=(11, 3.6), layout="constrained")
        FigureCanvasAgg(canvas)
        by_lambda, by_tokens, by_sparsity = canvas.subplots(1, 3)
        _panel(by_lambda, figure, "lambda")
        by_lambda.set(xscale="log", yscale="log", xlabel=r"$\lambda$", title=f"{size}, {ratio}")
        by_lambda.set_ylabel(r"$\|\tilde{P}-P\|_F^2\,/\,\|P\|_F^2$")
        _panel(by_tokens, figure, "n")
        by_tokens.set(xscale="log", yscale="log", xlabel="tokens $n$", title=rf"{ratio}, tuned $\lambda$")
        by_tokens.set_xticks(settings.token_counts, [str(n) for n in settings.token_counts])
        by_tokens.set_xticks([], minor=True)
        _panel(by_sparsity, figure, "rho")
        by_sparsity.set(yscale="log", xlabel=r"pruning ratio $\rho$", title=rf"{size}, tuned $\lambda$")
        canvas.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        canvas.savefig(folder / "figure2.svg", metadata={"Date": None})
        canvas.savefig(folder / "figure2.png", dpi=150)


def _panel(axes: Axes, figure: Figure, panel: Panel) -> None:
    """Draw each method of a panel; the baselines are horizontal lines against lambda."""
    for method in _METHODS:
        points = [p for p in figure.points if p.panel == panel and p.method == method]
        color, marker = _STYLES[method]
        if panel == "lambda" and method != OURS:
            x, points = [min(figure.settings.regularizations), max(figure.settings.regularizations)], points * 2
            marker = ""
        else:
            x = [_place(p) for p in points]
        means = [p.mean for p in points]
        # The axis is logarithmic: cut off intervals that reach zero.
        low = [max(p.mean - p.half_width, p.mean / 10) for p in points]
        axes.plot(x, means, color=color, marker=marker, markersize=4, label=method)
        axes.fill_between(x, low, [p.mean + p.half_width for p in points], color=color, alpha=0.15, linewidth=0)


def _place(point: Point) -> float:
    if point.panel == "n":
        return point.tokens
    if point.panel == "rho" or point.regularization is None:
        return point.sparsity
    return point.regularization


def to_markdown(figure: Figure, panel: Panel) -> str:
    """Return the means and half-widths of a panel over n or the pruning ratio as a Markdown table."""
    points = [p for p in figure.points if p.panel == panel]
    places = sorted({_place(p) for p in points})
    lines = [
        "| " + " | ".join(["method", *(f"{panel} = {x:g}" for x in places)]) + " |",
        "|---" * (len(places) + 1) + "|",
    ]
    for method in _METHODS:
        cells = {_place(p): f"{p.mean:.4f} ± {p.half_width:.4f}" for p in points if p.method == method}
        lines.append("| " + " | ".join([method, *(cells.get(x, "") for x in places)]) + " |")
    return "\n".join(lines)
