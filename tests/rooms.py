"""Print the rooms of the house, its floors and its circles, from the imports: `python tests/rooms.py`.

A room is a package below `compressx`, a module at its root, or another root package. A room stands one floor above the
highest that it imports. A circle is modules that import one another; imports for type checking alone do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import grimp

ROOTS = ("compressx", "compressx_attnprune")


def room_of(module: str) -> str:
    """Return the room in which a module stands."""
    root, *inner = module.split(".")
    return ".".join([root, *inner[:1]]) if root == ROOTS[0] else root


def imports_by_room() -> dict[str, set[str]]:
    """Return what each room imports. The public names, `compressx/__init__.py`, are a face and no room."""
    graph = grimp.build_graph(*ROOTS, exclude_type_checking_imports=True)
    rooms: dict[str, set[str]] = {}
    for module in graph.modules - {ROOTS[0]}:
        below = {room_of(x) for x in graph.find_modules_directly_imported_by(module) - {ROOTS[0]}}
        rooms.setdefault(room_of(module), set()).update(below - {room_of(module)})
    return rooms


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Return rooms that import one another, if there are any."""
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def floors(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """Return each room's floor, from 1. There must be no circle."""
    found: dict[str, int] = {}
    for room in TopologicalSorter(imports).static_order():
        found[room] = 1 + max((found[below] for below in imports[room]), default=0)
    return found


def main() -> None:
    """Print each floor, the highest first, and the counts."""
    imports = imports_by_room()
    if found := circle(imports):
        raise SystemExit(f"a circle: {' -> '.join(found)}")
    by_room = floors(imports)
    for floor in range(max(by_room.values()), 0, -1):
        print(f"{floor:3}  {'  '.join(sorted(room for room, its in by_room.items() if its == floor))}")
    arrows = sum(map(len, imports.values()))
    print(f"{len(imports)} rooms on {max(by_room.values())} floors, {arrows} arrows, no circle")


if __name__ == "__main__":
    main()
