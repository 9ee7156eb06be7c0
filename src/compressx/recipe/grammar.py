"""Readable messages for YAML syntax errors."""

from __future__ import annotations

import re
from collections.abc import Callable

from ruamel.yaml.error import MarkedYAMLError

QUOTES = 'text that begins with * needs quotes, such as "*.q_proj"'

_UNCLOSED = {
    r"expected ',' or '(.)', but got '<stream end>'": "what is opened here is not closed; add {0}",
    "found unexpected end of stream": "the quote that is opened here is not closed",
    "could not find expected ':'": 'expected "key: value"; no ": " follows the key',
}
"""Our message by regular expression over ruamel.yaml's; placed where the construct begins, far before the parser."""

_MISPLACED = {
    r"found character '\\t'": "a tab where only spaces are allowed; replace it with spaces",
    "found character '(.)'": "text cannot begin with {0}; put it in quotes",
    "mapping values are not allowed": 'a key is not allowed here; write each key on its own line, followed by ": " and '
    'indented like its siblings, and put text that contains ": " in quotes',
    "sequence entries are not allowed": "a list item is not allowed here; write it on its own line, below its key",
    "expected ',' or '(.)', but got": "expected a comma, or the {0} that closes what is opened at {begun}",
    "expected the node content, but found '<stream end>'": "it ends where a value is expected; close what is opened "
    "with [ or {{",
    "expected the node content, but found '(.)'": "expected a value, got {0}",
    r"expected <block end>, but found '([\]}])'": "{0} closes nothing; remove it",
    r"expected <block end>, but found '(?:<block|-|\?)": "the indentation of this line matches nothing above it; keys "
    "of one mapping, and items of one list, have the same indentation",
    "expected <block end>": "more text after a complete value; put all of it in quotes",
    "found unknown escape character '(.)'": "\\{0} is not an escape in double quotes; use single quotes, or double the "
    "backslash",
}
"""The same, placed where the parser stopped."""


def in_plain_words(error: MarkedYAMLError, at: Callable[[int, int], str]) -> str:
    """Return the place and a message without the parser's grammar terms."""
    mark, beginning = error.problem_mark or error.context_mark, error.context_mark or error.problem_mark
    here, begun = (at(m.line, m.column) if m else at(0, 0) for m in (mark, beginning))
    if error.context == "while scanning an alias":
        return f"{here}: not YAML: a * that begins no alias; {QUOTES}"
    for place, known in ((begun, _UNCLOSED), (here, _MISPLACED)):
        for pattern, words in known.items():
            if match := re.match(pattern, str(error.problem)):
                return f"{place}: not YAML: {words.format(*match.groups(), begun=begun)}"
    return f"{here}: not YAML: {error.problem}"
