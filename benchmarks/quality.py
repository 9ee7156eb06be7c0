"""Perplexity after pruning, for every method and budget of compressx and llm-compressor on the same tokens.

    python benchmarks/quality.py --model HuggingFaceTB/SmolLM2-135M --output quality

Calibration and evaluation are a dataset's short name or a text file; the model is a hub id, a folder or a `.gguf` file.
Each row is measured in a new process and written immediately. A second run with the same settings resumes, within a row
after its last finished block if the code is unchanged. `--methods` and `--budgets` select rows. `best` uses
`recipes/best-*.yaml`, and `best, fine-tuned` adds `finetune`: one run measures both, so both report its peak memory.
The ablation of `best` adds one component at a time: SparseGPT, ALPS, `attnprune + ALPS`, `+ sensitivity weights`,
`+ allocation`, and `best`, which adds block reconstruction. Rows with a plus are only measured if named. llm-compressor
is installed into `OUTPUT/llm-compressor` when needed, unless `--peer` names a Python that has it.

OUTPUT gets `quality.csv`, `quality.md`, `quality.svg`, the report of every row in `reports/` (for `compressx compare`),
and the state of an unfinished row in `unfinished/`.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressx.recipe.sources import Bos
from kept import same_settings, unfinished
from loaded import checkpoint, source
from methods import BUDGETS, INGREDIENTS, METHODS, UNTUNED, applies

ROOT = Path(__file__).parents[1]
PEER = "llm-compressor"
PEER_VERSION = "0.14.0.1"
PEERS = {f"{PEER} Wanda": "wanda", f"{PEER} SparseGPT": "sparsegpt"}
COLUMNS = ("method", "budget", "perplexity", "sparsity", "seconds", "gigabytes")


@dataclass(frozen=True)
class Settings:
    """What all rows have in common."""

    model: str
    calibration: str
    evaluation: str
    samples: int
    sequence_length: int
    windows: int
    dtype: str
    bos: Bos = "auto"

    def recipe(self, output: Path, **sections: Any) -> dict[str, Any]:
        """Return a recipe that prunes and measures token perplexity."""
        return {
            "model": {**source(self.model), "dtype": self.dtype},
            "calibration": {
                "dataset": _dataset(self.calibration), "samples": self.samples,
                "sequence_length": self.sequence_length, "bos": self.bos,
            },
            "evaluate": {"token_perplexity": {
                "dataset": _dataset(self.evaluation), "samples": self.windows,
                "sequence_length": self.sequence_length, "bos": self.bos,
            }},
            "output": str(output),
            **sections,
        }  # fmt: skip


def by_compressx(settings: Settings, sections: dict[str, Any], folder: Path, kept: Path) -> dict[str, dict[str, float]]:
    """Run or resume a recipe in a new process, and return the metrics of each stage.

    Args:
        settings: common to all rows.
        sections: the row's recipe sections.
        folder: working folder.
        kept: folder for the reports.
    """
    recipe, output = folder / "recipe.yaml", folder / "out"
    recipe.write_text(json.dumps(settings.recipe(output, **sections)), encoding="utf-8")
    _run([sys.executable, "-m", "compressx", "run", str(recipe), "--resume"])
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("report.json", "report.html"):
        shutil.copy(output / name, kept)
    spent = report["seconds"]
    seconds = {"finetuned": sum(x for name, x in spent.items() if name != "total" and not name.startswith("evaluate"))}
    seconds["pruned"] = seconds["finetuned"] - spent.get("finetune", 0.0)
    return {
        stage: {
            "perplexity": measured["token_perplexity"],
            "sparsity": report["sparsity"],
            "seconds": seconds[stage],
            "gigabytes": report["peak_memory_bytes"] / 1e9,
        }
        for stage, measured in report["evaluation"].items()
        if stage != "dense"
    }


def by_peer(settings: Settings, method: str, budget: str, python: str, folder: Path) -> dict[str, float]:
    """Prune with llm-compressor on the calibration windows of compressx, and evaluate with compressx."""
    from compressx.data.windows import read_calibration
    from compressx.models.loading import load_model, load_tokenizer
    from compressx.recipe.sources import DatasetSource

    found = checkpoint(settings.model, settings.dtype)
    tokenizer = load_tokenizer(found)
    drawn = read_calibration(
        DatasetSource(**_dataset(settings.calibration)), tokenizer, samples=settings.samples,
        sequence_length=settings.sequence_length, seed=0, bos=settings.bos,
    )  # fmt: skip
    (folder / "windows.json").write_text(json.dumps(drawn.tolist()), encoding="utf-8")
    model = load_model(found)  # saved as a folder, whatever its source
    model.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    dtype = str(model.dtype).removeprefix("torch.")
    del model
    task = {
        "model": str(folder / "dense"), "dtype": dtype, "method": method, "windows": str(folder / "windows.json"),
        "sparsity": 0.5 if ":" in budget else int(budget.rstrip("%")) / 100,
        "pattern": budget if ":" in budget else None,
        "batch_size": 1, "output": str(folder / "pruned"), "result": str(folder / "result.json"),
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    _run([python, str(ROOT / "benchmarks" / "llm_compressor.py"), str(folder / "task.json")])
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    measured = dense(Settings(**{**asdict(settings), "model": str(folder / "pruned")}))
    return {**measured, "sparsity": result["sparsity"], "seconds": result["prune"], "gigabytes": result["memory"] / 1e9}


def dense(settings: Settings) -> dict[str, float]:
    """Evaluate a model without pruning."""
    from compressx.data.documents import documents
    from compressx.data.windows import beginning, evaluation_windows, token_ids
    from compressx.evaluation.perplexity import token_perplexity
    from compressx.models.access import InMemory
    from compressx.models.loading import load_model, load_tokenizer
    from compressx.recipe.sources import DatasetSource

    found = checkpoint(settings.model, settings.dtype)
    text = documents(DatasetSource(**_dataset(settings.evaluation)), "evaluation")
    tokenizer = load_tokenizer(found)
    ids, bos = token_ids(text, tokenizer), beginning(tokenizer, settings.bos)
    windows = evaluation_windows(ids, settings.windows, settings.sequence_length, bos=bos)
    perplexity = token_perplexity(InMemory(load_model(found).eval()), windows)
    return {"perplexity": perplexity, "sparsity": 0.0, "seconds": 0.0, "gigabytes": 0.0}


def peer_python(folder: Path) -> str:
    """Return the Python of an environment with llm-compressor, creating it if needed."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing llm-compressor {PEER_VERSION} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        torch = next(
            x for x in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if x.startswith("torch==")
        )
        _run([str(python), "-m", "pip", "install", "--quiet", torch])  # first, so that the next step keeps this build
        _run([str(python), "-m", "pip", "install", "--quiet", torch, f"llmcompressor=={PEER_VERSION}"])
        (folder / "installed").touch()
    return str(python)


def _run(command: list[str]) -> None:
    # Standard error is inherited: progress and errors go to the terminal.
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        sys.exit(f"{' '.join(command)} failed")


def _dataset(name: str) -> dict[str, str]:
    return {"text": name} if Path(name).exists() else {"name": name}


class Table:
    """The measured rows, stored on disk."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.path = folder, folder / "quality.csv"
        same_settings(folder, asdict(settings))
        self.rows: dict[tuple[str, str], dict[str, float]] = {}
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self.rows[row["method"], row["budget"]] = {k: float(row[k]) for k in COLUMNS[2:]}

    def add(self, method: str, budget: str, figures: dict[str, float]) -> None:
        """Add a row, and rewrite CSV, Markdown and plot."""
        self.rows[method, budget] = {k: figures[k] for k in COLUMNS[2:]}
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([*key, *row.values()] for key, row in self.rows.items())
        (self.folder / "quality.md").write_text(self.markdown(), encoding="utf-8")
        self.draw(self.folder / "quality.svg")

    def markdown(self) -> str:
        """Return a table of perplexities by method, with the closed share of SparseGPT's gap to the dense model."""
        budgets = [b for b in BUDGETS if any(key[1] == b for key in self.rows)]
        methods = [m for m in dict.fromkeys(key[0] for key in self.rows) if m != "dense"]
        base = self.rows["dense", ""]["perplexity"]
        lines = [f"dense {base:.2f}", "", f"| | {' | '.join(budgets)} |", f"|---|{'---:|' * len(budgets)}"]
        for method in methods:
            cells = []
            for budget in budgets:
                row, peer = self.rows.get((method, budget)), self.rows.get(("SparseGPT", budget))
                closed = ""
                if row and peer and method != "SparseGPT":
                    left = peer["perplexity"] - base
                    closed = f" ({(peer['perplexity'] - row['perplexity']) / left:+.0%})"
                cells.append(f"{row['perplexity']:.2f}{closed}" if row else "")
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines += ["", "In brackets: the share of SparseGPT's gap to the dense model that is closed.", ""]
        return "\n".join(lines)

    def draw(self, path: Path) -> None:
        """Plot perplexity against unstructured sparsity, with a line per method and N:M as separate points."""
        import matplotlib as mpl

        mpl.use("svg")
        mpl.rcParams["svg.hashsalt"] = "quality"
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
        for method in dict.fromkeys(key[0] for key in self.rows if key[0] != "dense"):
            mine = {b: r["perplexity"] for (m, b), r in self.rows.items() if m == method}
            line = sorted((int(b.rstrip("%")), p) for b, p in mine.items() if ":" not in b)
            (drawn,) = axes.semilogy([x for x, _ in line], [y for _, y in line], marker="o", label=method)
            for place, budget in ((80, "2:4"), (85, "4:8")):
                if budget in mine:
                    axes.semilogy([place], [mine[budget]], marker="s", color=drawn.get_color())
        axes.axhline(self.rows["dense", ""]["perplexity"], color="black", linewidth=0.8, label="dense")
        axes.set_xticks([50, 60, 70, 80, 85], ["50%", "60%", "70%", "2:4", "4:8"])
        axes.set(xlabel="sparsity", ylabel="token perplexity")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Measure the selected rows that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", default="wikitext")
    parser.add_argument("--evaluation", default="wikitext")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=48, help="number of evaluation windows, from the start")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="float32")
    parser.add_argument("--bos", choices=("auto", "true", "false"), default="auto", help="as a recipe's bos")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *INGREDIENTS, *PEERS], default=[*METHODS, *PEERS])
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--peer", help="Python of an environment with llm-compressor")
    given = parser.parse_args()
    settings = Settings(
        given.model,
        given.calibration,
        given.evaluation,
        given.samples,
        given.sequence_length,
        given.windows,
        given.dtype,
        {"true": True, "false": False}.get(given.bos, given.bos),
    )
    table = Table(given.output, settings)
    if ("dense", "") not in table.rows:
        table.add("dense", "", dense(settings))
    wanted = [(m, b) for b in given.budgets for m in given.methods if (m, b) not in table.rows]
    measured_along = {(UNTUNED[m], b) for m, b in wanted if m in UNTUNED}
    wanted = [row for row in wanted if row not in measured_along and applies(*row)]
    for number, (method, budget) in enumerate(wanted, start=1):
        started = time.perf_counter()
        rows: dict[str, dict[str, float]] = {}
        name = re.sub(r"[^\w]+", "-", f"{method} {budget}").strip("-")
        folder = unfinished(given.output, name)
        if method in PEERS:
            python = given.peer or peer_python(given.output / PEER)
            rows[method] = by_peer(settings, PEERS[method], budget, python, folder)
        else:
            sections = {**METHODS, **INGREDIENTS}[method](budget)
            stages = by_compressx(settings, sections, folder, given.output / "reports" / name)
            rows = {UNTUNED.get(method, method): stages["pruned"]}
            if "finetuned" in stages:
                rows[method] = stages["finetuned"]
        for row, figures in rows.items():
            table.add(row, budget, figures)
        shutil.rmtree(folder)
        print(
            f"[{number}/{len(wanted)}] {method}, {budget}: perplexity {rows[method]['perplexity']:.2f} at "
            f"{rows[method]['sparsity']:.2%}, {time.perf_counter() - started:.0f} s", flush=True,
        )  # fmt: skip
    print(f"\n{table.markdown()}")


if __name__ == "__main__":
    main()
