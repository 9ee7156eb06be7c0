"""The documents of `in_context.yaml`: words of two kinds, labelled A or B by a rule that only examples show.

Each word of the list is asked about twice: beside examples in which its kind is A, and beside others in which it is B.
So whoever does not read the examples is right once of two times, whatever they think of the word or of a label.
"""

from __future__ import annotations

import random
from typing import Any

from compressx.data.documents import as_dataset

SHOTS = 16
"""Examples of a document: half of the kind of its word, half of one other kind, in an order that is drawn."""

KINDS = (
    "dog cat elephant lion bear mouse fox deer pig cow duck sparrow snake squirrel goat giraffe zebra owl swan "
    "octopus dolphin panda crocodile kangaroo",
    "knife broom spade scythe lathe stapler spatula ladle funnel tongs hatchet machete mop bucket needle brush pulley "
    "tweezers ruler screw bolt spoon shears plow",
    "apple banana sandwich cereal lasagna muffin waffle spaghetti bagel mustard ketchup mayonnaise potato tomato "
    "carrot onion garlic biscuit popcorn broccoli steak oatmeal mushroom lemon",
    "Amsterdam Barcelona Beijing Dallas Delhi Detroit Edinburgh Frankfurt Hamburg Houston Istanbul Kyoto Manchester "
    "Melbourne Miami Milan Montreal Munich Nairobi Philadelphia Shanghai Singapore Stockholm Vancouver",
    "hand foot arm leg eye mouth hair skin heart brain kidney jaw thigh shin eyebrow eyelid nostril knuckle lip tooth "
    "waist armpit bladder vein",
    "pants sandal raincoat cardigan pullover tuxedo robe underwear slippers sneakers leggings bra swimsuit overcoat "
    "gown kimono cape stockings suit bonnet beret poncho tunic corset",
    "doctor actor artist author banker bartender cashier chef coach detective editor fisherman gardener janitor judge "
    "mechanic musician painter pharmacist photographer professor scientist secretary veterinarian",
    "happiness hatred gratitude loneliness confusion excitement frustration nostalgia sorrow panic embarrassment "
    "curiosity compassion disappointment bitterness amusement enthusiasm misery terror worry affection melancholy "
    "satisfaction hopelessness",
)
"""Animals, tools, food, cities, parts of the body, clothes, professions and feelings."""


def documents(**_: Any) -> dict[str, Any]:
    """Return the only split, the same for every number of examples. An even `limit` keeps both times of each word."""
    draw = random.Random(0)  # noqa: S311 - documents, no secret
    kinds = [kind.split() for kind in KINDS]
    asked = [(word, kind) for kind in kinds for word in kind]
    rows = []
    for word, kind in draw.sample(asked, len(asked)):
        other = draw.choice([x for x in kinds if x is not kind])
        for answer in draw.sample([0, 1], 2):
            alike = draw.sample([x for x in kind if x != word], SHOTS // 2)
            examples = [{"word": x, "label": answer} for x in alike]
            examples += [{"word": x, "label": 1 - answer} for x in draw.sample(other, SHOTS // 2)]
            rows.append({"examples": draw.sample(examples, SHOTS), "word": word, "answer": answer})
    return {"test": as_dataset(rows)}
