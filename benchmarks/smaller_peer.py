"""Perplexity of smaller dense models by torch-pruning, on the tokens on which compressx's are measured.

    python -m venv tp && tp/bin/pip install torch==2.13.0 transformers==5.23.0 torch-pruning==1.6.1
    python benchmarks/smaller_peer.py --peer tp/bin/python --model MODEL --calibration mixed.txt --evaluation a=test.txt

The peer drops a share of the feed-forward neurons of every block, as `pattern: neurons` does, in
`torch_pruning_peer.py`. Windows are drawn as by a recipe and evaluated as `token_perplexity`. OUTPUT gets
`smaller-peer.json` and `smaller-peer.md`; a second run with the same settings measures only what is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kept import same_settings
from quality import ROOT, Settings, dense, for_peer
from quality_table import column

IMPORTANCES = ("magnitude", "taylor", "activation")


def by_peer(settings: Settings, importance: str, sparsity: float, python: str, folder: Path) -> dict[str, float]:
    """Prune with torch-pruning in its own process, and evaluate with compressx.

    Returns:
        Perplexity by column, the parameters that are `gone`, and the `seconds` of pruning.
    """
    task = {
        "model": str(folder / "dense"), "windows": str(folder / "windows.json"), "importance": importance,
        "sparsity": sparsity, "output": str(folder / importance), "result": str(folder / f"{importance}.json"),
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    subprocess.run([python, str(ROOT / "benchmarks" / "torch_pruning_peer.py"), str(folder / "task.json")], check=True)
    result = json.loads((folder / f"{importance}.json").read_text(encoding="utf-8"))
    measured = dense(replace(settings, model=str(folder / importance)))
    return {**measured, "gone": result["gone"], "seconds": result["prune"]}


def markdown(rows: dict[str, dict[str, float]], texts: list[str]) -> str:
    """Return a table of perplexities, dense and by importance."""
    lines = [f"| | parameters gone | {' | '.join(texts)} | seconds |", f"|---|---:|{'---:|' * len(texts)}---:|"]
    for name, row in rows.items():
        cells = " | ".join(f"{row[column(text)]:.2f}" for text in texts)
        lines.append(f"| {name} | {row['gone']:.0f} | {cells} | {row['seconds']:.0f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure the dense model and every importance that is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--evaluation", nargs="+", required=True, metavar="NAME=TEXT")
    parser.add_argument("--output", type=Path, default=Path("smaller-peer"))
    parser.add_argument("--peer", required=True, help="Python of an environment with torch-pruning")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=12, help="number of evaluation windows, from the start")
    parser.add_argument("--sparsity", type=float, default=0.267, help="share of the neurons of each block")
    parser.add_argument("--importances", nargs="+", choices=IMPORTANCES, default=list(IMPORTANCES))
    given = parser.parse_args()
    texts = dict(text.split("=", 1) for text in given.evaluation)
    settings = Settings(
        given.model, given.calibration, texts, given.samples, given.sequence_length, given.windows, "float32"
    )
    same_settings(given.output, {**asdict(settings), "neurons": given.sparsity})
    kept = given.output / "smaller-peer.json"
    rows: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for name in ("dense", *given.importances):
        if name in rows:
            continue
        if name == "dense":
            for_peer(settings, given.output)
            rows[name] = {**dense(settings), "gone": 0}
        else:
            rows[name] = by_peer(settings, name, given.sparsity, given.peer, given.output)
        kept.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        (given.output / "smaller-peer.md").write_text(markdown(rows, list(texts)), encoding="utf-8")
    print(markdown(rows, list(texts)))


if __name__ == "__main__":
    main()
