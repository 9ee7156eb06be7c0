"""Documents of a row: text, or a chat, which the tokenizer's chat template turns into text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from compressx.runtime.errors import CalibrationError, did_you_mean, one_line

Chat: TypeAlias = list[Any]
"""Messages, each a mapping with `role` and `content`, and whatever else the template reads."""
Document: TypeAlias = str | Chat

_USUAL = ("text", "messages", "conversations")
"""Fields that hold the document when the recipe names none, the first one present."""

_SENDERS = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}
"""Who speaks in ShareGPT's conversations, by the roles of chat templates; the others have the same names there."""


def field_among(columns: Iterable[str], wanted: str | None, where: str) -> str:
    """Return the field that holds the documents: `wanted`, or the first usual one among a row's columns.

    Raises:
        CalibrationError: there is none.
    """
    present = list(columns)
    if wanted is None and (usual := [name for name in _USUAL if name in present]):
        return usual[0]
    if wanted is not None and wanted in present:
        return wanted
    lacks = f"no field {wanted!r}" if wanted is not None else f"no field {', '.join(_USUAL[:-1])} or {_USUAL[-1]}"
    valid = did_you_mean(wanted or _USUAL[0], present) or "it has none"
    raise CalibrationError(f"{where}: {lacks}; {valid}" + ("" if wanted or not present else "; name one as field"))


def document(row: Mapping[str, Any], field: str, where: str) -> Document:
    """Return the text or chat of a row.

    Raises:
        CalibrationError: the field is missing, or is neither text nor a list of {role, content}.
    """
    return checked(row[field_among(row, field, where)], f"{where}: field {field!r}")


def checked(value: Any, where: str) -> Document:
    """Return a value if it is text or a chat; ShareGPT's {from, value} become {role, content}.

    Raises:
        CalibrationError: it is neither, or text that no tokenizer reads.
    """
    if isinstance(value, str):
        return sound(value, where)
    if not isinstance(value, list):
        raise CalibrationError(f"{where} is {type(value).__name__}, expected text or a list of {{role, content}}")
    chat = [_renamed(message) for message in value]
    for i, message in enumerate(chat):
        if not isinstance(message, Mapping):
            raise CalibrationError(f"{where}: message {i} is {type(message).__name__}, expected {{role, content}}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = f", but {type(message[key]).__name__}" if key in message else ""
                raise CalibrationError(
                    f"{where}: message {i} has no text in {key!r}{found}, expected {{role, content}} or {{from, value}}"
                    f"; it has {one_line(', '.join(map(str, value[i]))) or 'nothing'}"
                )
            sound(message[key], f"{where}: message {i}: {key!r}")
    return chat


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


def _renamed(message: Any) -> Any:
    """Return a message of ShareGPT's, {from, value}, as {role, content}, and any other as it is."""
    if not isinstance(message, Mapping) or "role" in message or not isinstance(sender := message.get("from"), str):
        return message
    return {"role": _SENDERS.get(sender, sender), "content": message.get("value")}


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
    return [rendered_one(chat, tokenizer, f"chat {i} of {len(chats)}") for i, chat in enumerate(chats)]


def rendered_one(chat: Document, tokenizer: Any, which: str, *, answered: bool = True) -> str:
    """Turn a chat into text, as `rendered` does; `which` begins an error; not `answered`, an answer is begun."""
    require_template(tokenizer)
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=not answered))
    except Exception as error:  # templates are programs, and raise what they like
        roles = one_line(", ".join(message["role"] for message in chat if isinstance(message, Mapping)))
        raise CalibrationError(
            f"{which} (roles {roles}): the tokenizer's chat template refuses it "
            f"({type(error).__name__}: {one_line(str(error))[:300]}); remove or change such chats"
        ) from error
