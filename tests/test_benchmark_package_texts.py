"""The splits of benchmarks/package_texts.py: no document, and no run of words, is in two of them."""

from __future__ import annotations

import random
import sys

import pytest

import package_texts as texts


def documents(count: int, words: int = 600, seed: int = 0) -> list[tuple[str, str]]:
    """Return documents of random words, with paragraphs."""
    draw = random.Random(seed)  # noqa: S311 - text for a test
    return [
        (f"{seed}-{i}", " ".join(f"word{draw.randrange(10**6)}" + "\n" * (n % 50 == 49) for n in range(words)))
        for i in range(count)
    ]


def test_splits_share_no_run_of_words_with_each_other_or_with_a_given_text() -> None:
    mine = documents(60)
    evaluation, copied = mine[0][1], " ".join(mine[1][1].split()[100:120])
    mine[2] = ("quoting", f"{mine[2][1]} {copied}")
    parts = texts.split_documents(iter(mine), texts.runs_of_words(evaluation))
    assert evaluation[:500] not in "".join(parts.values())
    runs = {split: texts.runs_of_words(text) for split, text in parts.items()}
    assert all(runs.values())
    assert not runs["valid"] & runs["test"]
    assert not runs["train"] & (runs["valid"] | runs["test"])


def test_a_package_with_other_content_is_refused() -> None:
    write = (sys.executable, "-c", "open('x.whl', 'w').write('other')")
    package = texts.Package("code", write, "0" * 64, lambda _: iter(()), ("", "", ""))
    with pytest.raises(SystemExit, match=r"code: x\.whl has sha256 \w{64}; expected 0{64}"):
        texts.fetched(package)
    failing = texts.Package(
        "code", (sys.executable, "-c", "raise SystemExit(1)"), "0" * 64, lambda _: iter(()), ("",) * 3
    )
    with pytest.raises(SystemExit, match=r"code: .* failed"):
        texts.fetched(failing)
