"""Read the documents of a dataset: text files, JSON lines, or a dataset on the hub."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from compressx.recipe.sources import DatasetSource
from compressx.runtime.errors import CalibrationError, did_you_mean, nearest
from compressx.runtime.quiet import quiet_libraries

Purpose: TypeAlias = Literal["calibration", "evaluation"]

_OFFLINE = "without network access, use local files ({text: PATH} or {json: PATH, field: NAME}) or python-docs"


@dataclass(frozen=True)
class _HubDataset:
    """A dataset on the hub or in a local folder, and the part of it to read.

    Attributes:
        path: hub id or folder.
        config: configuration, or None for the default one.
        splits: default split by purpose.
        shards: one file to read, by split; None reads the whole split.
        limits: number of documents to read, by purpose.
    """

    path: str
    config: str | None
    splits: Mapping[Purpose, str]
    shards: Mapping[str, str] | None = None
    limits: Mapping[Purpose, int] | None = None


_SHORT_NAMES = {
    "wikitext": _HubDataset("Salesforce/wikitext", "wikitext-2-raw-v1", {"calibration": "train", "evaluation": "test"}),
    # A shard has about 150 million tokens; 8192 documents (four million tokens) give 1900 windows of 2048 to draw from.
    # SparseGPT evaluates on the first 1100 validation documents. With a configuration, datasets would expect all 1024
    # shards.
    "c4": _HubDataset(
        "allenai/c4",
        None,
        {"calibration": "train", "evaluation": "validation"},
        shards={
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
        limits={"calibration": 8192, "evaluation": 1100},
    ),
}


def documents(source: DatasetSource, purpose: Purpose) -> list[str]:
    """Read the documents of a dataset.

    Args:
        source: `text` gives one document per file, `json` one per line, a hub dataset one per row, `python-docs` one
            per topic of `pydoc_data.topics`. Paths are relative to the working directory.
        purpose: selects the default split of a hub dataset (`train` or `test`) and the topics of `python-docs`.

    Returns:
        The documents in a fixed order. Some may be empty, such as the blank rows of WikiText.

    Raises:
        CalibrationError: a missing file, dataset or field, invalid UTF-8 or JSON, or no text at all.
    """
    _check_keys(source)
    if source.text is not None:
        described, read = f"text {source.text!r}", [_text(path) for path in _matching(source.text, "text")]
    elif source.json_path is not None:
        described = f"json {source.json_path!r}"
        read = [d for path in _matching(source.json_path, "json") for d in _json_lines(path, source.field or "text")]
    elif source.name == "python-docs":
        described, read = "python-docs", _python_docs(purpose)
    else:
        described, read = f"dataset {source.name!r}", _hub_rows(source, purpose)
    if not any(d.strip() for d in read):
        raise CalibrationError(f"{described} has no text for {purpose}: all of its {len(read)} documents are empty")
    return read


def check_dataset(source: DatasetSource) -> None:
    """Check a dataset without reading it or accessing the hub.

    Raises:
        CalibrationError: a path or glob that matches no file, files that are all empty, the name of a file, or a
            misspelt short name.
    """
    for key, pattern in (("text", source.text), ("json", source.json_path)):
        if pattern is not None:
            paths = _matching(pattern, key)
            if not any(path.stat().st_size for path in paths):
                empty = "the file is empty" if len(paths) == 1 else f"all {len(paths)} files are empty"
                raise CalibrationError(f"{key}: {pattern!r} has no text: {empty}")
    if source.name is not None:
        _check_name(source.name)
        _check_keys(source)


def _check_name(name: str) -> None:
    short = [*_SHORT_NAMES, "python-docs"]
    path = Path(name).expanduser()
    if path.is_file():
        source = f"{{json: {name}, field: NAME}}" if path.suffix in {".json", ".jsonl"} else f"{{text: {name}}}"
        raise CalibrationError(f"dataset {name!r} is a file, not the name of a dataset; write {source}")
    # A few old datasets on the hub have no owner in their name, so only close misspellings are refused.
    if name not in short and "/" not in name and not path.is_dir() and nearest(name, short, cutoff=0.8):
        raise CalibrationError(
            f"no dataset {name!r}; {did_you_mean(name, short)}, OWNER/NAME on the hub, {{text: PATH}} or {{json: PATH, "
            "field: NAME}"
        )


def _check_keys(source: DatasetSource) -> None:
    """Refuse keys that a dataset with a short name does not have."""
    if source.name == "python-docs":
        if given := [n for n in ("config", "split", "revision", "field") if getattr(source, n) is not None]:
            raise CalibrationError(f"dataset 'python-docs' takes no {', '.join(given)}: it comes with Python")
    elif source.config is not None and (short := _SHORT_NAMES.get(source.name or "")) and short.shards is not None:
        raise CalibrationError(f"dataset {source.name!r} takes no config; for another one use {{name: {short.path}}}")


def as_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows, all with the same keys, as an in-memory `datasets.Dataset`."""
    import datasets

    return datasets.Dataset.from_list([*rows])


def _matching(pattern: str, key: str) -> list[Path]:
    """Return the files that match a path or glob, sorted."""
    expanded = Path(pattern).expanduser()
    if expanded.is_file():  # before globbing: a file name may contain brackets
        return [expanded]
    paths = sorted(Path(p) for p in glob.glob(str(expanded), recursive=True) if Path(p).is_file())  # noqa: PTH207 - ** and absolute patterns
    if not paths and expanded.is_dir():
        inside = str(Path(pattern) / ("**/*.txt" if key == "text" else "**/*.jsonl"))
        raise CalibrationError(f"{key}: {pattern!r} is a folder; name the files in it, such as {inside!r}")
    if not paths:
        beside = nearest(expanded.name, [p.name for p in expanded.parent.glob("*")])
        raise CalibrationError(f"{key}: no file matches {pattern!r}; {beside}looked in {Path.cwd()}")
    return paths


def _text(path: Path) -> str:
    """Read a text file with LF line ends: CR LF changes tokens, and lowers perplexity on WikiText-2 by 3%."""
    return _decoded(path).replace("\r\n", "\n").replace("\r", "\n")


def _decoded(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path}: not UTF-8 at byte {error.start} ({error.object[error.start]:#04x}, {error.reason}); convert it, "
            "for example with iconv -t utf-8"
        ) from error
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror}") from error


def _json_lines(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CalibrationError(f"{path}:{number}: not JSON ({error}); expected one object per line") from error
        if not isinstance(row, dict):
            raise CalibrationError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        yield _text_of(row, field, f"{path}:{number}")


def _text_of(row: Mapping[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise CalibrationError(f"{where}: no field {field!r}; {did_you_mean(field, row) or 'it has none'}")
    if not isinstance(row[field], str):
        raise CalibrationError(f"{where}: field {field!r} is {type(row[field]).__name__}, expected text")
    return str(row[field])


def _python_docs(purpose: Purpose) -> list[str]:
    """Split the topics by the hash of their names, so that the split is the same for every Python version.

    Some topics quote others at length, so paragraphs of evaluation topics are left out of calibration.
    """
    from pydoc_data.topics import topics

    held_out = {name for name in topics if int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 5 == 0}
    if purpose == "evaluation":
        return [topics[name] for name in sorted(held_out)]
    quoted = {p.strip() for name in held_out for p in topics[name].split("\n\n")}
    return [
        "\n\n".join(p for p in topics[name].split("\n\n") if p.strip() not in quoted)
        for name in sorted(set(topics) - held_out)
    ]


def _hub_rows(source: DatasetSource, purpose: Purpose) -> list[str]:
    name, field = source.name or "", source.field or "text"
    dataset = _hub_dataset(source)
    split = source.split or dataset.splits[purpose]
    where = f"dataset {name!r} (" + (f"{dataset.config}, " if dataset.config else "") + f"split {split!r})"
    try:
        with quiet_libraries():
            rows = _load(dataset, split, source, purpose)
            columns = list(next(iter(rows), {}))
            values = [row[field] for row in rows.select_columns([field])] if field in columns else []
    except Exception as error:  # datasets lets any exception of its hub client, file systems and parsers through
        reason = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])
        short = "" if name in _SHORT_NAMES else f" ({did_you_mean(name, [*_SHORT_NAMES, 'python-docs'])}, or a hub id)"
        raise CalibrationError(
            f"{where} could not be fetched ({reason}); check its name{short}, config, split and the connection; "
            f"{_OFFLINE}"
        ) from error
    if columns and field not in columns:
        raise CalibrationError(f"{where}: no field {field!r}; {did_you_mean(field, columns)}")
    return [_text_of({field: value}, field, f"{where} row {i}") for i, value in enumerate(values)]


def _hub_dataset(source: DatasetSource) -> _HubDataset:
    name = source.name or ""
    dataset = _SHORT_NAMES.get(name, _HubDataset(name, None, {"calibration": "train", "evaluation": "test"}))
    return dataset if source.config is None else replace(dataset, config=source.config)


def _load(dataset: _HubDataset, split: str, source: DatasetSource, purpose: Purpose) -> Any:
    import datasets

    arguments: dict[str, Any] = {"split": split, "revision": source.revision}
    if dataset.shards is None:
        return datasets.load_dataset(dataset.path, dataset.config, **arguments)
    shards = {split: dataset.shards[split]} if split in dataset.shards else dict(dataset.shards)
    rows = datasets.load_dataset(dataset.path, data_files=shards, streaming=True, **arguments)
    return rows.take(dataset.limits[purpose]) if dataset.limits else rows
