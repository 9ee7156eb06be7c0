"""The measured rows of quality.py: CSV, Markdown and a plot, rewritten with every row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from methods import BUDGETS

OTHERS = ("sparsity", "seconds", "gigabytes")
"""Figures of a row beside the perplexity on each text."""
PLACES = {"50%": 50, "60%": 60, "70%": 70, "80%": 80, "2:4": 90, "4:8": 95}
"""Where a budget is on the plot: N:M to the right of all percentages."""


def column(text: str) -> str:
    """Return the name of the column with the perplexity on a text."""
    return f"perplexity {text}"


class Table:
    """The measured rows, stored on disk.

    Args:
        folder: where the files are.
        texts: names of the texts that perplexity is measured on.
    """

    def __init__(self, folder: Path, texts: Sequence[str]) -> None:
        self.folder, self.path, self.columns = folder, folder / "quality.csv", (*map(column, texts), *OTHERS)
        self.rows: dict[tuple[str, str], dict[str, float]] = {}
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self.rows[row["method"], row["budget"]] = {k: float(row[k]) for k in self.columns}

    def add(self, method: str, budget: str, figures: dict[str, float]) -> None:
        """Add a row, and rewrite CSV, Markdown and plot."""
        self.rows[method, budget] = {k: figures[k] for k in self.columns}
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["method", "budget", *self.columns])
            writer.writerows([*key, *row.values()] for key, row in self.rows.items())
        (self.folder / "quality.md").write_text(self.markdown(), encoding="utf-8")
        self.draw(self.folder / "quality.svg")

    def markdown(self) -> str:
        """Return a table for each text: perplexities by method, with the closed share of SparseGPT's gap to dense."""
        parts = [self._of_text(name) for name in self.columns if name not in OTHERS]
        return "\n\n".join([*parts, "In brackets: the share of SparseGPT's gap to the dense model that is closed.\n"])

    def _of_text(self, name: str) -> str:
        budgets = [b for b in BUDGETS if any(key[1] == b for key in self.rows)]
        methods = [m for m in dict.fromkeys(key[0] for key in self.rows) if m != "dense"]
        base = self.rows["dense", ""][name]
        lines = [f"{name}, dense {base:.2f}", "", f"| | {' | '.join(budgets)} |", f"|---|{'---:|' * len(budgets)}"]
        for method in methods:
            cells = []
            for budget in budgets:
                row, peer = self.rows.get((method, budget)), self.rows.get(("SparseGPT", budget))
                closed = ""
                if row and peer and method != "SparseGPT":
                    closed = f" ({(peer[name] - row[name]) / (peer[name] - base):+.0%})"
                cells.append(f"{row[name]:.2f}{closed}" if row else "")
            lines.append(f"| {method} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def draw(self, path: Path) -> None:
        """Plot perplexity on the first text against sparsity, with a line per method and N:M as separate points."""
        import matplotlib as mpl

        mpl.use("svg")
        mpl.rcParams["svg.hashsalt"] = "quality"
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
        for method in dict.fromkeys(key[0] for key in self.rows if key[0] != "dense"):
            mine = {b: r[self.columns[0]] for (m, b), r in self.rows.items() if m == method}
            line = sorted((PLACES[b], p) for b, p in mine.items() if ":" not in b)
            (drawn,) = axes.semilogy([x for x, _ in line], [y for _, y in line], marker="o", label=method)
            for budget, perplexity in mine.items():
                if ":" in budget:
                    axes.semilogy([PLACES[budget]], [perplexity], marker="s", color=drawn.get_color())
        axes.axhline(self.rows["dense", ""][self.columns[0]], color="black", linewidth=0.8, label="dense")
        axes.set_xticks([*PLACES.values()], [*PLACES])
        axes.set(xlabel="sparsity", ylabel="token perplexity")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
