"""The faults of `tests/planted` fit the code as it is; whether tests catch them is for `make planted` to say."""

from __future__ import annotations

from pathlib import Path

from tests.planted.planted import faults

ROOT = Path(__file__).parents[1]


def test_every_fault_has_a_name_of_its_own_and_changes_text_that_stands_once_in_its_file() -> None:
    planted = faults()
    assert len({fault.id for fault in planted}) == len(planted)
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in {fault.file for fault in planted}}
    moved = [fault.id for fault in planted if texts[fault.file].count(fault.old) != 1 or fault.new == fault.old]
    assert not moved, "their `-` lines have to be what the code says now"


def test_the_tests_that_have_to_catch_them_are_there() -> None:
    assert all(fault.tests for fault in faults())
    assert not {name for fault in faults() for name in fault.tests if not (ROOT / name).exists()}
