"""Tokenizers in GGUF files that are written from a folder: llama.cpp makes the tokens that they make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.gguf_files import tiny_of
from tests.compressx.llama_cpp import PROMPT, continuation, tokens_of
from tests.compressx.models.test_tokenizers import APPROXIMATED, NAMED, SPECIAL, SPLIT, TEXTS, TRAINED_ON
from tests.conftest import SMOLLM2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from compressx.models.access import InMemory
from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.gguf_described import described
from compressx.models.gguf_export import export_gguf
from compressx.models.gguf_header import GgufHeader
from compressx.models.gguf_tokenizer import tokenizer_metadata
from compressx.models.loading import load_tokenizer
from compressx.models.tokenizer import SPLITS, WHOLE_WORDS, splitter
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import UnsupportedModelError

ODD = [
    *SPLIT, *TEXTS, "a   b    c ", "   a\n\n\n\n b\t\tc\t\t\t\td", "x" + " " * 40 + "y" + "\n" * 40,
    "e\u0301\u0327 n\u0303", "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈", "日本語テキスト、漢字。한국어 텍스트",
    "\u3000全角\u00a0nbsp\u2009thin\u200bzero", "<s>a</s> <s> b<turn>\n<turn>  c<think>d", "▁ ▁▁ a▁b",
    "\r\n\r\n\r a\x7f", "𓀀𒀀 𐍈", "e=mc² ½ ⅷ ①", " <turn> ",
]  # fmt: skip
"""Texts of many kinds, with tokens that are added in them."""


def whole(made: Tokenizer, **more: Any) -> Any:
    made.add_special_tokens([AddedToken("<turn>", normalized=False, special=True)])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, **{**NAMED, "pad_token": "<pad>", **more})


@cache
def _learned(texts: tuple[str, ...], rows: int, *, of_bytes: bool) -> str:
    """Train the merges of texts once."""
    made = Tokenizer(models.BPE())
    more: dict[str, Any] = {}
    if of_bytes:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        more = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": SPECIAL}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=rows, show_progress=False, **more))
    return made.to_str()


def of_bytes(pre: Any, *, ignore_merges: bool = False, normalizer: Any = None) -> Any:
    """Train a byte-level tokenizer whose merges go across words, and let it split text."""
    made = Tokenizer.from_str(_learned(tuple(SPLIT * 6), 900, of_bytes=True))
    made.decoder = decoders.ByteLevel()
    model = made.model
    model.ignore_merges = ignore_merges
    made.model, made.pre_tokenizer = model, pre
    if normalizer is not None:
        made.normalizer = normalizer
    return whole(made)


def of_pieces(*, prefix: bool, merges: Callable[[Any], Any] = list, pre: Any = None, normalizer: Any = None) -> Any:
    """Make a tokenizer as a conversion from SentencePiece does: of scores, all merges of each token."""
    texts = [TRAINED_ON[:4000].replace(" ", "  "), TRAINED_ON[:4000], TRAINED_ON[-60:], *SPLIT, "a" * 9 + " " * 9]
    learned = Tokenizer.from_str(_learned(tuple(x.replace(" ", "▁") for x in texts), 700, of_bytes=False))
    ranked = sorted(learned.get_vocab().items(), key=lambda x: x[1])
    tokens = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *(token for token, _ in ranked)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    scores = {token: -float(i) for token, i in vocabulary.items() if len(token) > 1 and token[0] != "<"}
    found = merges(generate_merges(vocabulary, scores))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=found, unk_token="<unk>", byte_fallback=True, fuse_unk=True))  # noqa: S106
    space = normalizers.Replace(" ", "▁")
    made.normalizer = normalizer or (normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space)
    if pre is not None:
        made.pre_tokenizer = pre
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return whole(made)


def written(folder: Path, tokenizer: Any, settings: dict[str, Any] | None = None) -> Path:
    """Write a tiny Llama with a tokenizer."""
    if settings is not None:
        (folder / "generation_config.json").write_text(json.dumps(settings))
    model, path = tiny_of("llama", vocab_size=len(tokenizer) + 3), folder / "x.gguf"
    own = tokenizer_metadata(tokenizer, len(tokenizer) + 3, folder)
    with described(model) as template:
        export_gguf(InMemory(model), template, "F16", path, own)
    return path


def other_ids(path: Path, tokenizer: Any, texts: list[str]) -> list[str]:
    """Return the texts of which llama.cpp makes other tokens."""
    ours = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [text for text, here, there in zip(texts, ours, tokens_of(path, texts), strict=True) if here != there]


@pytest.mark.parametrize(
    "names", [pytest.param(x, marks=() if "smollm" in x or "llama3" in x else pytest.mark.slow) for x in SPLITS]
)
def test_a_byte_level_tokenizer_is_named_by_what_it_does(names: str, tmp_path: Path) -> None:
    for ignore in {name in WHOLE_WORDS for name in names.split()}:
        tokenizer = of_bytes(splitter(SPLITS[names]), ignore_merges=ignore)
        path = written(tmp_path, tokenizer)
        named = GgufHeader.of(path).value("tokenizer.ggml.pre")
        assert named in names.split()
        assert (named in WHOLE_WORDS) == ignore
        assert all(named in APPROXIMATED and not text.isascii() for text in other_ids(path, tokenizer, ODD))


@pytest.mark.parametrize("prefix", [True, False])
def test_a_bpe_of_pieces_whose_bytes_fall_back_is_written_by_scores(prefix: bool, tmp_path: Path) -> None:
    tokenizer = of_pieces(prefix=prefix)
    path = written(tmp_path, tokenizer)
    assert other_ids(path, tokenizer, ODD) == []
    values = GgufHeader.of(path).values
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.add_space_prefix"] == prefix
    assert (values["tokenizer.ggml.add_bos_token"], values["tokenizer.ggml.add_eos_token"]) == (True, False)


def runs_mixed(merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Rank the merges of runs first, the longest parts before, as a conversion does of tokens without scores."""
    runs = {pair for pair in merges if len({*"".join(pair)}) == 1}
    return [*sorted(runs, key=lambda x: (-len(x[0]), -len(x[1]))), *(pair for pair in merges if pair not in runs)]


def test_runs_whose_merges_are_mixed_are_joined_as_by_the_merges(tmp_path: Path) -> None:
    tokenizer = of_pieces(prefix=False, merges=runs_mixed)
    texts = [*ODD, *(" " * n + "a" * n for n in range(1, 24))]
    assert other_ids(written(tmp_path, tokenizer), tokenizer, texts) == []


_MODEL, _SAME = {"unk_token": "<unk>"}, normalizers.Replace("\x01", "\x01")
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "words": (lambda: whole(Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, **_MODEL))), "a WordLevel, and a BPE"),
    "unigram": (lambda: whole(Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0))), "is a Unigram, and a BPE"),
    "another way to split": (
        lambda: of_bytes(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,2}|[^\p{N}]+"), "isolated"),
                                                  pre_tokenizers.ByteLevel(False, False, False)])),
        "splits text, or takes whole words, in a way that has no name",
    ),
    "a space before": (lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=True)), "in a way that has no name"),
    "whole words": (
        lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), ignore_merges=True),
        "takes whole words, in a way that has no name in llama.cpp",
    ),
    "lower case": (
        lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.Lowercase()),
        "changes text before it splits it, and llama.cpp does not",
    ),
    "a space before the first alone": (
        lambda: of_pieces(prefix=False, normalizer=_SAME, pre=pre_tokenizers.Metaspace(split=False)),
        "reads ' a space first' as '▁a▁space▁first'",
    ),
    "words of pieces": (
        lambda: of_pieces(prefix=False, pre=pre_tokenizers.Split("▁", "merged_with_next")),
        "splits text at spaces, and has tokens with spaces inside",
    ),
    "one merge less": (lambda: of_pieces(prefix=True, merges=lambda x: x[:40] + x[41:]), "merges '.*' otherwise than"),
    "merges in another order": (
        lambda: of_pieces(prefix=True, merges=lambda x: [*sorted(x, key=lambda pair: len(pair[0]))]),
        "merges '.*' otherwise than by a score",
    ),
}  # fmt: skip


def stripped() -> Any:
    tokenizer = of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken("<user>", rstrip=True)])
    return tokenizer


def endless() -> Any:
    tokenizer = of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.eos_token = None
    return tokenizer


def framed() -> Any:
    tokenizer = of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False))
    between = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 3)])
    tokenizer.backend_tokenizer.post_processor = between
    return tokenizer


REFUSED |= {
    "spaces beside a token": (stripped, "the token '<user>' takes spaces beside it"),
    "no end": (endless, "has no eos_token, at which a text ends"),
    "a frame": (framed, "puts other tokens than BOS and EOS around a text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_llama_cpp_has_not_is_refused_in_one_line(name: str) -> None:
    make, told = REFUSED[name]
    tokenizer = make()
    with pytest.raises(UnsupportedModelError) as error:
        tokenizer_metadata(tokenizer, len(tokenizer))
    assert re.search(told, str(error.value))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("name a GGUF file of the dense model as like: FILE under options, or after --like")


def test_a_token_without_a_row_is_refused() -> None:
    tokenizer = of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False))
    with pytest.raises(UnsupportedModelError, match=r"token \d+, '<think>', has no row in the embedding of \d+"):
        tokenizer_metadata(tokenizer, len(tokenizer) - 1)


def test_accents_that_only_the_tokenizer_composes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.NFC())
    assert tokenizer_metadata(tokenizer, len(tokenizer))["tokenizer.ggml.pre"] == "gpt-2"
    assert "composes accents with their letters (NFC), and llama.cpp does not" in caplog.text


@pytest.mark.parametrize("place", [1, 4])
def test_llama_cpp_stops_at_every_token_at_which_generation_does(place: int, tmp_path: Path) -> None:
    tokenizer = of_pieces(prefix=False)
    said = continuation(written(tmp_path, tokenizer), PROMPT, 32, ends=False)
    stop = said[place]
    others = [i for i in range(300, 320) if i not in said][:1]
    path = written(tmp_path, tokenizer, {"eos_token_id": [tokenizer.eos_token_id, *others, stop]})
    assert continuation(path, PROMPT, 32, ends=True) == said[: said.index(stop) + 1]
    values = GgufHeader.of(path).values
    assert [values[f"tokenizer.ggml.{x}_token_id"] for x in ("eos", "eot", "eom")] == [2, *others, stop]


@pytest.mark.slow
def test_smollm2_is_written_from_its_folder_as_from_its_file(
    smollm2: Any, smollm2_folder: Path, tmp_path: Path
) -> None:
    file = find_checkpoint(ModelSource(**SMOLLM2)).file
    tokenizer, prompt = (
        load_tokenizer(Checkpoint(str(smollm2_folder))),
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n",
    )
    own = tokenizer_metadata(tokenizer, 49152, smollm2_folder)
    with described(smollm2.model) as template:
        export_gguf(InMemory(smollm2.model), template, "Q8_0", tmp_path / "folder.gguf", own)
    export_gguf(InMemory(smollm2.model), GgufHeader.of(file), "Q8_0", tmp_path / "file.gguf")
    folder, given = (GgufHeader.of(tmp_path / f"{name}.gguf") for name in ("folder", "file"))
    assert folder.shapes == given.shapes
    assert all((x == given.arrays[name]).all() for name, x in folder.arrays.items())
    assert folder.value("tokenizer.ggml.pre") == "smollm"
    for key in ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id"):
        assert folder.value(f"tokenizer.ggml.{key}") == given.value(f"tokenizer.ggml.{key}")
    texts = [*ODD, prompt]
    assert other_ids(tmp_path / "folder.gguf", tokenizer, texts) == []
    ids = tokenizer(f"{prompt}<|im_start|>assistant\n")["input_ids"]
    said = [continuation(tmp_path / f"{name}.gguf", ids, 48, ends=True) for name in ("folder", "file")]
    assert said[0] == said[1]
