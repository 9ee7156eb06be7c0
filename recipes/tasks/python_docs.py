"""The questions of `python_docs.yaml`, made from the documentation that every Python has in `pydoc_data`.

A paragraph is cut into pieces of 24 words. The first 16 are the passage; the other 8 are its ending. The three wrong
endings are those of pieces of other pages. All have equally many words, so none is likely for being short.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from compressx.data.documents import as_dataset, texts
from compressx.recipe.sources import DatasetSource

PASSAGE, ENDING = 16, 8


def questions(**_: Any) -> dict[str, Any]:
    """Return both splits: questions from the pages on which compressx evaluates, and examples from the others."""
    docs = DatasetSource(name="python-docs")
    test, examples = _asked(texts(docs, "evaluation")), _asked(texts(docs, "calibration"))
    return {"test": as_dataset(test), "examples": as_dataset(examples)}


def _asked(pages: list[str]) -> list[dict[str, Any]]:
    """Ask about every piece of every page, in an order that is drawn once, so that a `limit` takes from all pages."""
    draw = random.Random(0)  # noqa: S311 - questions, no secret
    pieces = [(number, *piece) for number, page in enumerate(pages) for piece in _pieces(page)]
    rows = []
    for number, passage, ending in draw.sample(pieces, len(pieces)):
        others = draw.sample([other for page, _, other in pieces if page != number], 3)
        answer = draw.randrange(4)
        rows.append({"passage": passage, "endings": [*others[:answer], ending, *others[answer:]], "answer": answer})
    return rows


def _pieces(page: str) -> Iterator[tuple[str, str]]:
    """Yield passages and their endings from the paragraphs of a page that are prose: not indented, as code is."""
    for paragraph in page.split("\n\n"):
        words = paragraph.split()
        if not paragraph[:1].isupper():
            continue
        for start in range(0, len(words) - PASSAGE - ENDING + 1, PASSAGE + ENDING):
            yield " ".join(words[start : start + PASSAGE]), " ".join(words[start + PASSAGE : start + PASSAGE + ENDING])
