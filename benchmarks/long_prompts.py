"""Long prompts of which a model reads an eighth: right answers, seconds to the first token, memory; beside kvpress.

    python benchmarks/long_prompts.py --model MODEL.gguf --text test.txt --output long-prompts

Sentences are hidden in a text, as in a recipe's `evaluate.needle`; every method gets the same prompts, one after the
other, in a process of its own. `full` reads the whole prompt. kvpress is installed into `OUTPUT/kvpress` when needed,
unless `--peer` names a Python that has it; its methods read the whole prompt and keep an eighth of the keys and values.

OUTPUT gets `long-prompts.csv`, `.md` and `.svg`, and `answers/`, what each method wrote. A second run
with the same settings measures only the methods that are missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kept import same_settings
from loaded import checkpoint

ROOT = Path(__file__).parents[1]
PEER_VERSION = "0.5.5"
SELECTORS = ("retrieval-heads", "gemfilter", "snapkv", "recent", "random")
PRESSES = {"kvpress SnapKV": "SnapKVPress", "kvpress StreamingLLM": "StreamingLLMPress"}
METHODS = ("full", *SELECTORS, *PRESSES)


def prompts(given: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """Return the grid of prompts."""
    from compressx.evaluation.needle import NeedleGrid, grid_prompts
    from compressx.prompts.templates import text_ids

    settings = NeedleGrid.model_validate(
        {"dataset": {"text": given.text}, "lengths": given.lengths, "depths": given.depths, "needles": given.needles}
    )
    return list(grid_prompts(tokenizer, text_ids(tokenizer, Path(given.text).read_text(encoding="utf-8")), settings))


class Watched:
    """A selection that remembers the positions that it selected last."""

    def __init__(self, selection: Any) -> None:
        self.selection, self.rows = selection, selection.rows
        self.last: Any = None

    def positions(self, ids: Any, protected: Any) -> Any:
        """Select, and remember."""
        self.last = self.selection.positions(ids, protected)
        return self.last


def by_compressx(given: argparse.Namespace, method: str) -> list[dict[str, Any]]:
    """Answer every prompt with a token selector, or with the whole prompt."""
    from compressx import load_plugins
    from compressx.api.selector import share_kept
    from compressx.models.access import InMemory
    from compressx.models.loading import load_model, load_tokenizer
    from compressx.prompts.answer import answer
    from compressx.prompts.selection import SelectorSettings
    from compressx.recipe.sections import SelectTokens
    from llm_compressor import trimmed

    found = checkpoint(given.model, given.dtype)
    tokenizer, model = load_tokenizer(found), load_model(found)
    selection: Any = None
    if method != "full":
        settings = SelectTokens.model_validate({"selector": method, "keep": given.keep})
        selection = Watched(SelectorSettings(settings, load_plugins()).prepare(InMemory(model), tokenizer))
    asked, rows = prompts(given, tokenizer), []
    for number, x in enumerate([asked[0], *asked]):  # the first is answered twice, to warm up
        base = trimmed()
        told = answer(model, tokenizer, x.ids, x.protected, given.tokens, selection)
        kept = None if selection is None else share_kept(x.places, selection.last)
        rows.append({
            "length": len(x.ids), "depth": x.depth, "text": told.text, "read": told.kept_tokens, "kept": kept,
            "right": x.answer.lower() in told.text.lower(),
            "seconds": told.seconds["select"] + told.seconds["prefill"], "select": told.seconds["select"],
            "memory": max(told.peak_memory_bytes.values()) - base,
            "reason": told.reason,
        })  # fmt: skip
        print(f"{method}: {number} of {len(asked)}", flush=True)
    return rows[1:]


def by_kvpress(given: argparse.Namespace, method: str, python: str, folder: Path) -> list[dict[str, Any]]:
    """Answer every prompt with a press of kvpress."""
    from compressx.models.generate import readable
    from compressx.models.loading import load_model, load_tokenizer
    from compressx.models.shards import save_model

    found = checkpoint(given.model, given.dtype)
    tokenizer, saved = load_tokenizer(found), folder / "model"
    if not saved.exists():
        save_model(load_model(found), tokenizer, saved)
    asked = prompts(given, tokenizer)
    (folder / "prompts.json").write_text(json.dumps([x.ids.tolist() for x in [asked[0], *asked]]))
    task = {
        "model": str(saved), "dtype": given.dtype, "press": PRESSES[method], "keep": given.keep,
        "tokens": given.tokens, "prompts": str(folder / "prompts.json"), "result": str(folder / "result.json"),
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(task))
    subprocess.run([python, str(ROOT / "benchmarks" / "kvpress_peer.py"), str(folder / "task.json")], check=True)
    rows = []
    for x, told in zip(asked, json.loads((folder / "result.json").read_text())[1:], strict=True):
        text = readable(tokenizer, told["written"])
        rows.append({
            "length": len(x.ids), "depth": x.depth, "text": text, "read": len(x.ids), "kept": None,
            "right": x.answer.lower() in text.lower(), "seconds": told["seconds"], "select": None,
            "memory": told["memory"], "reason": f"{told['cached']} keys and values in the cache",
        })  # fmt: skip
    return rows


def peer_python(folder: Path) -> str:
    """Return the Python of an environment with kvpress, creating it if needed."""
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
        torch = next(x for x in pinned if x.startswith("torch=="))
        install = [str(python), "-m", "pip", "install", "--quiet", torch]
        subprocess.run(install, check=True)  # first, so that the next step keeps this build
        subprocess.run([*install, f"kvpress=={PEER_VERSION}"], check=True)
        (folder / "installed").touch()
    return str(python)


def table(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each method and length that was measured."""
    rows = []
    for method in METHODS:
        path = folder / "answers" / f"{method}.json"
        told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        for length in dict.fromkeys(x["length"] for x in told):
            some = [x for x in told if x["length"] == length]
            kept = [x["kept"] for x in some if x["kept"] is not None]
            rows.append({
                "method": method, "tokens": length, "prompts": len(some),
                "answered": statistics.mean(float(x["right"]) for x in some),
                "needle kept": statistics.mean(kept) if kept else None,
                "seconds to the first token": statistics.median(x["seconds"] for x in some),
                "memory above the model, GB": max(x["memory"] for x in some) / 1e9,
                "how": some[0]["reason"],
            })  # fmt: skip
    return rows


def write(folder: Path) -> str:
    """Write the table as CSV and Markdown, and return the latter."""
    rows = table(folder)
    with (folder / "long-prompts.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    shown = [name for name in rows[0] if name != "how"]
    lines = [f"| {' | '.join(shown)} |", f"|---|{'---:|' * (len(shown) - 1)}"]
    for row in rows:
        cells = ["" if (v := row[n]) is None else f"{v:.2f}" if isinstance(v, float) else str(v) for n in shown]
        lines.append(f"| {' | '.join(cells)} |")
    how = {row["method"]: row["how"] for row in rows if row["how"]}
    text = "\n".join([*lines, "", *(f"- {method}: {told}" for method, told in how.items())]) + "\n"
    (folder / "long-prompts.md").write_text(text, encoding="utf-8")
    return text


def draw(folder: Path, methods: Sequence[str] = ("full", "retrieval-heads", "gemfilter", "kvpress SnapKV")) -> None:
    """Draw the share of right answers by length and depth, a grid for each method that was measured."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    paths = {m: path for m in methods if (path := folder / "answers" / f"{m}.json").exists()}
    told = {m: json.loads(path.read_text(encoding="utf-8")) for m, path in paths.items()}
    if not told:
        return
    with mpl.rc_context({"svg.hashsalt": "long-prompts", "font.size": 9}):
        figure = Figure(figsize=(2.1 * len(told) + 0.8, 2.4), layout="constrained")
        for axes, (method, rows) in zip(figure.subplots(1, len(told), squeeze=False)[0], told.items(), strict=True):
            lengths, depths = ([*dict.fromkeys(row[key] for row in rows)] for key in ("length", "depth"))
            cells = [
                [
                    statistics.mean(float(r["right"]) for r in rows if (r["length"], r["depth"]) == (length, depth))
                    for length in lengths
                ]
                for depth in depths
            ]
            image = axes.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
            axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
            axes.set(title=method, xlabel="tokens of the prompt")
            for i, row in enumerate(cells):
                for j, cell in enumerate(row):
                    axes.text(j, i, f"{cell:.0%}", ha="center", va="center", color="white" if cell < 0.6 else "black")
        figure.axes[0].set_ylabel("depth of the sentence")
        figure.colorbar(image, ax=figure.axes, label="right answers")
        figure.savefig(folder / "long-prompts.svg", metadata={"Date": None})


def main() -> None:
    """Measure the methods that are not done yet, each in a new process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, help="file to hide sentences in")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--depths", type=int, default=4)
    parser.add_argument("--needles", type=int, default=5)
    parser.add_argument("--keep", type=float, default=0.125)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--peer", help="Python of an environment with kvpress")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # a method to measure in this process
    given = parser.parse_args()
    if given.here:
        (given.output / "answers" / f"{given.here}.json").write_text(json.dumps(by_compressx(given, given.here)))
        return
    ignored = {"output", "methods", "peer", "here"}
    same_settings(given.output, {k: v for k, v in vars(given).items() if k not in ignored})
    (given.output / "answers").mkdir(parents=True, exist_ok=True)
    for method in given.methods:
        if (given.output / "answers" / f"{method}.json").exists():
            continue
        if method in PRESSES:
            python = given.peer or peer_python(given.output / "kvpress")
            told = by_kvpress(given, method, python, given.output)
            (given.output / "answers" / f"{method}.json").write_text(json.dumps(told))
        else:
            subprocess.run([sys.executable, *sys.argv, "--here", method], check=True)
        write(given.output)
    draw(given.output)
    print(write(given.output))


if __name__ == "__main__":
    main()
