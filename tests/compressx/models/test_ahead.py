"""The next block is read while the current one is worked on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.compressx.models.test_streaming import saved

from compressx.models import streaming
from compressx.models.architecture import survey
from compressx.models.blockwise import each_block
from compressx.models.checkpoint import Checkpoint
from compressx.models.shards import each
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.runtime.errors import ArtifactError


@pytest.fixture
def streamed(tmp_path: Path) -> StreamedModel:
    return open_streamed(Checkpoint(str(saved(tmp_path / "model", "llama"))))


def visited(model: StreamedModel, names: list[str] | None = None) -> list[str]:
    found = survey(model.model)
    return [block.fqn for block, _ in each_block(model, found, {fqn: [] for fqn in model.blocks}, names)]


def test_the_ranges_of_a_block_are_the_bytes_of_its_tensors_and_no_others(streamed: StreamedModel):
    for fqn in streamed.blocks:
        shards = streamed.source[fqn]
        tensors = {n: t for file in set(shards.files.values()) for n, t in each(shards.folder / file)}
        expected = sorted(tensors[n].numpy().tobytes() for n in shards.members[fqn])
        read = [path.read_bytes()[start:end] for path, start, end in streaming.ranges(shards, fqn)]
        assert sorted(read) == expected


def test_all_bytes_are_read_whatever_the_size_of_a_read(streamed, monkeypatch):
    counts: list[int] = []
    opened = Path.open

    @contextmanager
    def counted(file: Any) -> Iterator[Any]:
        with file:
            readinto = lambda part: counts.append(file.readinto(part)) or counts[-1]  # noqa: E731 - one call
            yield SimpleNamespace(seek=file.seek, readinto=readinto)

    def recording(path: Path, *arguments: Any, **options: Any) -> Any:
        file = opened(path, *arguments, **options)
        return counted(file) if options.get("buffering") == 0 else file

    monkeypatch.setattr(streaming, "_CHUNK", 1000)
    monkeypatch.setattr(Path, "open", recording)
    fqn = next(iter(streamed.blocks))
    streaming._read(streamed.source[fqn], fqn)
    assert sum(counts) == 4 * sum(t.numel() for t in streamed.model.get_submodule(fqn).parameters())
    assert max(counts) == 1000


def test_a_block_that_is_most_of_the_free_memory_is_not_read_ahead(streamed, monkeypatch):
    begun: list[str] = []
    monkeypatch.setattr(streaming, "_read", lambda _, fqn: begun.append(fqn))
    size = 4 * sum(p.numel() for p in next(iter(streamed.blocks.values())).parameters())
    monkeypatch.setattr(streaming, "free_memory", lambda *_: 2 * size - 2)
    visited(streamed)
    assert not begun
    monkeypatch.setattr(streaming, "free_memory", lambda *_: 2 * size)
    visited(streamed)
    assert len(begun) == 2


def test_a_file_that_is_damaged_is_named_when_its_block_is_loaded_and_not_before(streamed):
    second = list(streamed.blocks)[1]
    shards = streamed.source[second]
    for name in {shards.files[name] for name in shards.members[second]} - {
        shards.files[name] for name in shards.members[next(iter(streamed.blocks))]
    }:
        (shards.folder / name).write_bytes(b"no weights")
    seen: list[str] = []
    found = survey(streamed.model)
    blocks = each_block(streamed, found, {fqn: [] for fqn in streamed.blocks})
    with pytest.raises(ArtifactError, match="is not a safetensors file"):
        seen.extend(block.fqn for block, _ in blocks)
    assert seen == [next(iter(streamed.blocks))], "the first block was loaded"
