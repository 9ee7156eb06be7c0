"""What a recipe will cost: work by stage from shapes, and from it seconds, memory and disk. No weight is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from compressx.costs.basis import Basis
from compressx.costs.estimate import Estimate
from compressx.costs.machine import Machine, assumed, measured
from compressx.costs.stages import disk, stages
from compressx.models.access import Device, device_for
from compressx.models.checkpoint import Checkpoint
from compressx.models.gguf_header import contents_of
from compressx.models.loading import dtype_of, load_skeleton
from compressx.planning.plan import Plan
from compressx.recipe.schema import Recipe
from compressx.runtime.errors import CompressxError
from compressx.runtime.rates import name_of


def estimate(
    recipe: Recipe, planned: Plan, checkpoint: Checkpoint, machine: Callable[[], Machine], processes: int = 1
) -> Estimate:
    """Estimate a planned recipe.

    Args:
        recipe: the recipe.
        planned: its plan.
        checkpoint: the model's source.
        machine: returns where it will run; called late, since measuring it is no part of loading libraries.
        processes: that will share the work.

    Raises:
        PluginError: a pruner or a statistic that does not count its work as `compressx.Work`.
    """
    started, interpreter = time.process_time(), float(psutil.Process().memory_info().rss)
    skeleton = load_skeleton(checkpoint)
    file = checkpoint.gguf_file
    gguf = None if file is None else contents_of(Path(checkpoint.location) / file)
    dtype = dtype_of(checkpoint, skeleton.config)
    stored = dtype_of(replace(checkpoint, dtype="auto"), skeleton.config).itemsize
    made = Basis(
        recipe, planned, skeleton.to(dtype), machine(), name_of(dtype), dtype.itemsize, gguf, stored, processes
    )
    done = tuple(stages(made))
    return Estimate(
        made.machine, done, disk(made), interpreter, started, tuple(made.unknown), tuple(made.notes), processes,
        made.exchanged,
    )  # fmt: skip


def machine_for(assume: str | None, device: Device, processes: int = 1) -> Callable[[], Machine]:
    """Return what finds the machine of an estimate: the one that is assumed, or this one, measured when called.

    Its rates are those that each of some processes has.

    Raises:
        CompressxError: no such machine, or no such device.
    """
    if assume is not None:
        machine = assumed(assume, processes)
        return lambda: machine
    return partial(measured, device_for(device), processes)


def estimated(
    recipe: Recipe, planned: Plan, checkpoint: Checkpoint, machine: Callable[[], Machine], processes: int = 1
) -> Estimate | str:
    """Do as `estimate`, or return why there is none: a plan is of use without."""
    try:
        return estimate(recipe, planned, checkpoint, machine, processes)
    except CompressxError as error:
        return str(error)
