"""Make the texts of docs/results.md from WikiText-2: `valid.txt` for calibration, `test.txt` for evaluation.

    python benchmarks/texts.py --output texts

Both come from the hub's `Salesforce/wikitext`. `test.txt` is the test split of `wikitext-2-raw-v1`, with rows joined
by blank lines, as recipes evaluate with `dataset: wikitext`. `valid.txt` is the validation split of `wikitext-2-v1`,
where rare words are `<unk>`, without the sentences that contain one. The sha256 of each file is printed with that of
the text used for the results; the exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compressx.data.documents import texts
from compressx.recipe.sources import DatasetSource


def joined(rows: Sequence[str]) -> str:
    """Return rows joined by blank lines, as is customary for perplexity."""
    return "\n\n".join(rows)


def without_unknown_words(rows: Sequence[str]) -> str:
    """Return the sentences without `<unk>` of each row as a line, with consecutive blank lines merged.

    A sentence ends with a `.`, `?` or `!` token, which WikiText separates by spaces.
    """
    lines: list[str] = []
    for row in rows:
        sentences = re.split(r"(?<= [.?!]) ", row.strip())
        known = " ".join(s for s in sentences if "<unk>" not in s)
        if known:
            lines.append(f" {known} \n")
        elif not row.strip() and lines[-1:] != ["\n"]:
            lines.append("\n")
    return "".join(lines)


@dataclass(frozen=True)
class Text:
    """A file, the source of its text, and the expected sha256."""

    name: str
    config: str
    split: str
    made: Callable[[Sequence[str]], str]
    sha256: str


TEXTS = (
    Text(
        "valid.txt", "wikitext-2-v1", "validation", without_unknown_words,
        "f729af873d32ff4d3562082a30bb36fb146dd7325523559ccbcf711c69e9637c",
    ),
    Text(
        "test.txt", "wikitext-2-raw-v1", "test", joined,
        "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83",
    ),
)  # fmt: skip


def write(text: Text, dataset: str, folder: Path) -> bool:
    """Write a text and print its sha256; return whether it is the expected one."""
    rows = texts(DatasetSource(name=dataset, config=text.config, split=text.split), "evaluation")
    data = text.made(rows).encode()
    (folder / text.name).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    print(f"{folder / text.name}: {len(rows)} rows, {len(data)} bytes\n  sha256   {digest}\n  expected {text.sha256}")
    return digest == text.sha256


def main() -> None:
    """Write both texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--dataset", default="Salesforce/wikitext", help="hub id, or a folder with the same dataset")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    other = [text.name for text in TEXTS if not write(text, given.dataset, given.output)]
    if other:
        sys.exit(f"{' and '.join(other)}: not the text of docs/results.md; results will differ")


if __name__ == "__main__":
    main()
