"""What is copied between the host and the device while a block is pruned does not wait for memory to be pinned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import Counts, pretended_accelerator
from tests.compressx.depths import planned

from compressx.blocks.depth import solved_beside
from compressx.blocks.fisher import gradients
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import StateFiles
from compressx.testing import tiny_model, tiny_tokens

HALF = {"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}


def tensors(counts: Counts) -> dict[str, int]:
    """Return how often tensors were copied that are not pinned, by place, but for the bools that say what is finite."""
    return {place: n for place, n in counts.pageable.items() if "runtime/finite.py" not in place}


def pruned(folder: Path, batches: int, **sections: Any) -> Counts:
    """Prune a tiny model on a pretended accelerator with states in files; return what its second block cost."""
    with pretended_accelerator() as device:
        model = tiny_model("llama").to("cuda")
        ids = tiny_tokens(sequences=batches).split(1)
        blocks = prune_model(InMemory(model), planned(model, HALF, **sections), ids, keep=StateFiles(folder))
        next(blocks)
        with device.counted() as counts:
            next(blocks)
        return counts


@pytest.mark.parametrize("sections", [{}, {"reconstruct_block": {"passes": 1}}], ids=["pruned", "reconstructed"])
def test_no_states_masks_or_weights_go_through_memory_that_is_not_pinned(sections, tmp_path):
    few, many = (pruned(tmp_path / str(n), n, **sections) for n in (3, 6))
    assert many.to_device_bytes > few.to_device_bytes > 0
    assert tensors(few) == tensors(many), "of no batch"
    rooms = {place.partition(":")[0] for place in tensors(many)}
    assert rooms <= {"compressx/blocks/contract.py", "compressx/numerics/output_error.py"}, (
        "counts, and a row of weights"
    )


def solved(access: InMemory, ids: Sequence[torch.Tensor], keep: StateFiles) -> None:
    assert solved_beside(access, planned(access.model).scored({}, {"model.layers.1": 0.0}), ids, keep)


def differentiated(access: InMemory, ids: Sequence[torch.Tensor], keep: StateFiles) -> None:
    gradients(access, architecture_of(access.model), list(architecture_of(access.model).blocks), ids, keep)


@pytest.mark.parametrize("work", [solved, differentiated])
def test_what_is_measured_on_states_in_files_copies_only_token_ids_and_numbers_by_the_batch(work, tmp_path):
    found = []
    for batches in (3, 6):
        with pretended_accelerator() as device:
            access = InMemory(tiny_model("llama").to("cuda"))
            ids = [x.to("cuda") for x in tiny_tokens(sequences=batches).split(1)]
            with device.counted() as counts:
                work(access, ids, StateFiles(tmp_path / str(batches)))
        assert counts.to_host_bytes > 64 * 4 * sum(x.numel() for x in ids), "at least the states of one block"
        found.append(tensors(counts))
    assert found[0] == found[1], "of no batch"
