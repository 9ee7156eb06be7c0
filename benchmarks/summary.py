"""Draw the summary that a run prints, from its report: `docs/summary.svg`.

make quickstart
.venv/bin/python benchmarks/summary.py runs/quickstart docs/summary.svg
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console

from compressx.cli import terminal
from compressx.pipeline.stages import sections
from compressx.report.compare import read_report


def draw(run: Path, width: int = 100) -> str:
    """Return the summary of a run as SVG, as a terminal of `width` columns shows it."""
    report = read_report(run)
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    terminal.show(*sections(report), console=console)
    console.print(f"written to {run}", markup=False)
    return console.export_svg(title=report.command, unique_id="summary")


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="output folder of a run")
    parser.add_argument("picture", type=Path, help="the `.svg` file")
    given = parser.parse_args()
    given.picture.write_text(draw(given.run) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
