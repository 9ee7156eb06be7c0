"""Documents of a dataset: text, or chats, of local files, Python's documentation, prompts, or a dataset on the hub.

A file that is missing, cannot be read or holds no text is a `CalibrationError` that names it and the line.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import json
import logging
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, TypeAlias
from unittest.mock import patch

from compressx.data import prompts
from compressx.recipe.sources import DatasetSource
from compressx.runtime.errors import CalibrationError, did_you_mean, one_line, suggestion
from compressx.runtime.machine import free_main_memory
from compressx.runtime.quiet import quiet_libraries

_log = logging.getLogger(__name__)


class Chat(list[Any]):
    """Messages, each a mapping with `role` and `content`, and whatever else the template reads.

    Attributes:
        fields: the other fields of the row, such as `tools`; the template gets those that it takes.
    """

    fields: Mapping[str, Any] = MappingProxyType({})


Document: TypeAlias = str | list[Any]
"""Text, or the messages of a chat."""

_DOCUMENT_FIELDS = ("text", "messages", "conversations")
"""Fields that hold the document when the recipe names none, the first one present."""

_ROLE_OF_SENDER = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}
"""Roles in chat templates of ShareGPT's senders; for others, both have the same name."""

_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of which one is enough: such a message needs no content."""


def document_field(row: Mapping[str, Any], wanted: str | None, where: str) -> str:
    """Return the field of a row's document: `wanted`, or the first of `_DOCUMENT_FIELDS`, if possible not null."""
    if wanted is None and (usual := [name for name in _DOCUMENT_FIELDS if name in row]):
        return next((name for name in usual if row[name] is not None), usual[0])
    if wanted is not None and wanted in row:
        return wanted
    *names, last = _DOCUMENT_FIELDS
    lacks = f"no field {wanted!r}" if wanted is not None else f"no field {', '.join(names)} or {last}"
    valid = did_you_mean(wanted or _DOCUMENT_FIELDS[0], list(row)) or "it has none"
    raise CalibrationError(f"{where}: {lacks}; {valid}" + ("" if wanted or not row else "; name one as field"))


def document(row: Mapping[str, Any], field: str, where: str, *, arrow: bool = False) -> Document | None:
    """Return the text or chat of a row, or None if it has none; from Arrow, None stands for an absent key."""
    place, value = f"{where}: field {field!r}", row[document_field(row, field, where)]
    value = _parsed(value, field, place) if isinstance(value, str) else value
    if value is None or isinstance(read := checked(value, place), str):
        return None if value is None else read
    if not any(message.keys() - {"role"} for message in read):
        return None
    chat, fields = Chat(read), {k: v for k, v in row.items() if k != field}
    chat[:], chat.fields = (_without_nulls(chat), _without_nulls(fields)) if arrow else (chat, fields)
    return chat


def _parsed(text: str, field: str, where: str) -> Any:
    """Return messages that are written as JSON, None for a blank field of messages, and any other text unchanged."""
    may_be_chat = field in _DOCUMENT_FIELDS[1:]
    begins = r"\s*[\[{]" if may_be_chat else r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:"""
    if field == "text" or not re.match(begins, text):
        return text if text.strip() or not may_be_chat else None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where} is not JSON ({error}); expected a list of {{role, content}}") from error


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that are None, at any depth: Arrow gives all rows the same keys."""
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def checked(value: Any, where: str) -> Document:
    """Return a value if it is text or a chat, with ShareGPT's {from, value} as {role, content}.

    Keys that are None are removed, and the text parts of a content are joined.
    """
    if isinstance(value, str):
        return checked_text(value, where)
    if not isinstance(value, list):
        raise CalibrationError(f"{where} is {type(value).__name__}, expected text or a list of {{role, content}}")
    return [_checked_message(message, f"{where}: message {i}") for i, message in enumerate(value)]


def _checked_message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise CalibrationError(f"{where} is {type(given).__name__}, expected {{role, content}}")
    message = {key: value for key, value in given.items() if value is not None}
    if "role" not in message and isinstance(sender := message.get("from"), str):  # ShareGPT's
        names = {"from": "role", "value": "content"}
        message = {names.get(k, k): v for k, v in message.items()} | {"role": _ROLE_OF_SENDER.get(sender, sender)}
    if isinstance(parts := message.get("content"), list):
        texts = [x.get("text") for x in parts if isinstance(x, Mapping) and x.get("type") == "text"]
        if len(texts) < len(parts) or not all(isinstance(x, str) for x in texts):
            raise CalibrationError(f"{where}: 'content' has parts that are not {{type: text, text: ...}}; remove them")
        message["content"] = "".join(map(str, texts))
    needs_no_content = "content" not in message and not {"content", "value", *_INSTEAD_OF_CONTENT}.isdisjoint(given)
    for key in ("role",) if needs_no_content else ("role", "content"):
        if not isinstance(message.get(key), str):
            has = one_line(", ".join(map(str, given))) or "nothing"
            raise CalibrationError(f"{where} has no text in {key!r}, expected {{role, content}}; it has {has}")
        checked_text(message[key], f"{where}: {key!r}")
    return message


def checked_text(text: str, where: str) -> str:
    """Return a text; refuse half of a surrogate pair: from JSON, or bytes of a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is {ascii(text[error.start])[1:-1]}, half of a surrogate pair"
        raise CalibrationError(f"{where}: {half}; remove it") from error
    return text


def checked_documents(value: str | Sequence[Document], name: str) -> list[Document]:
    """Return the documents that a caller passes as an argument; a text alone is one."""
    found = [value] if isinstance(value, str) else list(value)
    if not found:
        raise CalibrationError(f"{name} has no documents; expected texts, or chats as lists of {{role, content}}")
    return [checked(x, f"{name}[{i}]") for i, x in enumerate(found)]


def are_chats(documents: Sequence[Document], where: str = "") -> bool:
    """Return whether documents are chats; refuse chats together with text."""
    chats = [not isinstance(d, str) for d in documents]
    if any(chats) != all(chats):
        raise CalibrationError(f"{where}{sum(chats)} of {len(chats)} documents are chats, the rest text; separate them")
    return any(chats)


def require_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise CalibrationError("the text is chats, but the tokenizer has no chat template; use an instruct model")


def rendered(chats: Sequence[Document], tokenizer: Any) -> list[str]:
    """Turn chats into text by the tokenizer's chat template, which writes special tokens as text."""
    return [rendered_one(chat, tokenizer, f"chat {i} of {len(chats)}") for i, chat in enumerate(chats)]


def rendered_one(chat: Document, tokenizer: Any, which: str, *, answered: bool = True) -> str:
    """Turn a chat into text, as `rendered`; `which` begins an error. Unless `answered`, an answer can follow."""
    require_template(tokenizer)
    try:
        given = _template_fields(getattr(chat, "fields", {}), tokenizer)
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=not answered, **given))
    except Exception as error:  # templates are programs, and raise what they like
        roles = one_line(", ".join(message["role"] for message in chat if isinstance(message, Mapping)))
        raise CalibrationError(
            f"{which} (roles {roles}): the tokenizer's chat template refuses it "
            f"({type(error).__name__}: {one_line(str(error))[:300]}); remove or change such chats"
        ) from error
    return checked_text(text, which)


_RESERVED = ("messages", "add_generation_prompt", "conversation", "chat_template", "tokenize")
"""Variables of chat templates that no field of a row sets."""


def _template_fields(fields: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the fields of a row that the chat template names, those in `chat_template_kwargs` first."""
    names = {*re.findall(r"\w+", str(tokenizer.chat_template))} - {*tokenizer.special_tokens_map, *_RESERVED}
    given = {**fields, **(_from_json(fields.get("chat_template_kwargs")) or {})}
    given |= {key: _from_json(given[key]) or None for key in ("tools", "documents") if key in names & given.keys()}
    return {k: v for k, v in given.items() if k in names and v is not None}


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value


Rows: TypeAlias = Iterator[tuple[str, Mapping[str, Any]]]
"""The rows of files, each with its file and line for messages."""

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""What Python itself decompresses while it is read."""

_MEMORY_OF_A_BYTE_READ = 32
"""Bytes of memory that a byte of a line, or of a file that is read whole, can take: JSON of `[],[],` takes 21."""

_SUFFIXES = {"text": "txt", "json": "jsonl"}

_PARQUET = "parquet files are read by {name: FOLDER}, the folder that they are in"
_ROWS = (
    "holds rows of fields; convert it, such as with pandas' read_csv and to_json(FILE, orient='records', lines=True), "
    "and write {json: FILE, field: COLUMN}"
)
_OTHER_KINDS = {
    **dict.fromkeys((".zst", ".zip"), "is compressed; decompress it first"),
    **dict.fromkeys((".csv", ".tsv"), _ROWS),
    ".parquet": f"holds rows of fields; {_PARQUET}",
}
"""Files that are refused, by how their names end: read as text, they would calibrate on braces and field names."""


def matching_files(pattern: str, key: str) -> list[Path]:
    """Return the files that match a path or glob, sorted; `key` is the recipe's."""
    expanded, message = Path(pattern).expanduser(), ""
    paths = [expanded]  # before globbing: a file name may contain brackets
    if not expanded.is_file():
        paths = sorted(Path(p) for p in glob.glob(str(expanded), recursive=True) if Path(p).is_file())  # noqa: PTH207 - ** and absolute patterns
    if not paths and expanded.is_dir():
        inside = str(Path(pattern) / f"**/*.{_SUFFIXES[key]}")
        message = f"{pattern!r} is a folder; name the files in it, such as {inside!r}"
    elif not paths:
        near = suggestion(expanded.name, [p.name for p in expanded.parent.glob("*")])
        message = f"no file matches {pattern!r}; {near}looked in {Path.cwd()}"
    rows = {".jsonl": "holds rows of fields; write {json: FILE} for them"} if key == "text" else {}
    for path in paths:
        if why := (_OTHER_KINDS | rows).get(suffix(path)):
            message = message or f"{path} {why}"
    if message:
        raise CalibrationError(f"{key}: {message}")
    return paths


def suffix(path: Path) -> str:
    """Return how a file's name ends, in lower case: `.jsonl` for `a.jsonl` and for `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix.lower() in _OPENERS else path).suffix.lower()


def read_text(path: Path) -> str:
    """Read a text file with LF line ends: CR LF changes tokens, and lowers perplexity on WikiText-2 by 3%."""
    try:
        with _opened(path) as file:
            text = _read_bounded(file.read, path, "use a part of it").decode("utf-8")
    except UnicodeDecodeError as error:
        told = f"{path}: not UTF-8 at byte {error.start} ({error.reason}); convert it, for example with iconv -t utf-8"
        raise CalibrationError(told) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def read_rows(path: Path) -> Rows:
    """Read the objects of a JSON array, or of the lines of any other file, which are read one at a time."""
    with _opened(path) as file:
        array = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        file.seek(0)
        if array:
            rows = _json(_read_bounded(file.read, path, "use JSON lines, which are read one by one"), path, 1)
            yield from (_row(row, f"{path}[{i}]") for i, row in enumerate(rows))
            return
        number = 1
        while line := _read_bounded(file.readline, f"{path}:{number}", "expected one object per line"):
            if line.strip():
                yield _row(_json(line, path, number), f"{path}:{number}")
            number += 1


def _row(row: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(row, dict):
        raise CalibrationError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return where, row


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if its name says that it is compressed."""
    try:
        with _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # damaged archives have no strerror
        raise CalibrationError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _refuse_large(what: object, size: int, limit: int, advice: str) -> None:
    """Refuse text of more bytes than there is memory for, such as what a small archive expands to."""
    if size > limit:
        raise CalibrationError(f"{what}: {size} bytes of text or more, and there is free memory for {limit}; {advice}")


def _read_bounded(read: Callable[[int], bytes], what: object, advice: str) -> bytes:
    """Read a file or a line, if there is memory for what Python makes of it."""
    limit = free_main_memory() // _MEMORY_OF_A_BYTE_READ
    piece = read(limit + 1)
    _refuse_large(what, len(piece), limit, advice)
    return piece


def _json(text: bytes, path: Path, line: int) -> Any:
    """Return what JSON that begins at a line of a file says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and a thousand brackets
        where = f"{path}:{line + getattr(error, 'lineno', 1) - 1}"
        raise CalibrationError(f"{where}: not JSON ({error}); expected one object per line, or one array") from error


Purpose: TypeAlias = Literal["calibration", "evaluation"]

_OFFLINE = "without network access, use local files ({text: PATH} or {json: PATH}) or python-docs"

_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)

_MEMORY_OF_A_BYTE_KEPT = 80
"""Bytes of memory that a byte of text takes: as a document, and while all documents are tokenized as one text."""


class UnreachableError(CalibrationError):
    """The hub cannot be reached, for any dataset."""


_SHORT_NAMES: Mapping[str, tuple[str, str | None]] = {
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "c4": ("allenai/c4", None),
}
"""Datasets of the hub, each with its configuration."""

_BUILT_IN = {"python-docs": "it comes with Python", "prompts": "the program writes it"}
_PROMPTS = {"calibration": (prompts.CALIBRATION, 8192), "evaluation": (prompts.EVALUATION, 1024)}

# A shard of C4 has about 150 million tokens; 8192 documents (four million tokens) give 1900 sequences of 2048 to draw
# from. SparseGPT evaluates on the first 1100 validation documents. With a configuration, datasets would expect all
# 1024 shards.
_C4: Mapping[Purpose, tuple[str, int]] = {"calibration": ("train", 8192), "evaluation": ("validation", 1100)}
_C4_SHARDS = {"train": "en/c4-train.00000-of-01024.json.gz", "validation": "en/c4-validation.00000-of-00008.json.gz"}


def documents(source: DatasetSource, purpose: Purpose) -> list[Document]:
    """Read the documents of a dataset: files of text, rows of JSON or of a hub dataset, or those of a short name.

    The purpose selects the split. The order is fixed; all are text or all are chats. Some may be empty, such as the
    blank rows of WikiText.
    """
    _check_keys(source)
    found: Iterable[Document | None]
    if source.text is not None:
        described, found = f"text {source.text!r}", map(read_text, matching_files(source.text, "text"))
    elif source.json_path is not None:
        described, found = f"json {source.json_path!r}", _of_rows(source.json_path, source.field)
    elif source.name == "python-docs":
        described, found = "python-docs", _python_docs(purpose)
    elif source.name == "prompts":
        described, found = "prompts", prompts.documents(*_PROMPTS[purpose])
    else:
        described, found = f"dataset {source.name!r}", _hub_rows(source, purpose)
    read, size, limit, empty = list[Document](), 0, free_main_memory() // _MEMORY_OF_A_BYTE_KEPT, 0
    for each in found:
        size += 64 + len(each if isinstance(each, str) else str(each))  # an empty document takes memory, too
        size += len(str(getattr(each, "fields", ""))) // 16  # little of it becomes tokens
        _refuse_large(described, size, limit, "name fewer files, or a part of them")
        empty += each is None
        read += [] if each is None else [each]
    if not any(d.strip() if isinstance(d, str) else d for d in read):
        count = len(read) + empty
        raise CalibrationError(f"{described} has no text for {purpose}: all of its {count} documents are empty")
    if empty:
        _log.warning("%s: %d of %d rows have no text and are left out", described, empty, len(read) + empty)
    are_chats(read, f"{described}: ")  # refuses both in one
    return read


def texts(source: DatasetSource, purpose: Purpose) -> list[str]:
    """Read the documents of a dataset; refuse chats."""
    read = documents(source, purpose)
    if are_chats(read):
        raise CalibrationError("the dataset holds chats; expected text, whose words and bytes are counted")
    return [str(d) for d in read]


def check_dataset(source: DatasetSource) -> bool:
    """Check a dataset by the first row of its files at most; return whether it holds chats, as far as that shows."""
    source = (source.generate and source.generate.prompts) or source
    if (paths := local_files(source)) and not any(path.stat().st_size for path in paths):
        raise CalibrationError(f"{(source.text or source.json_path)!r} has no text: all {len(paths)} files are empty")
    if source.name is not None:
        _check_name(source.name)
        _check_keys(source)
    if source.json_path is None:
        return False
    return not isinstance(next((d for d in _of_rows(source.json_path, source.field) if d is not None), ""), str)


def local_files(source: DatasetSource) -> list[Path]:
    """Return the local files that a dataset is read from; none for one of the hub or of a package."""
    source = (source.generate and source.generate.prompts) or source
    patterns = {"text": source.text, "json": source.json_path}
    return [path for key, pattern in patterns.items() if pattern is not None for path in matching_files(pattern, key)]


def _of_rows(pattern: str, wanted: str | None) -> Iterator[Document | None]:
    """Yield the document of each row of the JSON files; the first row decides the field, if none is wanted."""
    field = None
    for path in matching_files(pattern, "json"):
        for where, row in read_rows(path):
            field = field or document_field(row, wanted, where)
            yield document(row, field, where)


def _check_name(name: str) -> None:
    path, short, message = Path(name).expanduser(), [*_SHORT_NAMES, *_BUILT_IN], ""
    if name in short or (name and path.is_dir()):
        return
    if path.is_file() or name.startswith((".", "/", "~")) or suffix(path) in (".txt", ".json", ".jsonl"):
        what = "file" if path.is_file() else "path"
        key = "json" if suffix(path) in (".json", ".jsonl") else "text"
        advice = _PARQUET if suffix(path) == ".parquet" else f"write {{{key}: {name}}}"
        message = f"dataset {name!r} is a {what}, not the name of a dataset; {advice}"
    elif not _HUB_ID.fullmatch(name):  # which all datasets have, the old ones too: stanfordnlp/imdb
        near = did_you_mean(name, short)
        message = f"no dataset {name!r}; {near}, OWNER/NAME on the hub, {{text: PATH}} or {{json: PATH}}"
    if message:
        raise CalibrationError(message)


def _check_keys(source: DatasetSource) -> None:
    """Refuse keys that a dataset with a short name, or a saved one, does not have."""
    why = ""
    keys: tuple[str, ...] = ("config", "split", "revision")
    if source.name in _BUILT_IN:
        why, keys = _BUILT_IN[source.name], (*keys, "field")
    elif source.name == "c4":
        why, keys = "for another one use {name: allenai/c4}", ("config",)
    elif _is_saved_dataset(source.name or ""):
        why = "it is one split, as save_to_disk wrote it"
    if why and (given := [key for key in keys if getattr(source, key) is not None]):
        raise CalibrationError(f"dataset {source.name!r} takes no {', '.join(given)}: {why}")


def _is_saved_dataset(name: str) -> bool:
    """Return whether a folder is one `datasets.Dataset` that `save_to_disk` wrote, which load_dataset refuses."""
    return (Path(name) / "state.json").is_file() and (Path(name) / "dataset_info.json").is_file()


def as_dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows, all with the same keys, as an in-memory `datasets.Dataset`."""
    import datasets

    return datasets.Dataset.from_list([*rows])


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


def _hub_rows(source: DatasetSource, purpose: Purpose) -> list[Document | None]:
    name = source.name or ""
    usual, first_rows = _C4[purpose] if name == "c4" else ("train" if purpose == "calibration" else "test", None)
    split = source.split or usual
    path, config = _SHORT_NAMES.get(name, (name, None))
    config = source.config or config
    where = f"dataset {name!r} (" + (f"{config}, " if config else "") + f"split {split!r})"
    unreachable = ""
    try:
        with quiet_libraries(), nullcontext("") if Path(name).is_dir() else hub_or_cache() as unreachable:
            rows = _load(path, config, split, source.revision, first_rows)
            first: dict[str, Any] = next(iter(rows), {})
            if not first:
                return []
            columns = [field := document_field(first, source.field, where)]
            if not isinstance(document(first, field, f"{where} row 0", arrow=True), str):  # no pictures and no sound
                columns = [n for n in first if not hasattr((rows.features or {}).get(n), "decode_example")]
            found = enumerate(rows.select_columns(columns))
            return [document(row, field, f"{where} row {i}", arrow=True) for i, row in found]
    except CalibrationError:
        raise
    except Exception as error:  # datasets lets any exception of its hub client, file systems and parsers through
        kind = UnreachableError if unreachable else CalibrationError
        why = f"could not be fetched ({_reason(error)}); check its name, config and split, or the connection"
        if unreachable:
            why = f"is not in the cache, and the hub cannot be reached ({unreachable}); {_OFFLINE}"
        raise kind(f"{where} {why}") from error


@contextmanager
def hub_or_cache() -> Iterator[str]:
    """Yield why the hub cannot be reached, or nothing; then `datasets` reads its cache at once, without retries."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10.0)
    except Exception as error:  # noqa: BLE001 - of whichever HTTP library
        with patch.object(constants, "HF_HUB_OFFLINE", True), patch("datasets.config.HF_HUB_OFFLINE", True):
            yield _reason(error)
    else:
        yield ""


def _reason(error: Exception) -> str:
    return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])


def _load(path: str, config: str | None, split: str, revision: str | None, first: int | None) -> Any:
    """Load a split; its `first` documents, of C4, are read from one shard."""
    import datasets

    if _is_saved_dataset(path):
        return datasets.load_from_disk(path)
    if first is None:
        return datasets.load_dataset(path, config, split=split, revision=revision)
    shards = {split: _C4_SHARDS[split]} if split in _C4_SHARDS else _C4_SHARDS
    return datasets.load_dataset(path, data_files=shards, streaming=True, split=split, revision=revision).take(first)
