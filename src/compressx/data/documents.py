"""Documents of a dataset: text, or chats, of local files, Python's documentation, or a dataset on the hub."""

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
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal, TypeAlias
from unittest.mock import patch

from compressx.recipe.sources import DatasetSource
from compressx.runtime.errors import CalibrationError, did_you_mean, one_line, suggestion
from compressx.runtime.machine import free_main_memory
from compressx.runtime.quiet import quiet_libraries

_log = logging.getLogger(__name__)


class Chat(list[Any]):
    """Messages, each a mapping with `role` and `content`, and whatever else the template reads.

    Attributes:
        beside: the other fields of the row, such as `tools`; the template gets those that it takes.
    """

    beside: Mapping[str, Any] = MappingProxyType({})


Document: TypeAlias = str | list[Any]
"""Text, or the messages of a chat."""

_USUAL = ("text", "messages", "conversations")
"""Fields that hold the document when the recipe names none, the first one present."""

_SENDERS = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}
"""Who speaks in ShareGPT's conversations, by the roles of chat templates; the others have the same names there."""

_UNSPOKEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields beside which a message needs no content."""


def field_among(row: Mapping[str, Any], wanted: str | None, where: str) -> str:
    """Return the field that holds the document of a row: `wanted`, or the first usual one, if possible not null.

    Raises:
        CalibrationError: there is none.
    """
    if wanted is None and (usual := [name for name in _USUAL if name in row]):
        return next((name for name in usual if row[name] is not None), usual[0])
    if wanted is not None and wanted in row:
        return wanted
    lacks = f"no field {wanted!r}" if wanted is not None else f"no field {', '.join(_USUAL[:-1])} or {_USUAL[-1]}"
    valid = did_you_mean(wanted or _USUAL[0], list(row)) or "it has none"
    raise CalibrationError(f"{where}: {lacks}; {valid}" + ("" if wanted or not row else "; name one as field"))


def document(row: Mapping[str, Any], field: str, where: str, *, arrow: bool = False) -> Document | None:
    """Return the text or chat of a row, or None if it has none; of `arrow`, None stands for an absent key.

    Raises:
        CalibrationError: the field is missing, or is neither text nor a list of {role, content}.
    """
    place, value = f"{where}: field {field!r}", row[field_among(row, field, where)]
    value = _parsed(value, field, place) if isinstance(value, str) else value
    if value is None or isinstance(read := checked(value, place), str):
        return None if value is None else read
    if not any(message.keys() - {"role"} for message in read):
        return None
    chat, beside = Chat(read), {k: v for k, v in row.items() if k != field}
    chat[:], chat.beside = (_present(chat), _present(beside)) if arrow else (chat, beside)
    return chat


def _parsed(text: str, field: str, where: str) -> Any:
    """Return the messages that a text is in JSON, None of a blank column of messages, and any other text as it is."""
    ours = field in _USUAL[1:]
    begins = r"\s*[\[{]" if ours else r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:"""
    if field == "text" or not re.match(begins, text):
        return text if text.strip() or not ours else None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where} is not JSON ({error}); expected a list of {{role, content}}") from error


def _present(value: Any) -> Any:
    """Return a value without the keys that are None, at any depth: Arrow gives all rows the same keys."""
    if isinstance(value, Mapping):
        return {k: _present(v) for k, v in value.items() if v is not None}
    return [_present(v) for v in value] if isinstance(value, list) else value


def checked(value: Any, where: str) -> Document:
    """Return a value if it is text or a chat, with ShareGPT's {from, value} as {role, content}.

    A key that is None is as one that is absent, and parts of text are one text.

    Raises:
        CalibrationError: it is neither, or text that no tokenizer reads.
    """
    if isinstance(value, str):
        return sound(value, where)
    if not isinstance(value, list):
        raise CalibrationError(f"{where} is {type(value).__name__}, expected text or a list of {{role, content}}")
    for i, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise CalibrationError(f"{where}: message {i} is {type(message).__name__}, expected {{role, content}}")
    return [_checked_message(message, f"{where}: message {i}") for i, message in enumerate(value)]


def _checked_message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    message = _renamed({key: value for key, value in given.items() if value is not None})
    if isinstance(parts := message.get("content"), list):
        for i, part in enumerate(parts):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise CalibrationError(
                    f"{where}: part {i} of 'content' is {one_line(str(kind))}, expected {{type: text, text: ...}}; "
                    "remove such rows"
                )
        message["content"] = "".join(part["text"] for part in parts)
    silent = "content" not in message and not {"content", "value", *_UNSPOKEN}.isdisjoint(given)
    for key in ("role",) if silent else ("role", "content"):
        if not isinstance(message.get(key), str):
            found = f", but {type(message[key]).__name__}" if key in message else ""
            raise CalibrationError(
                f"{where} has no text in {key!r}{found}, expected {{role, content}} or {{from, value}}"
                f"; it has {one_line(', '.join(map(str, given))) or 'nothing'}"
            )
        sound(message[key], f"{where}: {key!r}")
    return message


def sound(text: str, where: str) -> str:
    """Return a text; refuse half of a surrogate pair: from JSON, or bytes of a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise CalibrationError(
            f"{where}: character {error.start} is {half}, half of a surrogate pair, which is not text; remove it, or "
            "write U+FFFD in its place"
        ) from error
    return text


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of ShareGPT's, {from, value}, as {role, content}, and any other as it is."""
    if "role" in message or not isinstance(sender := message.get("from"), str):
        return message
    names = {"from": "role", "value": "content"}
    return {names.get(key, key): value for key, value in message.items()} | {"role": _SENDERS.get(sender, sender)}


def checked_documents(value: str | Sequence[Document], name: str) -> list[Document]:
    """Return the documents that a caller passes as an argument; a text alone is one.

    Raises:
        CalibrationError: there are none, or one is neither text nor a chat; the message has the argument's name.
    """
    found = [value] if isinstance(value, str) else list(value)
    if not found:
        raise CalibrationError(f"{name} has no documents; expected texts, or chats as lists of {{role, content}}")
    for i, x in enumerate(found):
        if isinstance(x, Mapping):
            raise CalibrationError(
                f"{name}[{i}] is a row with {', '.join(map(str, x)) or 'no fields'}, expected text or a chat; give one "
                "field of each row"
            )
    return [checked(x, f"{name}[{i}]") for i, x in enumerate(found)]


def hold_chats(documents: Sequence[Document]) -> bool:
    """Return whether documents are chats.

    Raises:
        CalibrationError: some are, and some are text.
    """
    chats = [not isinstance(d, str) for d in documents]
    if any(chats) != all(chats):
        raise CalibrationError(
            f"{sum(chats)} of {len(chats)} documents are chats and the others are text; put them in files of their own "
            "and mix them with datasets"
        )
    return any(chats)


def require_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        CalibrationError: it has none.
    """
    if not tokenizer.chat_template:
        raise CalibrationError(
            "the dataset holds chats, but the tokenizer has no chat template; use an instruct model, or text"
        )


def rendered(chats: Sequence[Document], tokenizer: Any) -> list[str]:
    """Turn chats into text by the tokenizer's chat template, which writes special tokens as text.

    Raises:
        CalibrationError: no template, or one that refuses a chat, such as Gemma's a system message.
    """
    texts = [rendered_one(chat, tokenizer, f"chat {i} of {len(chats)}") for i, chat in enumerate(chats)]
    fields = {str(k) for c in chats for x in (getattr(c, "beside", {}), *c) for k in x} - {"chat_template_kwargs"}
    if unread := fields - {*re.findall(r"\w+", str(tokenizer.chat_template))}:
        _log.info("the chat template does not name these fields of rows: %s", one_line(", ".join(sorted(unread))))
    return texts


def rendered_one(chat: Document, tokenizer: Any, which: str, *, answered: bool = True) -> str:
    """Turn a chat into text, as `rendered` does; `which` begins an error; not `answered`, an answer is begun."""
    require_template(tokenizer)
    try:
        given = _taken(getattr(chat, "beside", {}), tokenizer)
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=not answered, **given))
    except Exception as error:  # templates are programs, and raise what they like
        roles = one_line(", ".join(message["role"] for message in chat if isinstance(message, Mapping)))
        raise CalibrationError(
            f"{which} (roles {roles}): the tokenizer's chat template refuses it "
            f"({type(error).__name__}: {one_line(str(error))[:300]}); remove or change such chats"
        ) from error
    return sound(text, which)


_OURS = ("messages", "add_generation_prompt", "conversation", "chat_template", "tokenize")
"""What no field of a row replaces."""


def _taken(beside: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the fields of a row that the chat template takes, those in `chat_template_kwargs` first.

    Raises:
        ValueError: `tools`, `documents` or `chat_template_kwargs` is text, but not JSON.
    """
    given = {**beside, **(_from_json(beside.get("chat_template_kwargs")) or {})}
    names = _variables(tokenizer.get_chat_template(None, given.get("tools") or None))
    lists = {key: _from_json(given.pop(key)) or None for key in ("tools", "documents") if key in names & given.keys()}
    own = {*tokenizer.special_tokens_map, *_OURS}
    return {k: v for k, v in (given | lists).items() if k in names - own and v is not None}


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value


@lru_cache
def _variables(template: str) -> set[str]:
    """Return the names that a chat template reads and does not set."""
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))


Rows: TypeAlias = Iterator[tuple[str, Mapping[str, Any]]]
"""The rows of files, each with its place for messages."""

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""What Python itself decompresses while it is read."""
_COMPRESSED = (*_OPENERS, ".zst", ".zip")

_OF_ONE_PIECE = 32
"""Bytes of memory that a byte of a line, or of a file that is read whole, can take: JSON of `[],[],` takes 21."""

_SUFFIXES = {"text": "txt", "json": "jsonl"}

_PARQUET = "parquet files are read by {name: FOLDER}, the folder that they are in"


def matching(pattern: str, key: str) -> list[Path]:
    """Return the files that match a path or glob, sorted; `key` is the recipe's.

    Raises:
        CalibrationError: no file matches, the pattern names a folder, or a file is of another kind by its name.
    """
    expanded = Path(pattern).expanduser()
    if expanded.is_file():  # before globbing: a file name may contain brackets
        return _plain([expanded], key)
    paths = sorted(Path(p) for p in glob.glob(str(expanded), recursive=True) if Path(p).is_file())  # noqa: PTH207 - ** and absolute patterns
    if not paths and expanded.is_dir():
        inside = str(Path(pattern) / f"**/*.{_SUFFIXES[key]}")
        raise CalibrationError(f"{key}: {pattern!r} is a folder; name the files in it, such as {inside!r}")
    if not paths:
        beside = suggestion(expanded.name, [p.name for p in expanded.parent.glob("*")])
        raise CalibrationError(f"{key}: no file matches {pattern!r}; {beside}looked in {Path.cwd()}")
    return _plain(paths, key)


def _plain(paths: list[Path], key: str) -> list[Path]:
    """Refuse files of another kind: of rows as `text`, braces, quotes and names of fields would be calibrated on."""
    for path in paths:
        outer = path.suffix.lower()
        if outer in _COMPRESSED and outer not in _OPENERS:
            raise CalibrationError(f"{key}: {path} is compressed; decompress it first")
        if suffix(path) in (".csv", ".tsv"):
            raise CalibrationError(
                f"{key}: {path} holds rows of fields; convert it, such as with pandas' read_csv and to_json(FILE, "
                "orient='records', lines=True), and write {json: FILE, field: COLUMN}"
            )
        if suffix(path) == ".parquet":
            raise CalibrationError(f"{key}: {path} holds rows of fields; {_PARQUET}")
        if suffix(path) == ".jsonl" and key == "text":
            raise CalibrationError(f"text: {path} holds rows of fields; write {{json: {path}}} for them")
    return paths


def suffix(path: Path) -> str:
    """Return how a file's name ends, in lower case: `.jsonl` for `a.jsonl` and for `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix.lower() in _OPENERS else path).suffix.lower()


def read_text(path: Path) -> str:
    """Read a text file with LF line ends: CR LF changes tokens, and lowers perplexity on WikiText-2 by 3%."""
    return _decoded(path, _bytes(path)).replace("\r\n", "\n").replace("\r", "\n")


def read_rows(path: Path) -> Rows:
    """Read the rows of a JSON file, one after the other.

    Raises:
        CalibrationError: a file that cannot be read or parsed, or a row that is no object; with its place.
    """
    for where, row in _json_rows(path):
        if not isinstance(row, dict):
            raise CalibrationError(f"{where}: expected a JSON object, got {type(row).__name__}")
        yield where, row


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed if its name says that it is compressed."""
    try:
        with _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # damaged archives have no strerror
        raise CalibrationError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def refuse_large(what: object, size: int, most: int, advice: str) -> None:
    """Refuse text of more bytes than there is memory for, such as what a small archive expands to."""
    if size > most:
        raise CalibrationError(f"{what}: {size} bytes of text or more, and there is free memory for {most}; {advice}")


def _bytes(path: Path) -> bytes:
    most = free_main_memory() // _OF_ONE_PIECE
    with _opened(path) as file:
        content = file.read(most + 1)
    refuse_large(path, len(content), most, "use a part of it, or JSON lines, which are read one by one")
    return content


def _decoded(path: Path, content: bytes, start: int = 0) -> str:
    """Decode part of a file that begins at byte `start`."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path}: not UTF-8 at byte {start + error.start} ({error.object[error.start]:#04x}, {error.reason}); "
            "convert it, for example with iconv -t utf-8"
        ) from error


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the items of an array, or the lines of any other file, which are read one at a time."""
    with _opened(path) as file:
        if file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            items: list[Any] = _json(_decoded(path, _bytes(path)), path, 1)
            yield from ((f"{path}[{i}]", item) for i, item in enumerate(items))
            return
        start, most = file.seek(0), free_main_memory() // _OF_ONE_PIECE
        for number, line in enumerate(iter(lambda: file.readline(most + 1), b""), start=1):
            refuse_large(f"{path}:{number}", len(line), most, "expected one object per line")
            if text := _decoded(path, line, start).strip():
                yield f"{path}:{number}", _json(text, path, number)
            start += len(line)


def _json(text: str, path: Path, line: int) -> Any:
    """Return what JSON that begins at a line of a file says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and a thousand brackets
        where = f"{path}:{line + getattr(error, 'lineno', 1) - 1}"
        raise CalibrationError(
            f"{where}: not JSON ({error}); expected one object per line, or one array of objects"
        ) from error


Purpose: TypeAlias = Literal["calibration", "evaluation"]

_OFFLINE = "without network access, use local files ({text: PATH} or {json: PATH}) or python-docs"

_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)


_OF_TOKENS = 80
"""Bytes of memory that a byte of text takes as documents, and where all of it is tokenized as one."""


class UnreachableError(CalibrationError):
    """The hub cannot be reached, for any dataset."""


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
        shards={"train": "en/c4-train.00000-of-01024.json.gz", "validation": "en/c4-validation.00000-of-00008.json.gz"},
        limits={"calibration": 8192, "evaluation": 1100},
    ),
}


def documents(source: DatasetSource, purpose: Purpose) -> list[Document]:
    """Read the documents of a dataset.

    Args:
        source: `text` gives one document per file, `json` and a hub dataset one per row, `python-docs` one per
            topic of `pydoc_data.topics`. Paths are relative to the working directory.
        purpose: selects the default split of a hub dataset (`train` or `test`) and the topics of `python-docs`.

    Returns:
        The documents in a fixed order, all of them text or all of them chats. Some may be empty, such as the blank
        rows of WikiText.

    Raises:
        CalibrationError: a missing file, dataset or field, invalid UTF-8 or JSON, no text at all, or too much.
    """
    _check_keys(source)
    found: Iterable[Document | None]
    if source.text is not None:
        described, found = f"text {source.text!r}", map(read_text, matching(source.text, "text"))
    elif source.json_path is not None:
        described, found = f"json {source.json_path!r}", _of_rows(source.json_path, source.field)
    elif source.name == "python-docs":
        described, found = "python-docs", _python_docs(purpose)
    else:
        described, found = f"dataset {source.name!r}", _hub_rows(source, purpose)
    read, size, most, empty = list[Document](), 0, free_main_memory() // _OF_TOKENS, 0
    for each in found:
        size += 64 + len(each if isinstance(each, str) else str(each))  # an empty document takes memory, too
        size += len(str(getattr(each, "beside", ""))) // 16  # little of it becomes tokens
        refuse_large(described, size, most, "name fewer files, or a part of them")
        empty += each is None
        read += [] if each is None else [each]
    if not any(d.strip() if isinstance(d, str) else d for d in read):
        count = len(read) + empty
        raise CalibrationError(f"{described} has no text for {purpose}: all of its {count} documents are empty")
    if empty:
        _log.warning("%s: %d of %d rows have no text and are left out", described, empty, len(read) + empty)
    try:
        hold_chats(read)
    except CalibrationError as error:
        raise CalibrationError(f"{described}: {error}") from error
    return read


def texts(source: DatasetSource, purpose: Purpose) -> list[str]:
    """Read the documents of a dataset; a `CalibrationError` refuses chats, too."""
    read = documents(source, purpose)
    if hold_chats(read):
        raise CalibrationError("the dataset holds chats; expected text, whose words and bytes are counted")
    return [str(d) for d in read]


def check_dataset(source: DatasetSource) -> bool:
    """Check a dataset by the first row of its files at most, without accessing the hub.

    Returns:
        Whether it holds chats, as far as its files tell.

    Raises:
        CalibrationError: a path or glob that matches no file, files that are all empty, a first row without the
            field, the name of a file, or a misspelt short name.
    """
    for key, pattern in (("text", source.text), ("json", source.json_path)):
        if pattern is not None:
            paths = matching(pattern, key)
            if not any(path.stat().st_size for path in paths):
                empty = "the file is empty" if len(paths) == 1 else f"all {len(paths)} files are empty"
                raise CalibrationError(f"{key}: {pattern!r} has no text: {empty}")
    if source.name is not None:
        _check_name(source.name)
        _check_keys(source)
    if source.json_path is None:
        return False
    return not isinstance(next((d for d in _of_rows(source.json_path, source.field) if d is not None), ""), str)


def local_files(source: DatasetSource) -> list[Path]:
    """Return the local files that a dataset is read from; none for one of the hub or of a package.

    Raises:
        CalibrationError: as `matching`.
    """
    patterns = {"text": source.text, "json": source.json_path}
    return [path for key, pattern in patterns.items() if pattern is not None for path in matching(pattern, key)]


def _of_rows(pattern: str, wanted: str | None) -> Iterator[Document | None]:
    """Yield the document of each row of the JSON files; the first row decides the field, if none is wanted."""
    field = None
    for path in matching(pattern, "json"):
        for where, row in read_rows(path):
            field = field or field_among(row, wanted, where)
            yield document(row, field, where)


def _check_name(name: str) -> None:
    short = [*_SHORT_NAMES, "python-docs"]
    path = Path(name).expanduser()
    if name in short or (name and path.is_dir()):
        return
    if path.is_file() or name.startswith((".", "/", "~")) or suffix(path) in (".txt", ".json", ".jsonl"):
        what = "file" if path.is_file() else "path"
        key = "json" if suffix(path) in (".json", ".jsonl") else "text"
        advice = _PARQUET if suffix(path) == ".parquet" else f"write {{{key}: {name}}}"
        raise CalibrationError(f"dataset {name!r} is a {what}, not the name of a dataset; {advice}")
    if not _HUB_ID.fullmatch(name):  # which all datasets have, the old ones too: stanfordnlp/imdb
        raise CalibrationError(
            f"no dataset {name!r}; {did_you_mean(name, short)}, OWNER/NAME on the hub, {{text: PATH}} or {{json: PATH}}"
        )


def _check_keys(source: DatasetSource) -> None:
    """Refuse keys that a dataset with a short name does not have."""
    if source.name == "python-docs":
        if given := [n for n in ("config", "split", "revision", "field") if getattr(source, n) is not None]:
            raise CalibrationError(f"dataset 'python-docs' takes no {', '.join(given)}: it comes with Python")
    elif _saved(source.name or ""):
        if given := [n for n in ("config", "split", "revision") if getattr(source, n) is not None]:
            raise CalibrationError(
                f"dataset {source.name!r} takes no {', '.join(given)}: it is one split, as save_to_disk wrote it"
            )
    elif source.config is not None and (short := _SHORT_NAMES.get(source.name or "")) and short.shards is not None:
        raise CalibrationError(f"dataset {source.name!r} takes no config; for another one use {{name: {short.path}}}")


def _saved(name: str) -> bool:
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
    dataset = _hub_dataset(source)
    split = source.split or dataset.splits[purpose]
    where = f"dataset {name!r} (" + (f"{dataset.config}, " if dataset.config else "") + f"split {split!r})"
    unreachable = ""
    try:
        with quiet_libraries(), nullcontext("") if Path(name).is_dir() else hub_or_cache() as unreachable:
            rows = _load(dataset, split, source, purpose)
            first: dict[str, Any] = next(iter(rows), {})
            if not first:
                return []
            columns = [field := field_among(first, source.field, where)]
            if not isinstance(document(first, field, f"{where} row 0", arrow=True), str):  # no pictures and no sound
                columns = [n for n in first if not hasattr((rows.features or {}).get(n), "decode_example")]
            found = enumerate(rows.select_columns(columns))
            return [document(row, field, f"{where} row {i}", arrow=True) for i, row in found]
    except CalibrationError:
        raise
    except Exception as error:  # datasets lets any exception of its hub client, file systems and parsers through
        if unreachable:
            told = f"{where} is not in the cache, and the hub cannot be reached ({unreachable}); {_OFFLINE}"
            raise UnreachableError(told) from error
        told = f"{where} could not be fetched ({_reason(error)}); check its name, config and split, or the connection"
        raise CalibrationError(told) from error


@contextmanager
def hub_or_cache() -> Iterator[str]:
    """Yield why the hub cannot be reached, or nothing; `datasets` would try for long, and then sees its cache alone."""
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


def _hub_dataset(source: DatasetSource) -> _HubDataset:
    name = source.name or ""
    dataset = _SHORT_NAMES.get(name, _HubDataset(name, None, {"calibration": "train", "evaluation": "test"}))
    return dataset if source.config is None else replace(dataset, config=source.config)


def _load(dataset: _HubDataset, split: str, source: DatasetSource, purpose: Purpose) -> Any:
    import datasets

    if _saved(dataset.path):
        return datasets.load_from_disk(dataset.path)
    arguments: dict[str, Any] = {"split": split, "revision": source.revision}
    if dataset.shards is None:
        return datasets.load_dataset(dataset.path, dataset.config, **arguments)
    shards = {split: dataset.shards[split]} if split in dataset.shards else dict(dataset.shards)
    rows = datasets.load_dataset(dataset.path, data_files=shards, streaming=True, **arguments)
    return rows.take(dataset.limits[purpose]) if dataset.limits else rows
