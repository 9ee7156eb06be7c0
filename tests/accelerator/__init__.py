"""Code that asks for `cuda` runs on the CPU, and what would cost time on a GPU is counted."""

from tests.accelerator.counts import Counts, Record
from tests.accelerator.pretended import pretended_accelerator

__all__ = ["Counts", "Record", "pretended_accelerator"]
