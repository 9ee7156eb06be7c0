"""Text becomes the tokens that a folder's tokenizer.json makes of it, whatever transformers builds for its model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.gguf_files import write_like
from tests.compressx.llama_cpp import tokens_of
from tests.conftest import SMOLLM2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from compressx.data.windows import beginning
from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.loading import load_tokenizer
from compressx.models.tokenizer import SPLITS
from compressx.pipeline.run import run
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, UnsupportedModelError

UNK = "<unk>"
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
TEXTS = ["Hello world", "  two spaces\t and tab\n\n x", "12 1234 567890 3.14", "Déjà vu naïve", "De\u0301ja\u0300", "",
         "日本語 русский العربية हिन्दी 😀🏽", "don't I'LL def f(x):\n    return x", "<s>abc</s> <unk>x"]  # fmt: skip
_DRAWN = random.Random(0)  # noqa: S311 - text, no secret
_WORDS = ["".join(_DRAWN.choices("abcdefghijklmnoprst", k=_DRAWN.randint(2, 7))) for _ in range(150)]
TRAINED_ON = " ".join(_DRAWN.choices(_WORDS, k=3000)) + " 1234 56789 1234 Déjà vu, naïve! don't I'LL\n\n  def f(x):\n\t"


def trained(
    model: Any, pre: Any, decoder: Any = None, *, normalizer: Any = None, begins: bool = False, **more: Any
) -> Tokenizer:
    """Train a small tokenizer; `begins`: its post-processor puts <s> before a text."""
    made = Tokenizer(model)
    made.pre_tokenizer = pre
    made.decoder = decoder or decoders.Fuse()
    if normalizer is not None:
        made.normalizer = normalizer
    if isinstance(pre, pre_tokenizers.ByteLevel | pre_tokenizers.Sequence):
        more["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = getattr(trainers, f"{type(model).__name__.removesuffix('Level')}".replace("BPE", "Bpe") + "Trainer", None)
    trainer = trainer or trainers.WordLevelTrainer
    made.train_from_iterator([TRAINED_ON], trainer(vocab_size=420, special_tokens=SPECIAL, show_progress=False, **more))
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


_bytes = pre_tokenizers.ByteLevel
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "metaspace": lambda: trained(models.BPE(unk_token=UNK), pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "bytes that fall back": lambda: trained(
        models.BPE(unk_token=UNK, byte_fallback=True),
        pre_tokenizers.Metaspace(prepend_scheme="never", split=False), begins=True,
    ),
    "byte level": lambda: trained(models.BPE(), _bytes(add_prefix_space=False), decoders.ByteLevel()),
    "a space before": lambda: trained(models.BPE(), _bytes(add_prefix_space=True), decoders.ByteLevel(), begins=True),
    "digits by three": lambda: trained(
        models.BPE(), pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\s\p{N}]+|\s+"), "isolated"),
            _bytes(add_prefix_space=False, use_regex=False),
        ]), decoders.ByteLevel(),
    ),
    "decomposed": lambda: trained(models.BPE(), _bytes(add_prefix_space=False), normalizer=normalizers.NFKD()),
    "lower case": lambda: trained(models.BPE(), _bytes(add_prefix_space=False), normalizer=normalizers.Lowercase()),
    "words": lambda: trained(models.WordLevel(unk_token=UNK), pre_tokenizers.Whitespace()),
    "word pieces": lambda: trained(models.WordPiece(unk_token=UNK), pre_tokenizers.Whitespace()),
    "unigram": lambda: trained(models.Unigram(), pre_tokenizers.Metaspace(), unk_token=UNK),
}  # fmt: skip
OWN = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "llama": "LlamaTokenizerFast", "gpt2": "GPT2TokenizerFast",
       "mistral": "LlamaTokenizerFast", "phi3": "LlamaTokenizerFast", "cohere": "CohereTokenizerFast",
       "gpt_neox": "GPTNeoXTokenizerFast", "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer",
       "falcon": "PreTrainedTokenizerFast", "bloom": "BloomTokenizerFast"}  # fmt: skip
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def saved(folder: Path, made: Tokenizer, kind: str, config: dict[str, Any] | None) -> Path:
    """Write a folder of a type of models with a tokenizer, and tokenizer_config.json unless None."""
    AutoConfig.for_model(kind).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids_of(tokenizer: Any, *, special: bool) -> list[list[int]]:
    return tokenizer(TEXTS, add_special_tokens=special)["input_ids"]  # type: ignore[no-any-return]


def ids_in_file(made: Tokenizer, *, special: bool) -> list[list[int]]:
    return [x.ids for x in made.encode_batch(TEXTS, add_special_tokens=special)]


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x in {"qwen2", "llama", "gpt2"} else pytest.mark.slow) for x in OWN]
)
def test_tokens_are_those_of_tokenizer_json_for_every_type_of_model_and_class_of_tokenizer(
    kind: str, tmp_path: Path
) -> None:
    rewritten = 0
    for name, make in KINDS.items():
        made = make()
        for given in ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": OWN[kind]}, {}, None):
            config = None if given is None else {**NAMED, **given}
            folder = saved(tmp_path / f"{name} {given}", made, kind, config)
            read, of_auto = load_tokenizer(Checkpoint(str(folder))), AutoTokenizer.from_pretrained(folder)
            for special in (False, True):
                expected = ids_in_file(made, special=special)
                assert ids_of(read, special=special) == expected, (name, given)
                if ids_of(of_auto, special=special) != expected:
                    rewritten += 1
                    assert read.differs
    assert rewritten > 0 or kind in {"mistral", "phi3", "falcon", "bloom"}, "nothing to tell"


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["a space before", "byte level"])
@pytest.mark.parametrize("flag", [True, False])
def test_flags_change_nothing_of_tokenizer_json_and_tokens_beside_it_are_added(
    kind: str, name: str, flag: bool, tmp_path: Path
) -> None:
    flags = {"add_bos_token": flag, "add_prefix_space": flag, "legacy": flag, "extra_special_tokens": ["<x>"]}
    made = KINDS[name]()
    expected = [ids_in_file(made, special=special) for special in (False, True)]
    made.enable_truncation(3)  # which are settings of a call, and no difference
    made.enable_padding(length=7)
    folder = saved(tmp_path / "m", made, kind, {**NAMED, **flags, "tokenizer_class": OWN[kind]})
    read = load_tokenizer(Checkpoint(str(folder)))
    assert [ids_of(read, special=special) for special in (False, True)] == expected
    assert read("a<x>", add_special_tokens=False)["input_ids"][-1] == read.convert_tokens_to_ids("<x>")


def test_settings_that_change_the_tokens_of_the_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patched(_: Any, tokenizer: Tokenizer, *__: Any, **___: Any) -> Tokenizer:  # as with fix_mistral_regex
        tokenizer.normalizer = normalizers.Lowercase()
        return tokenizer

    made = KINDS["byte level"]()
    folder = saved(tmp_path / "m", made, "qwen3", NAMED)
    whole = PreTrainedTokenizerFast.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        whole(self, *args, **kwargs)
        self._tokenizer = patched(self, self._tokenizer)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__init__", changed)
    with pytest.raises(
        ArtifactError, match=r"make different tokens: .* becomes, from token \d+ on, .*such as fix_mistral_regex"
    ):
        load_tokenizer(Checkpoint(str(folder)))


GEMMAS = ["gemma", "gemma2", "gemma3_text", "gemma3", "gemma3n_text", "gemma3n", "gemma4_text", "gemma4",
          "recurrent_gemma", "vaultgemma"]  # fmt: skip


@pytest.mark.parametrize("kind", [*GEMMAS, "llama", "qwen2"])
def test_only_a_gemma_begins_with_bos_of_its_own_accord_whatever_class_its_tokenizer_has(
    kind: str, tmp_path: Path
) -> None:
    class Model:
        config = AutoConfig.for_model(kind)

    folder = saved(tmp_path / "m", KINDS["byte level"](), "llama", {**NAMED, "tokenizer_class": "TokenizersBackend"})
    tokenizer = load_tokenizer(Checkpoint(str(folder)))
    assert beginning(tokenizer, "auto", Model()) == (1 if kind in GEMMAS else None)
    assert beginning(tokenizer, False, Model()) is None
    tokenizer.bos_token = None
    assert beginning(tokenizer, "auto", Model()) is None, "there is none to begin with"


NAMES = [name for names in SPLITS for name in names.split()]
APPROXIMATED = {"gpt-4o", "llama4", "kanana2", "minimax-m2", "tekken"}
"""Of which llama.cpp takes marks apart from letters, unlike the models."""
SPLIT = [*TEXTS[:5], *TEXTS[7:], "a  12", "x   3\n\n 4 ", "(a+b)=c; `x` $5 12345", "HTTPServer's I'LL",
         "Über3 ÑandÚ'RE \t\n x", "naïve, voilà। ok。然后\uff0cno…", "  \n\n", "\r\n \r\n a",
         "\uff11\uff12\uff13 ²½ Ⅷ", "a_b-c/d//e!\n/"]  # fmt: skip


def gguf_of(folder: Path, pre: str, kind: str = "llama") -> Path:
    """Write a GGUF file whose merges go across words, so that every way of splitting text gives other tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = _bytes(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    alphabet = _bytes.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(SPLIT * 6, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **NAMED, pad_token="<pad>")  # noqa: S106
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=len(tokenizer), **sizes))
    return write_like(folder / "x.gguf", model, kind, {"rope.dimension_count": 16}, tokenizer, pre)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in {"smollm", "qwen2"} else pytest.mark.slow) for x in NAMES]
)
def test_text_of_a_gguf_file_is_split_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    path = gguf_of(tmp_path, name)
    ours = load_tokenizer(Checkpoint(str(tmp_path), path))(SPLIT, add_special_tokens=False)["input_ids"]
    differ = [text for text, here, there in zip(SPLIT, ours, tokens_of(path, SPLIT), strict=True) if here != there]
    assert all(name in APPROXIMATED and not text.isascii() for text in differ), differ


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_run_from_a_gguf_file_writes_the_tokenizer_that_it_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = gguf_of(tmp_path, "smollm", kind)
    run({"model": str(path), "prune": [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}], "output": "out"})
    used, written = (load_tokenizer(x) for x in (Checkpoint(str(tmp_path), path), Checkpoint("out/model")))
    assert written(SPLIT)["input_ids"] == used(SPLIT)["input_ids"]
    assert (written.bos_token, written.eos_token) == (used.bos_token, used.eos_token)
    config = json.loads(Path("out/model/tokenizer_config.json").read_text())
    assert config["tokenizer_class"] != "TokenizersBackend", "which transformers 4 does not know"
    of_auto = AutoTokenizer.from_pretrained("out/model")(SPLIT)["input_ids"]
    card = Path("out/model/README.md").read_text()
    assert (
        ("PreTrainedTokenizerFast.from_pretrained" in card)
        == (of_auto != used(SPLIT)["input_ids"])
        == (kind == "qwen2")
    )


def test_a_way_to_split_text_that_is_not_known_is_refused(tmp_path: Path) -> None:
    gguf_of(tmp_path, "deepseek-llm")
    with pytest.raises(UnsupportedModelError, match=r"x.gguf: tokenizer.ggml.pre is 'deepseek-llm', .*; give the"):
        load_tokenizer(Checkpoint(str(tmp_path), tmp_path / "x.gguf"))


@pytest.mark.slow
def test_smollm2_makes_the_tokens_that_llama_cpp_makes() -> None:
    checkpoint = find_checkpoint(ModelSource(**SMOLLM2))
    texts = [*SPLIT, *TEXTS, "<|im_start|>user\nHi  3<|im_end|>\n"]
    assert load_tokenizer(checkpoint)(texts, add_special_tokens=False)["input_ids"] == tokens_of(checkpoint.file, texts)
