"""What a user weighs: bytes, tokens a second in llama.cpp and perplexity, of models in several GGUF types.

    python benchmarks/smaller_files.py --models dense=MODEL.gguf shrunk=runs/shrunk --texts docs=test.txt --output new

Each model is exported in each type, evaluated from its file, and timed in turn with the others; the first model in the
first type is what ratios of speed are to. `smaller.csv` gets a row for each file, `smaller.md` the table, `smaller.svg`
the plot: perplexity on the first text against bytes and against decode speed, with the front, the files that no other
file beats in both. What is there already is not done again.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from compressx.cli import cli
from compressx.evaluation.bench import Speeds

COLUMNS = ("model", "type", "bytes", "prefill", "decode", "times prefill", "times decode")
_MARKERS = "os^Dv*PX"
Row = dict[str, Any]


def compressx(*arguments: object) -> str:
    """Run a command in this process, and return what it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        cli.main([*map(str, arguments)], standalone_mode=False)
    return printed.getvalue()


def exported(
    models: Mapping[str, str], types: Sequence[str], like: str | None, folder: Path
) -> dict[tuple[str, str], Path]:
    """Write each model in each type; return the files."""
    files, more = {}, ("--like", like) if like else ()
    for name, model in models.items():
        for kind in types:
            file = files[name, kind] = folder / f"{name}-{kind}.gguf"
            if not file.exists():
                compressx("export", model, "--format", "gguf", "--type", kind, "-o", file, *more)
    return files


def perplexities(file: Path, texts: Mapping[str, str], samples: int, length: int) -> dict[str, float]:
    """Return the token perplexity on the first windows of each text, of a file as it is written; kept beside it."""
    kept = file.with_suffix(".json")
    if not kept.exists():
        datasets = {name: {"text": text} for name, text in texts.items()}
        asked = {"token_perplexity": {"datasets": datasets, "samples": samples, "sequence_length": length}}
        kept.write_text(compressx("eval", file, "--json", "--set", f"evaluate={json.dumps(asked)}"))
    found = json.loads(kept.read_text("utf-8"))
    return {name: float(found[name]["token_perplexity"]) for name in texts}


def speeds(files: Sequence[Path], *asked: object) -> list[dict[str, float]]:
    """Time all files in turn; ratios are medians of those within a round."""
    found = Speeds(**json.loads(compressx("bench", *files, "--json", *asked)))
    return [
        {stage: found.rate(i, stage).median for stage in found.tokens}
        | {f"times {stage}": found.ratio(i, stage).median for stage in found.tokens}
        for i in range(len(files))
    ]


def front(rows: Sequence[Row], cost: str, *, higher: bool, text: str) -> list[Row]:
    """Return the rows that no other row beats, in what they cost and in perplexity, in the order of the cost."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda r: (-r[cost] if higher else r[cost], r[text])):
        if not best or row[text] < best[-1][text]:
            best.append(row)
    return best


def draw(path: Path, rows: Sequence[Row], text: str) -> None:
    """Plot perplexity against bytes, and against decode speed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "compressx"
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    names, kinds = ([*dict.fromkeys(row[key] for row in rows)] for key in ("model", "type"))
    panels = (("bytes", "file, MB", False, 1e6), ("decode", "decode in llama.cpp, tokens/s", True, 1.0))
    for ax, (cost, label, higher, unit) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        for row in rows:
            look = {"marker": _MARKERS[names.index(row["model"])], "color": f"C{kinds.index(row['type'])}"}
            ax.plot(row[cost] / unit, row[text], linestyle="none", **look)
        line = front(rows, cost, higher=higher, text=text)
        ax.plot([r[cost] / unit for r in line], [r[text] for r in line], color="0.5", linewidth=1, zorder=0)
        ax.set(xlabel=label, yscale="log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.grid(visible=True, which="both", color="0.9")
    figure.axes[0].set_ylabel(f"perplexity, {text}")
    for i, name in enumerate(names):
        figure.axes[0].plot([], [], linestyle="none", color="0.3", marker=_MARKERS[i], label=name)
    for i, kind in enumerate(kinds):
        figure.axes[0].plot([], [], linestyle="none", marker="s", color=f"C{i}", label=kind)
    figure.axes[0].plot([], [], color="0.5", linewidth=1, label="front")
    figure.legend(loc="outside lower center", ncols=len(names) + len(kinds) + 1, fontsize="small", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def markdown(rows: Sequence[Row], texts: Sequence[str]) -> str:
    """Return the table; the worst ratio is to the first row, over all texts."""
    first, (text, *_) = rows[0], texts
    bold = {(r["model"], r["type"]) for cost, up in (("bytes", False), ("decode", True))
            for r in front(rows, cost, higher=up, text=text)}  # fmt: skip
    head = ["model", "type", "MB", "prefill, tokens/s", "x", "decode, tokens/s", "x", text, "worst ratio"]
    lines = [f"| {' | '.join(head)} |", f"|---|---|{'---:|' * (len(head) - 2)}"]
    for row in rows:
        worst = max(row[t] / first[t] for t in texts)
        cells = [row["model"], row["type"], f"{row['bytes'] / 1e6:.1f}", f"{row['prefill']:.0f}",
                 f"{row['times prefill']:.2f}", f"{row['decode']:.0f}", f"{row['times decode']:.2f}",
                 f"{row[text]:.2f}", f"{worst:.2f}"]  # fmt: skip
        on_front = (row["model"], row["type"]) in bold
        lines.append(f"| {' | '.join(f'**{c}**' if on_front else c for c in cells)} |")
    return "\n".join([*lines, "", "Bold: on the front of bytes, or of decode speed.", ""])


def pairs(words: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE words."""
    return dict(word.split("=", 1) for word in words)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=MODEL", help="the dense one first")
    parser.add_argument("--types", nargs="+", default=["F16", "Q8_0", "Q4_0"])
    parser.add_argument("--files", nargs="*", default=[], metavar="NAME=FILE", help="GGUF files as they are, too")
    parser.add_argument("--like", help="GGUF file of the dense model, where a model's run does not name it")
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--samples", type=int, default=16, help="windows of each text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    texts = pairs(given.texts)
    files = exported(pairs(given.models), given.types, given.like, given.output)
    files |= {(name, "as it is"): Path(file) for name, file in pairs(given.files).items()}
    lengths = ("--prompt-tokens", given.prompt_tokens, "--new-tokens", given.new_tokens)
    timed = speeds([*files.values()], *lengths, "--rounds", given.rounds, "--threads", given.threads)
    rows: list[Row] = []
    for ((name, kind), file), speed in zip(files.items(), timed, strict=True):
        beside = given.output / f"{name}-{kind.replace(' ', '-')}.gguf"
        measured = perplexities(file if beside == file else _linked(file, beside), texts, given.samples, given.length)
        rows.append({"model": name, "type": kind, "bytes": file.stat().st_size, **speed, **measured})
    with (given.output / "smaller.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*COLUMNS, *texts])
        writer.writeheader()
        writer.writerows(rows)
    (given.output / "smaller.md").write_text(markdown(rows, [*texts]), encoding="utf-8")
    draw(given.output / "smaller.svg", rows, next(iter(texts)))
    print((given.output / "smaller.md").read_text("utf-8"))


def _linked(file: Path, beside: Path) -> Path:
    if not beside.exists():
        beside.symlink_to(file.absolute())
    return beside


if __name__ == "__main__":
    main()
