"""`--processes`: a command in several processes of this machine, by the elastic launch that `torchrun` uses."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., None])

GO_ON = {"run": "--resume continues", "sweep": "the same command continues"}
"""How to go on after an interrupted command, by the function's name."""

_RUN_ID = "compressx-"
"""How the launch's number begins, by which a process knows that it was started here."""


def in_processes(command: _Command) -> _Command:
    """Give a command the option `--processes`, and start it in so many processes."""
    left = f"what was finished is kept, and {GO_ON[command.__name__.removesuffix('_command')]}"

    @click.option(
        "--processes",
        default="1",
        metavar="N|all",
        help="Share the work among N processes of this machine, or among one for each GPU; 1 by default.",
    )
    @wraps(command)
    def wrapped(*args: Any, processes: str, **kwargs: Any) -> None:
        if _is_launched() or (number := _number(processes, kwargs["device"])) == 1:
            command(*args, **kwargs)
        else:
            sys.exit(launch(number, left))

    return wrapped  # type: ignore[return-value]


def left_to_launcher(message: str) -> bool:
    """Leave an error of this process to the one that started it, which prints what several processes say only once.

    Returns:
        Whether it will; not if `--processes` did not start this process.
    """
    if not _is_launched():
        return False
    report = {"message": message, "timestamp": int(time.time())}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report), encoding="utf-8")
    return True


def _is_launched() -> bool:
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN_ID)


def _number(processes: str, device: str) -> int:
    """Return the number of processes.

    Raises:
        click.UsageError: it is none, there are fewer GPUs, or `torchrun` has started processes already.
    """
    if processes == "1":
        return 1
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() and device != "cpu" else 0
    number = gpus if processes == "all" else int(processes) if processes.isdecimal() else 0
    for wrong, fault in (
        ("RANK" in os.environ, "torchrun excludes it, whose --nproc-per-node says how many"),
        (number < 1 and processes == "all", "all starts one for each GPU, and there is none to use; give a number"),
        (number < 1, f"{processes!r} is no number of processes; expected 1, 2, ... or all, one for each GPU"),
        (number > 1 and ":" in device, f"--device {device} is one GPU, and every process needs its own; use cuda"),
        (0 < gpus < number, f"{number}: every process needs its own GPU, and there are {gpus}"),
    ):
        if wrong:
            raise click.UsageError(f"--processes: {fault}")
    return number


def launch(number: int, left: str) -> int:
    """Start this process's command line in several processes, wait for all, and return the exit status.

    When one ends with an error, the others are ended, it is printed, and its status is returned; `left` says what an
    interruption leaves, and how to go on.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes' own messages are enough
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=number, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=f"{_RUN_ID}{uuid.uuid4()}", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    try:
        # -P: like a console script, do not import from the working directory.
        elastic_launch(config, sys.executable)("-P", "-m", "compressx", *sys.argv[1:])
    except ChildFailedError as error:
        return _print_failures(error.failures, left)
    except SignalException as stopped:
        click.echo(f"interrupted; {left}", err=True)
        return 128 + int(stopped.sigval)
    return 0


def _print_failures(failures: Mapping[int, Any], left: str) -> int:
    """Print why processes failed, by rank, each reason once, and return the exit status."""
    from compressx.runtime.errors import ANOTHER_ENDED, printable

    by_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    own = [f for _, f in by_time if f.exitcode > 0 and f.message != ANOTHER_ENDED]
    for message in dict.fromkeys(f.message for f in own if f.error_file_data["message"] == f.message):
        click.echo(f"error: {printable(message)}", err=True)
    if own:
        return int(own[0].exitcode)
    # Those that are left were ended because of another, by SIGTERM, unless it was sent to all.
    rank, signalled = min(by_time, key=lambda item: item[1].exitcode in (-signal.SIGTERM, 2))
    name = signal.Signals(-signalled.exitcode).name if signalled.exitcode < 0 else "an error"
    click.echo(f"error: process {rank} was ended by {name}, so all ended; {left}", err=True)
    return 1
