"""Perplexity after pruning, for every method and budget of compressx and llm-compressor on the same tokens.

    python benchmarks/quality.py --model HuggingFaceTB/SmolLM2-135M --output quality

Calibration and evaluation are a dataset's short name or a text file; the model is a hub id, a folder or a `.gguf` file.
Each row is measured in a new process and written immediately. A second run with the same settings resumes, within a row
after its last finished block if the code is unchanged. `--methods` and `--budgets` select rows. `best` uses
`recipes/best-*.yaml`. With `--minutes` or `--steps` every pruned model is trained as a whole in the same way, and each
method has two rows, before and after; both report the run's peak memory.
The ablation of `best` adds one component at a time: SparseGPT, ALPS, `attnprune + ALPS`, `+ sensitivity weights`,
`+ allocation`, and `best`, which adds block reconstruction. Rows with a plus are only measured if named. llm-compressor
is installed into `OUTPUT/llm-compressor` when needed, unless `--peer` names a Python that has it.

OUTPUT gets `quality.csv`, `quality.md`, `quality.svg`, the report of every row in `reports/` (for `compressx compare`),
and the state of an unfinished row in `unfinished/`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compressx.recipe.sources import Bos
from kept import same_settings, unfinished
from loaded import checkpoint, source
from methods import BUDGETS, INGREDIENTS, METHODS, applies, training
from quality_table import Table, column

ROOT = Path(__file__).parents[1]
PEER = "llm-compressor"
PEER_VERSION = "0.14.0.1"
PEERS = {f"{PEER} Wanda": "wanda", f"{PEER} SparseGPT": "sparsegpt"}


@dataclass(frozen=True)
class Settings:
    """What all rows have in common."""

    model: str
    calibration: str
    evaluation: dict[str, str]
    samples: int
    sequence_length: int
    windows: int
    dtype: str
    bos: Bos = "auto"
    training: dict[str, Any] | None = None
    learning_rate: float | None = None

    def recipe(self, output: Path, **sections: Any) -> dict[str, Any]:
        """Return a recipe that prunes and measures token perplexity."""
        calibration = sections.pop("calibration", {})  # what a method changes of it
        finetune = sections.pop("finetune", {})
        if self.learning_rate is not None:
            finetune = {**finetune, "learning_rate": self.learning_rate}
        return {
            "model": {**source(self.model), "dtype": self.dtype},
            "calibration": {
                "dataset": _dataset(self.calibration), "samples": self.samples,
                "sequence_length": self.sequence_length, "bos": self.bos, **calibration,
            },
            "evaluate": {"token_perplexity": {
                "datasets": {name: _dataset(text) for name, text in self.evaluation.items()}, "samples": self.windows,
                "sequence_length": self.sequence_length, "bos": self.bos,
            }},
            **({} if self.training is None else {"finetune": {**self.training, **finetune}}),
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
            **{column(name): measured[name]["token_perplexity"] for name in settings.evaluation},
            "sparsity": report["sparsity"],
            "seconds": seconds[stage],
            "gigabytes": (report["peak_gpu_memory_bytes"] or report["peak_memory_bytes"]) / 1e9,
        }
        for stage, measured in report["evaluation"].items()
        if stage != "dense"
    }


def by_peer(settings: Settings, method: str, budget: str, python: str, folder: Path) -> dict[str, float]:
    """Prune with llm-compressor on the calibration windows of compressx, and evaluate with compressx."""
    task = {
        **for_peer(settings, folder), "method": method,
        "sparsity": 0.5 if ":" in budget else int(budget.rstrip("%")) / 100,
        "pattern": budget if ":" in budget else None,
        "batch_size": 1, "output": str(folder / "pruned"), "result": str(folder / "result.json"),
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    _run([python, str(ROOT / "benchmarks" / "llm_compressor.py"), str(folder / "task.json")])
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    measured = dense(replace(settings, model=str(folder / "pruned")))
    return {**measured, "sparsity": result["sparsity"], "seconds": result["prune"], "gigabytes": result["memory"] / 1e9}


def for_peer(settings: Settings, folder: Path) -> dict[str, str]:
    """Write the dense model and the calibration windows for a program without compressx.

    Returns:
        Folder `model`, its `dtype`, and the JSON file `windows`.
    """
    from compressx.data.windows import read_calibration
    from compressx.models.loading import load_model, load_tokenizer
    from compressx.recipe.sources import DatasetSource, Draw

    found = checkpoint(settings.model, settings.dtype)
    tokenizer = load_tokenizer(found)
    source = DatasetSource(**_dataset(settings.calibration))
    draw = Draw(dataset=source, samples=settings.samples, sequence_length=settings.sequence_length, bos=settings.bos)
    model = load_model(found)  # saved as a folder, whatever its source
    drawn = read_calibration(draw, tokenizer, model=model)
    (folder / "windows.json").write_text(json.dumps(drawn.tolist()), encoding="utf-8")
    model.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    dtype = str(model.dtype).removeprefix("torch.")
    return {"model": str(folder / "dense"), "dtype": dtype, "windows": str(folder / "windows.json")}


def dense(settings: Settings) -> dict[str, float]:
    """Evaluate a model without pruning."""
    from compressx.data.documents import documents
    from compressx.data.windows import beginning, evaluation_windows, token_ids
    from compressx.evaluation.token_perplexity import token_perplexity
    from compressx.models.access import InMemory
    from compressx.models.loading import load_model, load_tokenizer
    from compressx.recipe.sources import DatasetSource

    found = checkpoint(settings.model, settings.dtype)
    tokenizer, model = load_tokenizer(found), InMemory(load_model(found).eval())
    measured = {"sparsity": 0.0, "seconds": 0.0, "gigabytes": 0.0}
    for name, text in settings.evaluation.items():
        ids, bos = token_ids(documents(DatasetSource(**_dataset(text)), "evaluation"), tokenizer), settings.bos
        first = beginning(tokenizer, bos, model.model)
        windows = evaluation_windows(ids, settings.windows, settings.sequence_length, bos=first)
        measured[column(name)] = token_perplexity(model, windows)
    return measured


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


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return (name, path) if equals else (Path(text).stem, text)


def _rows(method: str, settings: Settings) -> list[str]:
    """Return the rows that one run measures: the pruned model, and then the trained one."""
    return [method] if settings.training is None or method in PEERS else [method, f"{method}, trained"]


def _told(row: dict[str, float], settings: Settings) -> str:
    return ", ".join(f"{column(name)} {row[column(name)]:.2f}" for name in settings.evaluation)


def _training(given: argparse.Namespace) -> dict[str, Any] | None:
    """Return the recipe's `finetune` section, the same for all methods but for the learning rate of `best`."""
    if given.minutes is None and given.steps is None:
        return None
    section = {**training(), "minutes": given.minutes, "steps": given.steps}
    if given.training:
        section["datasets"] = [_dataset(text) for text in given.training]
        section |= {"samples": given.training_samples, "sequence_length": given.sequence_length, "bos": given.bos}
    return {key: value for key, value in section.items() if value is not None}


def main() -> None:
    """Measure the selected rows that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", default="wikitext")
    parser.add_argument("--evaluation", nargs="+", default=["wikitext"], metavar="NAME=TEXT",
                        help="texts to evaluate on, each by itself; the name may be left out")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=48, help="number of evaluation windows, from the start")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="float32")
    parser.add_argument("--bos", choices=("auto", "true", "false"), default="auto", help="as a recipe's bos")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *INGREDIENTS, *PEERS], default=[*METHODS, *PEERS])
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--minutes", type=float, help="train every pruned model as a whole, so long")
    parser.add_argument("--steps", type=int, help="the same, so many steps")
    parser.add_argument("--training", nargs="+", metavar="TEXT", help="texts to train on, in equal parts; the "
                        "calibration windows when absent")  # fmt: skip
    parser.add_argument("--training-samples", type=int, default=1024, help="windows drawn from --training")
    parser.add_argument("--learning-rate", type=float, help="of this training; by default best-50's, and of `best` "
                        "that of its recipe")  # fmt: skip
    parser.add_argument("--peer", help="Python of an environment with llm-compressor")
    given = parser.parse_args()
    settings = Settings(
        given.model,
        given.calibration,
        dict(_named(text) for text in given.evaluation),
        given.samples,
        given.sequence_length,
        given.windows,
        given.dtype,
        {"true": True, "false": False}.get(given.bos, given.bos),
        _training(given),
        given.learning_rate,
    )
    same_settings(given.output, asdict(settings))
    table = Table(given.output, list(settings.evaluation))
    if ("dense", "") not in table.rows:
        table.add("dense", "", dense(settings))
    wanted = [
        (m, b) for b in given.budgets for m in given.methods
        if applies(m, b) and any((row, b) not in table.rows for row in _rows(m, settings))
    ]  # fmt: skip
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
            rows = dict(zip(_rows(method, settings), stages.values(), strict=True))
        for row, figures in rows.items():
            table.add(row, budget, figures)
        shutil.rmtree(folder)
        print(
            f"[{number}/{len(wanted)}] {method}, {budget}: {_told([*rows.values()][-1], settings)} at "
            f"{rows[method]['sparsity']:.2%}, {time.perf_counter() - started:.0f} s", flush=True,
        )  # fmt: skip
    print(f"\n{table.markdown()}")


if __name__ == "__main__":
    main()
