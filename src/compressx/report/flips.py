"""Documents of a task that one model answers right and another wrong: equal accuracies hide them (2407.09141)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flips:
    """Documents whose answer is another than the dense model's."""

    right_to_wrong: int
    wrong_to_right: int
    p: float  # McNemar's

    def __str__(self) -> str:
        return f"{self.right_to_wrong} right to wrong, {self.wrong_to_right} wrong to right, p = {self.p:.2g}"


def mcnemar(one: int, other: int) -> float:
    """Return McNemar's exact p: how likely numbers at least as unequal are, either way, if a fair coin decides each."""
    flips = one + other
    lower_tail = sum(math.comb(flips, i) for i in range(min(one, other) + 1))
    return min(1.0, 2 * lower_tail / (1 << flips))


def documents_key(metric: str) -> str:
    """Return what the documents of a metric are called beside it: `acc_documents`, `exact_match_documents,strict`."""
    return "{}_documents{}{}".format(*metric.partition(","))


def as_text(right: Sequence[float]) -> str:
    """Write which documents are answered right, 1 or 0 each: the digits of a hexadecimal number, after a leading 1."""
    return f"{int('1' + ''.join('1' if x else '0' for x in right), 2):x}"


def flips(dense: Any, other: Any) -> Flips | None:
    """Count the flips between two models' documents, as `as_text` writes them; None if they are not of the same."""
    if not all(isinstance(text, str) and re.fullmatch("[1-9a-f][0-9a-f]*", text) for text in (dense, other)):
        return None
    before, after = int(dense, 16), int(other, 16)
    both = (before & ~after).bit_count(), (after & ~before).bit_count()
    return Flips(*both, mcnemar(*both)) if before.bit_length() == after.bit_length() else None


def flips_in(evaluation: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Flips]:
    """Return the flips from the dense model to each other one, by the metric's full name and the model."""
    found, dense = {}, evaluation.get("dense", {})
    for of, tasks in evaluation.items():
        for task, metrics in tasks.items() if of != "dense" else ():
            before: Any = dense.get(task)
            for metric in metrics if isinstance(metrics, Mapping) and isinstance(before, Mapping) else ():
                key = documents_key(metric)
                if (told := flips(before.get(key), metrics.get(key))) is not None:
                    found[f"{task} {metric}", of] = told
    return found
