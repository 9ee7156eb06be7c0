"""`dataset: prompts`: what is written, from which words, and what a reader can know without the context."""

from __future__ import annotations

import hashlib
import re
import runpy
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path
from random import Random

import pytest

from compressx.data.documents import documents as read_documents
from compressx.data.prompts import CALIBRATION, EVALUATION, _facts, _lookup, _rule, documents, requests
from compressx.data.windows import token_ids
from compressx.prompts.needles import CHOOSING, MEASURING
from compressx.recipe.sources import DatasetSource

IN_CONTEXT = Path(__file__).parents[3] / "recipes/tasks/in_context.py"
ABILITIES = Path(__file__).parents[3] / "benchmarks/abilities.py"
FUNCTION_WORDS = {"a", "and", "in", "is", "of", "s", "the", "to", "was", "what", "where"}


@pytest.fixture(scope="module")
def written() -> dict[str, list[str]]:
    return {
        "calibration": documents(CALIBRATION, 8192),
        "evaluation": documents(EVALUATION, 1024),
        "requests": requests(2000, 0),
    }


def drawn(number: int) -> Random:
    return Random(number)  # noqa: S311 - no secret


def words(texts: Iterable[str]) -> set[str]:
    return {word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text)}


def test_the_same_is_written_on_every_machine_and_by_every_version_of_python(written) -> None:
    digests = {name: hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16] for name, texts in written.items()}
    assert digests == {
        "calibration": "f52a2648ff8530cc",
        "evaluation": "0be9a73c67d16e8e",
        "requests": "b86d443ffd0cad53",
    }


def test_the_purpose_selects_what_is_read(written) -> None:
    for purpose in ("calibration", "evaluation"):
        assert read_documents(DatasetSource(name="prompts"), purpose) == written[purpose]


def test_a_document_depends_on_its_number_alone_and_a_request_on_the_seed_too(written) -> None:
    assert documents(CALIBRATION, 3) == written["calibration"][:3]
    assert requests(3, 0) == written["requests"][:3]
    assert len({*requests(100, 1)} & {*written["requests"]}) < 30, "open requests are few"
    for texts in (written["calibration"], written["evaluation"]):
        assert len({*texts}) == len(texts)


def test_no_word_is_one_of_what_abilities_are_measured_with(written) -> None:
    """Of recipes/tasks/in_context.py, benchmarks/abilities.py and the hidden sentences."""
    kinds = runpy.run_path(str(IN_CONTEXT))["KINDS"]
    hidden = [part for fact in CHOOSING + MEASURING for part in (fact.sentence, fact.question, fact.answer)]
    source = ABILITIES.read_text()
    (names,) = re.findall(r'^NAMES = """(.*?)"""', source, flags=re.DOTALL | re.MULTILINE)
    labels = [*chain(*re.findall(r'\(" (\w+)", " (\w+)"\)', source))]
    assert len(names.split()) >= 20
    assert {"A", "B", "east", "west"} <= {*labels}
    measured = words([*kinds, names, *labels, *hidden]) - FUNCTION_WORDS
    assert len(measured) > 200
    assert words(chain(*written.values())) & measured == set()
    assert not {"A", "B"} & {word for text in chain(*written.values()) for word in text.split()}


def test_evaluation_shares_nothing_with_calibration_but_what_questions_are_made_of(written) -> None:
    assert words(written["evaluation"]) & words(written["calibration"] + written["requests"]) == {"what", "does", "the"}
    assert not {*CALIBRATION.forms} & {*EVALUATION.forms}
    assert not {fact[0] for fact in CALIBRATION.facts} & {fact[0] for fact in EVALUATION.facts}


@pytest.mark.parametrize("stock", [CALIBRATION, EVALUATION])
def test_no_word_has_two_kinds_and_there_are_enough(stock) -> None:
    kinds = [kind.split() for kind in stock.kinds]
    assert len({*chain(*kinds)}) == sum(map(len, kinds))
    assert min(map(len, [*kinds, stock.names.split()])) >= 14
    assert {len(labels.split()) for labels in stock.labels} <= {2, 3, 4}


def test_documents_have_the_length_that_is_said(written) -> None:
    for text in written["calibration"] + written["evaluation"]:
        pieces = re.split(r"\n+|(?<=[.?]) (?=[A-Z])", text) if "?" in text else re.split(r"\n\n|\n(?!Output)|\. ", text)
        assert 12 <= len(pieces) <= 28 + 14 * ("?" in text), text
        assert 100 < len(text) < 850, text


@pytest.mark.parametrize("stock", [CALIBRATION, EVALUATION])
def test_no_label_is_known_without_the_examples(stock) -> None:
    """Neither from a word, nor from its place, nor from the label before it or the first one."""
    stock = stock._replace(labels=("yes no",), forms=("{} {}\n",))
    of_kind, of_place, like = defaultdict(Counter), defaultdict(Counter), Counter()
    for number in range(1500):
        lines = [before + after for before, after in _rule(stock, drawn(number))]
        pairs = [line.split() for line in lines]
        labels = [label for _, label in pairs]
        assert len({(kind, label) for word, label in pairs for kind in stock.kinds if word in kind.split()}) == len(
            {*labels}
        ), "one label for a kind"
        for place, (word, label) in enumerate(pairs):
            (kind,) = (kind for kind in stock.kinds if word in kind.split())
            of_kind[kind][label] += 1
            of_place[place][label] += 1
        like["before"] += sum(a == b for a, b in pairwise(labels)) / 23
        like["first"] += labels[1:].count(labels[0]) / 23
    for counts in (*of_kind.values(), *of_place.values()):
        assert counts["yes"] / counts.total() == pytest.approx(0.5, abs=0.12)
    assert [share / 1500 for share in like.values()] == pytest.approx([0.5, 0.5], abs=0.02)


@pytest.mark.parametrize("stock", [CALIBRATION, EVALUATION])
def test_every_answer_stands_before_its_question(stock) -> None:
    for number in range(200):
        pairs = _lookup(stock, drawn(number))
        shown, asked = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        assert sorted(shown) == sorted(asked)
        assert len({before for before, _ in shown}) == len(shown)
        (told, _), *questions = _facts(stock, drawn(number))
        sentences = re.split(r"(?<=\.) ", told)
        assert len(sentences) == len(questions)
        for question, answer in questions:
            (name,) = {*question.replace("?", "").split()} & {*stock.names.split()}
            (sentence,) = (x for x in sentences if name in x.split())
            assert sentence.endswith(f" {answer}")


def test_requests_are_open_or_lack_the_last_value(written) -> None:
    begun = [text for text in written["requests"] if text.startswith("Complete this:\n\n")]
    assert 0.6 < len(begun) / len(written["requests"]) < 0.73
    assert all("\n" not in text and "{" not in text for text in {*written["requests"]} - {*begun})
    assert min(begun, key=len) == (
        "Complete this:\n\n"
        "India\t56\nmoped\t45\nItaly\t13\nSpain\t83\nsled\t62\ntricycle\t87\n"
        "Italy\t13\nmoped\t45\nsled\t62\ntricycle\t87\nSpain\t83\nIndia\t"
    )


@pytest.mark.slow
def test_there_is_enough_for_1500_windows_of_512_tokens(smollm2, written) -> None:
    assert len(token_ids(written["calibration"], smollm2.tokenizer)) > 1500 * 512
