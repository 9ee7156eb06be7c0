"""What is wrong with a text that is no YAML, in plain words."""

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
"""By what ruamel.yaml says (a regular expression), what we do; told where it begins, since the parser is far beyond."""

_MISPLACED = {
    r"found character '\\t'": "a tab, where only spaces may stand; replace it with spaces",
    "found character '(.)'": "text cannot begin with {0}; put it in quotes",
    "mapping values are not allowed": 'a key cannot stand here; each key has a line of its own with ": " behind it and '
    'the indentation of those beside it, and text that holds ": " has quotes',
    "sequence entries are not allowed": "a list item cannot stand here; write it on a line of its own, below its key",
    "expected ',' or '(.)', but got": "expected a comma, or the {0} that closes what is opened at {begun}",
    "expected the node content, but found '<stream end>'": "it ends where a value is expected; close what is opened "
    "with [ or {{",
    "expected the node content, but found '(.)'": "expected a value, got {0}",
    r"expected <block end>, but found '([\]}])'": "{0} closes nothing; remove it",
    r"expected <block end>, but found '(?:<block|-|\?)": "this line fits nothing above it; keys of one mapping, and "
    "items of one list, have the same indentation",
    "expected <block end>": "more text after a value that is complete; put all of it in quotes",
    "found unknown escape character '(.)'": "\\{0} means nothing within double quotes; use single quotes, or two "
    "backslashes for one",
}
"""Likewise; told where the parser stopped."""


def in_plain_words(error: MarkedYAMLError, at: Callable[[int, int], str]) -> str:
    """Say what the parser found wrong, and where, without the words of its grammar."""
    mark, beginning = error.problem_mark or error.context_mark, error.context_mark or error.problem_mark
    here, begun = (at(m.line, m.column) if m else at(0, 0) for m in (mark, beginning))
    if error.context == "while scanning an alias":
        return f"{here}: not YAML: a * that begins no alias; {QUOTES}"
    for place, known in ((begun, _UNCLOSED), (here, _MISPLACED)):
        for pattern, words in known.items():
            if match := re.match(pattern, str(error.problem)):
                return f"{place}: not YAML: {words.format(*match.groups(), begun=begun)}"
    return f"{here}: not YAML: {error.problem}"
