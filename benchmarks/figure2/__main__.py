"""Draw Figure 2 of Attention Weights Pruning: attention error against lambda, n and the pruning ratio.

    python benchmarks/figure2 --output figure2
    python benchmarks/figure2 --output look --quick

The first takes under two minutes on one core, the second ten seconds. Writes `figure2.csv`, `figure2.json`,
`figure2.svg` and `figure2.png` into a new folder, and prints two tables. The paper does not give its constants; each of
those used here is an option, and is recorded in `figure2.json`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from experiment import QUICK, Settings, measure
from output import to_markdown, write


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    """Run the experiment and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="new or empty folder to write")
    parser.add_argument("--quick", action="store_true", help="smaller constants that take seconds")
    parser.add_argument("--threads", type=int, default=1, help="more do not speed up matrices of a few hundred tokens")
    for field in fields(Settings):
        usual, quick = (getattr(s, field.name) for s in (Settings(), QUICK))
        kind: Any = type(usual)
        if kind is tuple:
            kind = _whole_numbers if isinstance(usual[0], int) else _numbers
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"{usual}; quick: {quick}")
    given = vars(parser.parse_args())
    output, quick, threads = (given.pop(name) for name in ("output", "quick", "threads"))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        parser.error(f"output {output} exists and is not an empty folder; name a new one")
    torch.set_num_threads(threads)
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {line}", file=sys.stderr)

    try:
        chosen = {name: value for name, value in given.items() if value is not None}
        figure = measure(replace(QUICK if quick else Settings(), **chosen), log)
    except ValueError as error:
        parser.error(str(error))
    output.mkdir(parents=True, exist_ok=True)
    write(figure, output)
    log(f"wrote {output}")
    print(to_markdown(figure, "n") + "\n\n" + to_markdown(figure, "rho"))


if __name__ == "__main__":
    main()
