"""Perplexity after pruning: every method at every budget, and llm-compressor's, on the same tokens.

    python benchmarks/quality.py --model HuggingFaceTB/SmolLM2-135M --output quality

Calibration and evaluation are a dataset's short name or a text file; the model a hub id, a folder or a `.gguf` file.
Rows are measured one at a time, each in a process of its own, and written at once: a second run with the same
settings goes on where the first one stopped, in the middle of a row after its last block if the code is the same.
`--methods` and `--budgets` choose rows. `best` is what `recipes/best-*.yaml` do, and `best, fine-tuned` the same with
`finetune` after it: one run measures both rows, so that the memory of both is the higher one. What `best` is made of,
one thing added at a time: SparseGPT, ALPS, `attnprune + ALPS`, `+ sensitivity weights`, `+ allocation`, `best`, which
adds block reconstruction; those with a plus are measured when they are named. llm-compressor is installed into
`OUTPUT/llm-compressor` when its rows are asked for, unless `--peer` names a Python that has it.

OUTPUT gets `quality.csv`, `quality.md` and `quality.svg`, in `reports/` a folder with the report of every row, as
`compressx compare` takes them, and in `unfinished/` what the row at work has so far.
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
    """Run a recipe, or go on with it, in a process of its own, and return the figures of each stage.

    Args:
        settings: of all rows.
        sections: of the recipe, those that are the row's own.
        folder: to work in.
        kept: where its reports are kept.
    """
    recipe, output = folder / "recipe.yaml", folder / "out"
    recipe.write_text(json.dumps(settings.recipe(output, **sections)), encoding="utf-8")
    _run([sys.executable, "-m", "compressx", "run", str(recipe), "--resume"])
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("report.json", "report.html"):
        shutil.copy(output / name, kept)
    spent = report["seconds"]
    seconds = {"finetuned": spent["total"] - spent["evaluate"]}
    seconds["pruned"] = seconds["finetuned"] - spent["finetune"]
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
    """Prune with llm-compressor on the windows that compressx draws, and measure as compressx does."""
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
    model = load_model(found)  # as a folder, whatever it came as
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
    told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    measured = dense(Settings(**{**asdict(settings), "model": str(folder / "pruned")}))
    return {**measured, "sparsity": told["sparsity"], "seconds": told["prune"], "gigabytes": told["memory"] / 1e9}


def dense(settings: Settings) -> dict[str, float]:
    """Measure a model as it is."""
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
    """Return the Python of an environment with llm-compressor, made when there is none."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing llm-compressor {PEER_VERSION} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        torch = next(
            x for x in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if x.startswith("torch==")
        )
        _run([str(python), "-m", "pip", "install", "--quiet", torch])  # first: a later resolution keeps this build
        _run([str(python), "-m", "pip", "install", "--quiet", torch, f"llmcompressor=={PEER_VERSION}"])
        (folder / "installed").touch()
    return str(python)


def _run(command: list[str]) -> None:
    # Standard error is the user's: progress on a terminal, and what went wrong.
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        sys.exit(f"{' '.join(command)} failed")


def _dataset(name: str) -> dict[str, str]:
    return {"text": name} if Path(name).exists() else {"name": name}


class Table:
    """The rows so far, on disk."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.path = folder, folder / "quality.csv"
        same_settings(folder, asdict(settings))
        self.rows: dict[tuple[str, str], dict[str, float]] = {}
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self.rows[row["method"], row["budget"]] = {k: float(row[k]) for k in COLUMNS[2:]}

    def add(self, method: str, budget: str, figures: dict[str, float]) -> None:
        """Write a row, and everything that shows it."""
        self.rows[method, budget] = {k: figures[k] for k in COLUMNS[2:]}
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([*key, *row.values()] for key, row in self.rows.items())
        (self.folder / "quality.md").write_text(self.markdown(), encoding="utf-8")
        self.draw(self.folder / "quality.svg")

    def markdown(self) -> str:
        """Return a line for each method: perplexities, and the share of SparseGPT's loss that it closes."""
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
        lines += ["", "In brackets the share of SparseGPT's distance from the dense model that is closed.", ""]
        return "\n".join(lines)

    def draw(self, path: Path) -> None:
        """Draw perplexity against unstructured sparsity, a line for each method, N:M as points beside them."""
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
    """Measure the rows that are asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", default="wikitext")
    parser.add_argument("--evaluation", default="wikitext")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=48, help="evaluation windows, the first so many")
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
    by_the_way = {(UNTUNED[m], b) for m, b in wanted if m in UNTUNED}
    wanted = [row for row in wanted if row not in by_the_way and applies(*row)]
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
