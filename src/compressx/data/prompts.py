"""Prompts that the program writes, `dataset: prompts`: what a model learns from its context, not from its weights.

Plain text is mostly predicted from the few tokens before each. These documents are predicted from farther back: labels
by a rule that only examples show, and values that were given. All machines and versions of Python write the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from random import Random
from typing import NamedTuple


class Stock(NamedTuple):
    """What documents are made of: texts of words, with spaces between them."""

    kinds: tuple[str, ...]  # words of one kind each; no word has two
    labels: tuple[str, ...]  # of a rule, two to four
    forms: tuple[str, ...]  # how two things are written that belong together
    names: str
    facts: tuple[tuple[str, str, str], ...]  # a sentence about a name and a value, the question, and the values


_PLACES = "France Spain Italy Japan Brazil Canada Mexico Egypt Kenya India China Russia Poland Greece Norway Peru"
_RIDES = "car truck bicycle tricycle tram ferry yacht canoe scooter tractor helicopter rocket sled wagon taxi moped"
_MUSIC = "piano violin guitar flute trumpet drum harp cello clarinet trombone banjo accordion saxophone organ lute oboe"
_DRINKS = "water milk coffee tea juice beer wine squash cider whisky vodka cocoa brandy rum champagne soda"
_SHAPES = "triangle circle square rectangle cube sphere cone cylinder pyramid oval hexagon pentagon arc spiral prism"
_TIMES = "Monday Tuesday Wednesday Thursday Friday January February March April June July August September October"
_DANCES = "waltz tango samba polka ballet foxtrot rumba minuet salsa mambo jig quickstep bolero flamenco"

CALIBRATION = Stock(
    (_PLACES, _RIDES, _MUSIC, _DRINKS,
     "red yellow purple orange brown black white pink grey silver golden violet crimson turquoise beige maroon",
     "chair table sofa desk shelf cupboard wardrobe stool bench bed couch dresser cabinet mattress lamp rug mirror",
     "oak pine maple birch willow cedar palm fern moss ivy rose daffodil daisy lily orchid clover reed",
     "tennis soccer hockey golf chess rugby cricket boxing fencing rowing skiing surfing judo archery polo baseball",
     "iron copper tin lead zinc nickel granite marble clay glass steel brass bronze plastic rubber cement slate",
     "rain snow hail fog wind thunder lightning storm frost drizzle sleet breeze cyclone drought mist sunshine",
     "church abbey tower school hospital factory library museum bank hotel prison barn cottage palace theatre",
     "mother father sister brother uncle aunt cousin nephew niece grandmother grandfather daughter son wife husband"),
    ("yes no", "true false", "left right", "in out", "good bad", "north south", "day night", "keep drop", "X Y Z",
     "P Q R S", "0 1", "1 2 3 4", "first second third fourth", "alpha beta gamma", "high middle low"),
    ("{} -> {}\n", "{} = {}\n", "{}, {}\n", "{} | {}\n", "- {} ({})\n", "{}\t{}\n", "{} {}\n", "{} is {}. ",
     "Input: {}\nOutput: {}\n\n"),
    "Anna Boris Carla David Elena Felix Greta Hugo Irene Jonas Karin Lukas Marta Nils Olga Pedro Rosa Simon Viktor",
    (("{} lives in {}.", "Where does {} live?", _PLACES), ("{} plays the {}.", "What does {} play?", _MUSIC),
     ("{} always orders {}.", "What does {} order?", _DRINKS), ("{} comes by {}.", "How does {} come?", _RIDES),
     ("{} sits in row {}.", "In which row does {} sit?", " ".join(map(str, range(101, 1000, 7))))),
)  # fmt: skip

EVALUATION = Stock(
    (_SHAPES, _TIMES, _DANCES, "run walk jump swim climb crawl throw catch push pull kick lift carry bend stretch"),
    ("up down", "M N O", "foo bar baz"),
    ("<{}> <{}>\n", '"{}": "{}",\n'),
    "Wanda Yusuf Zoe Emil Frida Gustav Helga Ivan Otto Paula Rita Stefan Tilda Ulrich Vera",
    (("{} drew the {}.", "What did {} draw?", _SHAPES), ("{} returns next {}.", "When does {} return?", _TIMES),
     ("{} teaches the {}.", "What does {} teach?", _DANCES)),
)  # fmt: skip

_OPEN = (
    "Explain {0} to a child.", "Write a short letter to a friend about {0}.", "Describe {0} in a few sentences.",
    "List five facts about {0}.", "What do {0} and {1} have in common?", "Ask me three questions about {0}.",
    "Tell a short story with {0} and {1} in it.", "What should a beginner know about {0}?", "Write a poem about {0}.",
    "Is {0} more useful than {1}? Give reasons.", "Use {0} and {1} in a sentence.", "Plan a lesson about {0}.",
)  # fmt: skip


def documents(stock: Stock, count: int) -> list[str]:
    """Write documents of 12 to 28 lines or sentences."""
    draws = (Random(f"document {i}") for i in range(count))  # noqa: S311 - no secret
    return ["".join(map("".join, _parts(stock, draw))).strip() for draw in draws]


def requests(count: int, seed: int) -> list[str]:
    """Write what a model may answer: open requests, and documents without their last value."""
    words, written = " ".join(CALIBRATION.kinds).split(), list[str]()
    for draw in (Random(f"request {seed} {i}") for i in range(count)):  # noqa: S311 - no secret
        *shown, (last, _) = _parts(CALIBRATION, draw)
        begun = "Complete this:\n\n" + "".join(map("".join, shown)) + last.rstrip(" ")
        written.append(draw.choice((begun, begun, draw.choice(_OPEN).format(*draw.sample(words, 2)))))
    return written


def _parts(stock: Stock, draw: Random) -> list[tuple[str, str]]:
    """Return a document in parts: what stands before a value, and the value with what follows it."""
    return draw.choice((_rule, _rule, _lookup, _facts))(stock, draw)


def _rule(stock: Stock, draw: Random) -> list[tuple[str, str]]:
    """Label words by their kinds. Each label is drawn anew, so neither its place nor the ones before it tell it."""
    labels = draw.choice(stock.labels).split()
    labels = draw.sample(labels, draw.randint(2, len(labels)))
    kinds = [kind.split() for kind in draw.sample(stock.kinds, len(labels))]
    words = {label: cycle(draw.sample(kind, len(kind))) for label, kind in zip(labels, kinds, strict=True)}
    return _written([(next(words[label]), label) for label in draw.choices(labels, k=24)], stock, draw)


def _lookup(stock: Stock, draw: Random) -> list[tuple[str, str]]:
    """List keys with their values, and each of them once more in another order."""
    count, (one, other, third) = draw.randint(6, 14), draw.sample(stock.kinds, 3)
    values = draw.choice((third, stock.names, " ".join(map(str, range(10, 100))))).split()
    pairs = [*zip(draw.sample(f"{one} {other}".split(), count), draw.sample(values, count), strict=True)]
    return _written(pairs + draw.sample(pairs, count), stock, draw)


def _written(pairs: Sequence[tuple[str, str]], stock: Stock, draw: Random) -> list[tuple[str, str]]:
    before, after = draw.choice(stock.forms).rsplit("{}", 1)
    return [(before.format(key), f"{value}{after}") for key, value in pairs]


def _facts(stock: Stock, draw: Random) -> list[tuple[str, str]]:
    """Tell facts about people, and ask for each of them in another order."""
    told, asked = list[str](), list[tuple[str, str]]()
    for name in draw.sample(stock.names.split(), draw.randint(6, 14)):
        sentence, question, values = draw.choice(stock.facts)
        told.append(sentence.format(name, value := draw.choice(values.split())))
        asked.append((f"\n{question.format(name)} ", f"{value}."))
    return [(" ".join(told), ""), *draw.sample(asked, len(asked))]
