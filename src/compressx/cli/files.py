"""`compressx pack | unpack`: smaller files of a pruned model, without loss."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compressx.cli.common import PATH, errors_for_users

if TYPE_CHECKING:
    from compressx.models.packed_folder import Progress, Sizes
    from compressx.report.section import Section, Value


@click.command(epilog="Example: compressx pack runs/one")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, help="New folder to write; by default MODEL-packed.")
@click.option("--compress/--no-compress", default=True, show_default=True,
              help="Compress masks and exponents, or store nothing but bit masks and values.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the sizes as JSON.")
@errors_for_users
def pack(model: Path, output: Path | None, compress: bool, as_json: bool) -> None:
    """Write MODEL, an output folder or a model's folder, without its zeros.

    Nothing is lost: compressx unpack restores every byte, and compressx reads packed folders like others.
    """
    from compressx.cli import terminal
    from compressx.models.checkpoint import find_local
    from compressx.models.packed_folder import pack_folder
    from compressx.runtime.errors import UnsupportedModelError

    if find_local(model).is_file():
        raise UnsupportedModelError(f"{model} is a GGUF file, which has a format of its own; pack reads safetensors")
    output = output or _beside(model, "packed")
    begin = time.perf_counter()
    with terminal.under_way() as tell:
        sizes = pack_folder(model, output, compress=compress, progress=_told(tell))
    _show(sizes, output, time.perf_counter() - begin, as_json=as_json)


@click.command(epilog="Example: compressx unpack runs/one-packed")
@click.argument("folder", type=PATH)
@click.option("-o", "--output", type=PATH, help="New folder to write; by default FOLDER-unpacked.")
@click.option("--json", "as_json", is_flag=True, help="Print the sizes as JSON.")
@errors_for_users
def unpack(folder: Path, output: Path | None, as_json: bool) -> None:
    """Restore what compressx pack wrote to FOLDER, byte for byte; every tensor's sha256 is checked."""
    from compressx.cli import terminal
    from compressx.models.checkpoint import find_local
    from compressx.models.packed_folder import unpack_folder

    find_local(folder)
    output = output or _beside(folder, "unpacked")
    begin = time.perf_counter()
    with terminal.under_way() as tell:
        sizes = unpack_folder(folder, output, progress=_told(tell))
    _show(sizes, output, time.perf_counter() - begin, as_json=as_json)


def _told(tell: Callable[[str], None]) -> Progress:
    return lambda done, total, name: tell(f"{name}, {done + 1} of {total}" if name else "flush to disk")


def _beside(folder: Path, ending: str) -> Path:
    resolved = folder.resolve()  # `.` has no name
    return resolved.with_name(f"{resolved.name}-{ending}")


def _show(sizes: Sizes, output: Path, seconds: float, *, as_json: bool) -> None:
    from compressx.cli import terminal
    from compressx.report.section import Section

    if as_json:
        click.echo(json.dumps({"output": str(output), "seconds": seconds, **sizes.to_dict()}, indent=1))
        return
    terminal.show(*of_sizes(sizes), Section(note=f"written to {output} in {seconds:.1f} s"))


def of_sizes(sizes: Sizes) -> Iterator[Section]:
    """Yield the sizes of a packed model's tensors, with zeros and others, and of its files."""
    from compressx.report.section import Column, Section, table

    rows: list[tuple[Value, ...]] = []
    for kind, masked in (("tensors with zeros", True), ("other tensors", False)):
        some = [tensor for tensor in sizes.tensors if tensor.masked == masked]
        dense, packed = (sum(t.bytes for t in some), sum(t.packed_bytes for t in some))
        rows.append((kind, *_shares(dense, packed, sum(t.mask_and_values for t in some))))
    predicted = sum(tensor.mask_and_values for tensor in sizes.tensors)
    rows.append(("files", *_shares(sizes.bytes, sizes.packed_bytes, predicted)))
    megabytes = [Column(name, ".1f") for name in ("dense, MB", "packed, MB")]
    shares = [Column(name, ".2%") for name in ("packed / dense", "masks and values / dense")]
    yield Section(f"Packed: {sizes.folder}", table=table(["", *megabytes, *shares], rows))


def _shares(dense: int, packed: int, predicted: int) -> tuple[Value, ...]:
    return dense / 1e6, packed / 1e6, packed / dense if dense else None, predicted / dense if dense else None
