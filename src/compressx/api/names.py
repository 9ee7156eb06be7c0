"""Names of linears in short, as people speak of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def kind_of(name: str) -> str:
    """Return the last part of a linear's name; a fused expert's ends in its number, JetMoE's in `weight` before it."""
    return re.sub(r"(\.weight)?(\.\d+)+$", "", name).rsplit(".", 1)[-1]


def in_short(names: Sequence[str]) -> str:
    """Name several linears of one block by the first one's full name and the others' kinds."""
    first, *others = names
    kinds = dict.fromkeys(kind_of(name) for name in others)
    return ", ".join([first, *kinds])


def folded(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, int, tuple[str, ...]]]:
    """Fold rows that differ only in the numbers within their names: of layers, of experts.

    Args:
        rows: a name each, and what else has to be equal.

    Returns:
        For each fold a name such as `model.layers.0-29.mlp.up_proj`, how many names it stands for, and the rest; in the
        order of their first rows.
    """
    counts = {(tuple(name.split(".")), tuple(rest)): 1 for name, *rest in rows}
    for position in reversed(range(max((len(parts) for parts, _ in counts), default=0))):
        alike: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, int]] = {}
        for (parts, rest), count in counts.items():
            number = parts[position] if position < len(parts) and parts[position].isdecimal() else ""
            rid = (*parts[:position], "", *parts[position + 1 :]) if number else parts
            alike.setdefault((rid, rest), {})[number] = count
        counts = {}
        for (parts, rest), found in alike.items():
            whole = (*parts[:position], _ranges(found), *parts[position + 1 :]) if "" not in found else parts
            counts[whole, rest] = sum(found.values())
    return [(".".join(parts), count, rest) for (parts, rest), count in counts.items()]


def _ranges(numbers: Iterable[str]) -> str:
    """Write numbers as `0-3,7`."""
    runs: list[list[int]] = []
    for n in sorted(map(int, numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)
