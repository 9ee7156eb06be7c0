"""Two processes, as `torchrun` starts them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from compressx.runtime.ranks import Ranks, joined_ranks


def _member(action: Callable[[], Any], environment: dict[str, str], folder: str) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    torch.save(action(), Path(folder, f"{environment['RANK']}.pt"))


def in_two(
    action: Callable[[], Any], folder: Path, ends: tuple[int, int] = (0, 0), start: str = "forkserver"
) -> list[Any]:
    """Run something in two processes, and return what each made of it; None of one that was to end otherwise.

    `start="fork"` takes a third of a second, because nothing is imported again. It is for what needs no backward pass:
    autograd refuses to work in a fork of a process that has used it.
    """
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["compressx.pipeline.run", "transformers.models.llama.modeling_llama"])
    # As an agent of torchrun does, this process holds the store: a port that is only looked up may be another's by the
    # time that the first of the two binds it.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    group = {**os.environ, **agent, **address, "WORLD_SIZE": "2"}
    members = [
        context.Process(target=_member, args=(action, {**group, "RANK": str(rank)}, str(folder))) for rank in range(2)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert tuple(member.exitcode for member in members) == ends
    return [None if end else torch.load(folder / f"{rank}.pt", weights_only=True) for rank, end in enumerate(ends)]


def joined(action: Callable[[Ranks], Any]) -> Any:
    """Do something with the processes as they know one another."""
    with joined_ranks(torch.device("cpu")) as ranks:
        return action(ranks)


def torchrun(
    recipe: Path, *options: str, plugins: tuple[str, ...] = (), command: str = "run"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
             "-m", "compressx", *(f"--plugin={name}" for name in plugins), command, str(recipe), *options]  # fmt: skip
    return subprocess.run(whole, env=environment, capture_output=True, text=True, check=False, timeout=300)
