"""What a pruned model still does with its context: rules, lists and hidden sentences; and how its answers end.

    python benchmarks/abilities.py --dense MODEL.gguf --models runs/a runs/b --text test.txt --output abilities

| format | what is asked | chance |
|---|---|---:|
| in_context | as recipes/tasks/in_context.yaml: the label of a word, A or B, after 16 examples | 1/2 |
| numbered | the same in numbered lines, with labels of two tokens, from the thirteenth of 24 examples on | 1/2 |
| inline | the same in one line, with other labels and separators | 1/2 |
| lookup | the word that a list gave to a name, one of twelve | 1/12 |
| needle | the question about a sentence that is hidden in 1024 tokens | 0 |

Of the first four a model is right if the right label has the likeliest first token of all labels. *Kept* is the mean
of the share of the dense model's lead over chance that is left, over the formats in which it leads by twice the error.
Nothing is tuned on these formats. Errors are over documents, and those of differences from the dense model are paired
by document.

*Answers* are to twenty questions through the chat template, greedy, 128 tokens at most: the share that ends, and the
share that loops, which is that its last tokens are one piece of text four times.

Beside them stand token perplexity and the distance from the dense model's predictions on plain text, and which of these
orders the models as *kept* does. OUTPUT gets a file for each model, as soon as it is measured, and `abilities.md`; a
second run measures what is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import correlation, fmean, stdev
from typing import Any

import torch

from compressx.data.windows import beginning
from loaded import load

sys.path.append(str(Path(__file__).parents[1] / "recipes" / "tasks"))
from in_context import KINDS
from in_context import documents as in_context_documents

DOCUMENTS = 48
SHOTS = 24
FIRST = 12
"""The examples of a document, and how many come before the first that is asked."""
NAMES = """
Amos Brenda Clive Doris Edgar Fiona Gordon Hazel Ines Keith Lorna Mabel Norman Opal Percy Ruth Sidney Thelma Ursula
Vernon"""
QUESTIONS = (
    "What is the capital of Italy?", "Why is the sky blue?", "Name three fruits.", "How do I boil an egg?",
    "Write a sentence about the sea.", "What does a librarian do?", "Give me two tips for sleeping better.",
    "Explain what a magnet is.", "What is 12 plus 30?", "Write a short poem about winter.", "Who wrote Hamlet?",
    "What is the difference between a lake and a river?", "Suggest a name for a cat.",
    "Translate 'good night' to Spanish.",
    "How many days has a leap year?", "Describe a bicycle to somebody who has never seen one.",
    "What should I pack for a day in the mountains?", "Write a polite refusal of an invitation.",
    "What is photosynthesis?", "List four colours of the rainbow.",
)  # fmt: skip
FEW = 3
"""Models of which no order is told."""
TOKENS, PIECE = 128, 24
"""Most tokens of an answer, and of a piece of text that it repeats."""


@dataclass(frozen=True)
class Asked:
    """A document, and where something is asked in it.

    Attributes:
        parts: texts, one after the other, each with the label that is asked after it.
        labels: all that could be right.
    """

    parts: tuple[tuple[str, str], ...]
    labels: tuple[str, ...]


def in_context() -> Iterator[Asked]:
    """Yield the documents of the task, each with its labels and then with the other ones."""
    for row in [*in_context_documents()["test"]][: 2 * DOCUMENTS]:
        for names in ("AB", "BA"):
            shown = "".join(f"{x['word']}: {names[x['label']]}\n" for x in row["examples"])
            yield Asked(((f"{shown}{row['word']}:", f" {names[row['answer']]}"),), (" A", " B"))


def _rules(form: str, labels: Sequence[str], after: str) -> Iterator[Asked]:
    """Yield words of two kinds, each with the label of its kind."""
    kinds = [kind.split() for kind in KINDS]
    for i in range(DOCUMENTS):
        draw = random.Random(f"{form} {i}")  # noqa: S311 - documents, no secret
        of = zip(draw.sample(kinds, 2), draw.sample(labels, 2), strict=True)
        shown = [(word, label) for kind, label in of for word in draw.sample(kind, SHOTS // 2)]
        lines = enumerate(draw.sample(shown, SHOTS), start=1)
        yield _asked([(form.format(word=w, n=n), label, after) for n, (w, label) in lines], FIRST, labels)


def lookup() -> Iterator[Asked]:
    """Yield lists of names and words, in which each name is then asked for once."""
    by_initial: dict[str, list[str]] = {}
    for word in " ".join(KINDS).split():
        by_initial.setdefault(word[0].lower(), []).append(word)
    for i in range(DOCUMENTS):
        draw = random.Random(f"lookup {i}")  # noqa: S311
        initials = draw.sample(sorted(by_initial), FIRST)  # different, so that first tokens are
        values = [draw.choice(by_initial[x]) for x in initials]
        names = draw.sample(NAMES.split(), FIRST)
        pairs = [(f"{name}:", f" {value}", "\n") for name, value in zip(names, values, strict=True)]
        yield _asked(pairs + draw.sample(pairs, FIRST), FIRST, [f" {value}" for value in values])


def _asked(shown: Sequence[tuple[str, str, str]], first: int, labels: Sequence[str]) -> Asked:
    """Make a document of (text, label, what follows), asked from number `first` on."""
    text = "".join("".join(x) for x in shown[:first])
    after = ["", *(label + end for _, label, end in shown[first:])]
    starts = [text + shown[first][0], *(before for before, _, _ in shown[first + 1 :])]
    asked = zip(after, starts, shown[first:], strict=False)
    return Asked(tuple((end + start, label) for end, start, (_, label, _) in asked), tuple(labels))


@dataclass(frozen=True)
class Format:
    """Documents, the share that chance has right, and how many in a row are about the same words, so no two samples."""

    documents: Callable[[], Iterator[Asked]]
    chance: float
    alike: int = 1


FORMATS = {
    "in_context": Format(in_context, 1 / 2, alike=4),
    "numbered": Format(partial(_rules, "{n}. {word} => team", (" east", " west"), "\n"), 1 / 2),
    "inline": Format(partial(_rules, "{word} /", (" cold", " warm"), " ; "), 1 / 2),
    "lookup": Format(lookup, 1 / FIRST),
}
"""Formats of which labels are compared; needles, which are answered, have a chance of 0."""


def encoded(asked: Asked, tokenizer: Any, bos: int | None) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Return the ids of a document, (position whose logits are read, index of the right label), and the labels' ids."""
    text, ends = "", []
    for part, _ in asked.parts:
        text += part
        ends.append(len(text))
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = coded["input_ids"], coded["offset_mapping"]
    first = [tokenizer(f"x{label}", add_special_tokens=False, return_offsets_mapping=True) for label in asked.labels]
    labels = [
        next(i for i, (_, end) in zip(x["input_ids"], x["offset_mapping"], strict=True) if end > 1) for x in first
    ]
    if len({*labels}) < len(labels):
        raise SystemExit(f"the tokenizer gives several of {asked.labels} the same first token")
    places = []
    for end, (_, right) in zip(ends, asked.parts, strict=True):
        at = max(i for i, (_, stop) in enumerate(offsets) if stop <= end)
        if offsets[at][1] != end:
            raise SystemExit(f"a token crosses the end of {text[:end]!r}")
        places.append((at + (bos is not None), asked.labels.index(right)))
    return ([] if bos is None else [bos]) + ids, places, labels


@torch.no_grad()
def right(model: Any, tokenizer: Any, documents: Sequence[Asked], bos: int | None, batch: int = 8) -> list[float]:
    """Return the share of right labels of each document."""
    coded = [encoded(x, tokenizer, bos) for x in documents]
    found = [0.0] * len(coded)
    order = sorted(range(len(coded)), key=lambda i: len(coded[i][0]))
    for some in (order[i : i + batch] for i in range(0, len(order), batch)):
        length = max(len(coded[i][0]) for i in some)  # padded on the right, which causal attention does not see
        ids = torch.tensor([coded[i][0] + [0] * (length - len(coded[i][0])) for i in some])
        states = model.get_decoder()(ids, use_cache=False).last_hidden_state  # [batch, length, width]
        for states_of, i in zip(states, some, strict=True):
            _, places, labels = coded[i]
            logits = model.get_output_embeddings()(states_of[[at for at, _ in places]])[:, labels]  # [asked, labels]
            found[i] = (logits.argmax(1) == torch.tensor([x for _, x in places])).double().mean().item()
    return found


def needles(model: Any, tokenizer: Any, text: str) -> list[float]:
    """Return which of twenty questions about sentences hidden in 1024 tokens of a text are answered."""
    from compressx.evaluation.needle import ANSWER_TOKENS, NeedleGrid, grid_prompts
    from compressx.models.generate import greedy
    from compressx.prompts.templates import text_ids

    settings = NeedleGrid.model_validate({"dataset": {"text": text}, "lengths": [1024], "depths": 4})
    asked = [*grid_prompts(tokenizer, text_ids(tokenizer, Path(text).read_text("utf-8")), settings)]
    found = []
    for prompt in asked:
        said = tokenizer.decode(greedy(model, tokenizer, prompt.ids[None], ANSWER_TOKENS)[0])
        found.append(float(prompt.answer.lower() in said.lower()))
    return found


def answers(model: Any, tokenizer: Any) -> dict[str, list[float]]:
    """Return which answers end, and which loop; none without a chat template."""
    from compressx.models.generate import end_tokens, greedy

    if not tokenizer.chat_template:
        return {"ended": [], "looped": []}
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        tokenizer.apply_chat_template(x, add_generation_prompt=True, return_dict=True)["input_ids"] for x in chats
    ]
    width, ends = max(map(len, prompts)), {*end_tokens(model, tokenizer)}  # of a turn, and of the text
    ids = torch.tensor([[0] * (width - len(x)) + x for x in prompts])
    mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts])
    written = greedy(model, tokenizer, ids, TOKENS, mask=mask).tolist()
    ended = [float(not ends.isdisjoint(x)) for x in written]
    return {"ended": ended, "looped": [float(not end and loops(x)) for end, x in zip(ended, written, strict=True)]}


def loops(ids: list[int]) -> bool:
    """Return whether token ids end with one piece, of 1 to `PIECE` tokens, four times."""
    return any(len(ids) >= 4 * n and ids[-4 * n :] == 4 * ids[-n:] for n in range(1, PIECE + 1))


def figures(model: Any, tokenizer: Any, dense: Any, text: str, windows: int) -> dict[str, float]:
    """Return token perplexity on windows of 512 tokens, and how far predictions are from the dense model's, if any."""
    from compressx.data.windows import evaluation_windows, token_ids
    from compressx.evaluation.fidelity import fidelity
    from compressx.evaluation.token_perplexity import measure_tokens
    from compressx.models.access import InMemory

    ids = token_ids([Path(text).read_text("utf-8")], tokenizer)
    read = evaluation_windows(ids, windows, 512, bos=beginning(tokenizer, "auto", model))
    tokens = measure_tokens(InMemory(model), read, None if dense is None else InMemory(dense))
    return {"perplexity": math.exp(tokens[0].mean()), **fidelity(tokens)}


def measures(dense: str, model: str, text: str, windows: int) -> dict[str, Callable[[], Any]]:
    """Return what is measured of a model, by name, each to be called when it is wanted."""

    @cache
    def loaded(name: str) -> tuple[Any, Any]:
        network, tokenizer = load(str(folder) if (folder := Path(name) / "model").is_dir() else name)
        return network.eval(), tokenizer

    def of_format(of: Format) -> list[float]:
        network, tokenizer = loaded(model)
        found = right(network, tokenizer, [*of.documents()], beginning(tokenizer, "auto", network))
        return [fmean(found[i : i + of.alike]) for i in range(0, len(found), of.alike)]

    return {
        "figures": lambda: figures(*loaded(model), None if model == dense else loaded(dense)[0], text, windows),
        **{name: partial(of_format, x) for name, x in FORMATS.items()},
        "needle": lambda: needles(*loaded(model), text),
        "answers": lambda: answers(*loaded(model)),
    }


def share(row: Mapping[str, Any], dense: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Return the share of the dense model's lead over chance that is left on a format, and its standard error.

    The error is that of the ratio of two means over the same documents, to first order.
    """
    chance = FORMATS[name].chance if name in FORMATS else 0.0
    mine, its = ([x - chance for x in values[name]] for values in (row, dense))
    ratio = fmean(mine) / fmean(its)
    off = [x - ratio * y for x, y in zip(mine, its, strict=True)]
    return ratio, math.sqrt(fmean([x * x for x in off]) / (len(off) - 1)) / fmean(its)


FIGURES = {"perplexity": ".2f", "kl_divergence": ".3f", "top1_agreement": ".3f", "context_gain": ".3f"}
"""Figures of plain text in the table, and how they are written."""


def leads(dense: Mapping[str, Any], name: str) -> bool:
    """Return whether the dense model is better than chance by twice the standard error: else a share of it is noise."""
    ahead = [x - (FORMATS[name].chance if name in FORMATS else 0.0) for x in dense[name]]
    return bool(fmean(ahead) > 2 * stdev(ahead) / math.sqrt(len(ahead)))


def kept(row: Mapping[str, Any], dense: Mapping[str, Any]) -> tuple[float, float]:
    """Return the mean of `share` over the formats in which the dense model leads, and its standard error."""
    shares = [share(row, dense, name) for name in (*FORMATS, "needle") if leads(dense, name)]
    if not shares:
        raise SystemExit("the dense model is no better than chance in any format, so nothing can be kept")
    return fmean([x for x, _ in shares]), math.sqrt(sum(error**2 for _, error in shares)) / len(shares)


def table(rows: Mapping[str, Mapping[str, Any]], dense: str) -> str:
    """Return a Markdown table, a row for each model."""
    formats = [*FORMATS, "needle"]
    columns = [*FIGURES, *formats, "kept", "answers that end", "that loop"]
    lines = ["", *columns], ["---", *["---:"] * len(columns)]
    cells = [
        [name, *(format(row["figures"][x], how) if x in row["figures"] else "" for x, how in FIGURES.items()),
         *(f"{fmean(row[x]):.3f}" for x in formats), "{:.2f} ± {:.2f}".format(*kept(row, rows[dense])),
         *(f"{fmean(of):.2f}" if (of := row["answers"][x]) else "" for x in ("ended", "looped"))]
        for name, row in rows.items()
    ]  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in (*lines, *cells))


def orders(rows: Mapping[str, Mapping[str, Any]], dense: str) -> dict[str, float]:
    """Return Spearman's correlation of each figure of plain text with what is kept, over the pruned models."""
    pruned = [row for name, row in rows.items() if name != dense]
    abilities = [kept(row, rows[dense])[0] for row in pruned]
    return {name: spearman([row["figures"][name] for row in pruned], abilities) for name in FIGURES}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation of two sequences; equal values get the mean of their ranks."""
    ranks = [[fmean([i for i, y in enumerate(sorted(of)) if y == x]) for x in of] for of in (one, other)]
    return correlation(*ranks)


def main() -> None:
    """Measure what is missing of each model, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True, help="the model before it was pruned: a .gguf file or a folder")
    parser.add_argument("--models", nargs="*", default=[], help="output folders, or folders of models")
    parser.add_argument("--text", required=True, help="text file to measure perplexity and hide sentences in")
    parser.add_argument("--windows", type=int, default=48, help="of 512 tokens, for perplexity")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    for model in (given.dense, *given.models):
        path = given.output / f"{Path(model).name}.json"
        row = rows[model] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        for name, measure in measures(given.dense, model, given.text, given.windows).items():
            if name not in row:
                row[name] = measure()
                path.write_text(json.dumps(row), "utf-8")
                print(f"{model}: {name}", flush=True)
    told = table(rows, given.dense)
    if len(rows) > FEW:
        told += "".join(
            f"\n{name}: rank correlation with kept {x:+.2f}" for name, x in orders(rows, given.dense).items()
        )
    (given.output / "abilities.md").write_text(f"{told}\n", "utf-8")
    print(told)


if __name__ == "__main__":
    main()
