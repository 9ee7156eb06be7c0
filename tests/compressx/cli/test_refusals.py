"""What the commands refuse: status 2 and a message that names the option, the file or the place; nothing is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from tests.compressx.cli.commands import RECIPE, TEXT, invoke, refused
from tests.compressx.saved import save_tiny

from compressx.testing import tiny_text

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
WITH_TEXT = f"--set '{TEXT}'"
SURROGATE = "is \\udcff, half of a surrogate pair; remove it"


@pytest.fixture(autouse=True)
def _wrong(saved: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder with a model and a recipe, and what the commands are wrongly given."""
    monkeypatch.setenv("COMPRESSX_CACHE", str(saved / "cache"))
    for source in saved.iterdir():
        Path(source.name).symlink_to(source)
    Path("r.yaml").write_text(RECIPE)
    Path("prompt.txt").write_text(tiny_text(words=80))
    Path("bytes.txt").write_bytes(b"a\xff")
    Path("empty.txt").write_text("\n")
    Path("x.gguf").write_bytes(b"GGUF")
    Path("gone.yaml").write_text(
        RECIPE.replace("token_perplexity: {dataset: {text: text.", "token_perplexity: {dataset: {text: no.")
    )
    Path("bare.yaml").write_text(RECIPE[: RECIPE.index("evaluate:")] + "output: other\n")
    Path("broken").mkdir()
    Path("broken/recipe.yaml").write_text(RECIPE.replace("select_tokens", "slect_tokens"))


@pytest.mark.parametrize(
    ("command", "said"),
    [("-p wanda plugins", "expected no:NAME, got 'wanda'"),
     ("-p no: plugins", "expected no:NAME, got 'no:'"),
     ("-p no:wandas plugins", "did you mean 'wanda'?"),
     ("--plugin no_such_module plugins", "no_such_module"),
     # run, plan
     ("run r.yaml --resume --restart", "--resume and --restart exclude each other; give one"),
     ("run r.yaml -q -v", "--verbose and --quiet exclude each other; give one"),
     ("-p no:wanda run r.yaml -q", "error: r.yaml:4:32: no pruner 'wanda': plugin 'wanda' (entry point) is blocked; "
      "drop -p no:wanda"),
     ("run r.yaml --device tpu", "tpu"),
     pytest.param("run r.yaml --device cuda", "finds no CUDA GPU", marks=WITHOUT_CUDA),
     pytest.param("eval model --device cuda", "finds no CUDA GPU", marks=WITHOUT_CUDA),
     ("run r.yaml --set prune[1].sparsity=50", "--set prune[1].sparsity=50: prune[1].sparsity is 50; expected"),
     ("run r.yaml -q --set output=/", "--set output=/: output / is the root of the file system"),
     ("plan r.yaml --set output=/", "--set output=/: output / is the root of the file system"),
     ("plan r.yaml --set 'evaluate.sample={prompt: w1 w2, tokens: 500}'",
      "--set evaluate.sample={prompt: w1 w2, tokens: 500}: evaluate.sample: a prompt of 2 tokens and 500 after it"),
     # init
     ("init model --pruner wnda", "no pruner 'wnda'; did you mean 'wanda'?"),
     ("init model --revision x", "--revision x: model is a path"),
     ("init model -o r.yaml", "exists and is not overwritten"),
     ("init model --pruner reap", "error: reap prunes none of this model's linears: no block has experts"),
     # eval
     ("eval nowhere/at/all/model.gguf", "model.gguf"),
     ("eval model --recipe bare.yaml", "bare.yaml: no evaluate section"),
     ("eval model --recipe gone.yaml", "gone.yaml:7:22: text: no file matches 'no.txt'"),
     ("eval model --set evaluate.token_perplexty.samples=4", "did you mean 'token_perplexity'?"),
     ("eval model --set 'evaluate.token_perplexity.dataset={text: no.txt}'",
      "--set evaluate.token_perplexity.dataset={text: no.txt}: text: no file matches 'no.txt'"),
     (f"eval model {WITH_TEXT} --set 'evaluate.sample={{prompt: w1, tokens: 500}}'", "evaluate.sample: a prompt"),
     (f"eval model --masks r.yaml {WITH_TEXT}", "r.yaml"),
     ("eval model --revision abc", "--revision abc: model is a path, and only hub models have revisions"),
     ("eval model --set evaluate.token_perplexity=null", "--set: evaluate is empty"),
     ("eval model --tasks no.yaml", ": lm_eval.tasks: no such file: no.yaml (looked in "),
     ("eval model --set 'select_tokens={selector: recent, keep: 0.5}'",
      "--set select_tokens: nothing that is measured reads a prompt"),
     (f"eval model {WITH_TEXT.replace('samples: 4', 'samples: 99')}", "evaluation needs 99 sequences of 32"),
     ("eval model --recipe r.yaml --set model.trust_remote_code=false", "error: --set model.trust_remote_code: eval "
      "does not read it; it reads evaluate.KEY and select_tokens.KEY, and measures MODEL\n"),
     ("eval model --set evalute.needle.tokens=4", "--set evalute.needle.tokens: eval does not read it; did you mean "
      "'evaluate'? it reads"),
     # apply, compare
     ("apply model model -o two", "model is a folder, expected a masks file"),
     ("apply r.yaml model -o model", "output model exists; name a new one"),
     ("compare model", "error: "),
     ("compare --table model", "error: "),
     # sweep
     *((f"sweep r.yaml -o never {axes}", said) for axes, said in (
         ("--grid prune.0.sparsity=0.5,1.5", "--grid prune.0.sparsity=1.5: prune[0].sparsity is 1.5"),
         ("--grid prune.0.sparsity", "expected KEY=VALUE,VALUE..."),
         ("--grid prune.0.sparsity=0.5,0.5", "a value is given twice"),
         ("--grid prune.0.sparsity=0.5 --grid prune[0].sparsity=0.6", "list all its values once"),
         ("--grid output=a,b", "--grid output=a,b: every run of a sweep gets its own folder"),
         ("--grid prune.0.targets='[\"*.nothing\"]'", "matches no linear"),
         ("--grid calibration.samples=4,1000", "calibration.samples=1000: r.yaml:2:1: calibration needs 1000 seq"),
         ("--grid evaluate.token_perplexity.samples=4,900", "evaluate.token_perplexity.samples=900: r.yaml:6:1: "),
         ("--grid prune.0.sparsity=0.5 --set prune[0].sparsity=0.6", "--set prune[0].sparsity=0.6: --grid also sets"),
         ("--methods wanda wnda --sparsities 0.5", "--methods wnda --sparsities 0.5: no pruner 'wnda'; did"),
         ("--methods wanda --sparsities 0.5 1.5", "--sparsities 1.5: expected a fraction of zeros between 0 and 1"),
         *((wrong, "expected either --grid KEY=VALUE,VALUE..., or --methods with --sparsities") for wrong in (
             "", "--methods wanda", "--sparsities 0.5", "--seeds 2 --grid prune.0.sparsity=0.5",
             "--methods wanda --sparsities 0.5 --grid prune.0.sparsity=0.5")),
         ("--sparsities 0.5 --methods", "Option '--methods' requires an argument"),
         ("--methods wanda --sparsities 0.5 --seeds 0", "0 is not in the range x>=1"),
     )),
     # plugins
     ("plugins check wnda", "did you mean 'wanda'?"),
     ("plugins check wanda --architecture lama", "no tiny model 'lama'; did you mean 'llama'?"),
     ("plugins check attnprune --set modus=joint", "--set modus: unknown option 'modus'; did you mean 'mode'?"),
     ("plugins check attnprune --set mode", "--set mode: expected KEY"),
     ("plugins new 'Not A Name'", "invalid plugin name 'Not A Name'"),
     ("plugins new wanda", "'wanda' exists already"),
     ("plugins new random", "'random' exists already"),
     ("plugins new mine --kind selektor", "'selektor' is not one of 'pruner', 'selector', 'evaluator'"),
     # pack, unpack, export
     ("pack nowhere", "model path nowhere does not exist"),
     ("unpack nowhere", "model path nowhere does not exist"),
     ("pack x.gguf", "x.gguf is a GGUF file, which has a format of its own; pack reads safetensors"),
     ("unpack model", "model is not packed"),
     ("pack model -o broken", "broken exists; name a new folder with -o"),
     ("eval org/model --base model", "--base model: org/model is no folder here, and only pack"),
     # generate
     ("generate modle --prompt 'w1 w2'", "did you mean './model'?"),
     ("generate broken --prompt 'w1 w2'", "error: broken/recipe.yaml:8:1: unknown key"),
     ("generate model", "expected one of --prompt-file and --prompt"),
     ("generate model --prompt-file prompt.txt --prompt w1", "expected one of --prompt-file and --prompt"),
     ("generate model --prompt-file prmpt.txt", "cannot read prmpt.txt: No such file or directory"),
     ("generate model --prompt-file bytes.txt", "bytes.txt: not UTF-8 at byte 1"),
     ("generate model --prompt-file empty.txt", "--prompt-file empty.txt is empty; expected a text"),
     ("generate model --prompt ' '", "--prompt is empty; expected a text"),
     ("generate model --prompt 'w1 \udcff'", f"the prompt: character 3 {SURROGATE}"),
     *((f"generate model --prompt-file prompt.txt {options}", said) for options, said in (
         ("--question '\udcff?'", f"the prompt: character 12 {SURROGATE}"),
         ("--keep 0", "--keep: keep is 0; expected a number of tokens, 1 or more, or a fraction of them betwee"),
         ("--keep 1.5", "--keep: keep is 1.5; expected a number of tokens"),
         ("--keep 'an eighth'", "--keep: keep is 'an eighth'; expected"),
         ("--keep 20", "keep is 20, but 36 tokens of the prompt are protected"),
         ("--selector gemfiltr", "no token selector 'gemfiltr'; did you mean 'gemfilter'?"),
         ("--set blok=1", "--set blok: unknown option 'blok'; did you mean 'block'?"),
         ("--set block=x", "--set block: block is 'x'; expected a whole number or 'auto'"),
         ("--set block", "--set block: expected KEY"),
         ("--selector gemfilter --set block=3 --keep 40", "has no block 3; expected 0 to 2"),
         ("--max-new-tokens 500", "a prompt of 36 tokens and 500 after it are more than the model's"),
         ("--full --keep 3", "--full reads the whole prompt; leave out --selector, --keep and --set"),
         ("--device gpu", "device gpu: unknown; expected auto, cpu, cuda"),
     ))],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_message_and_nothing_is_written(command: str, said: str) -> None:
    before = sorted(Path().iterdir())
    message = refused(*shlex.split(command))
    assert said in message
    assert "Usage: " in message or message.count("\n") == 1
    assert sorted(Path().iterdir()) == before


MISTAKES = {  # what is replaced in the recipe, by what, the line, what the message says
    "a misspelt key": ("prune:", "prnue:", 3, ("unknown key 'prnue'", "did you mean 'prune'?")),
    "a target without a linear": ("*.down_proj", "*.down_prj", 4, ("matches no linear; did you mean '*.down_proj'?",)),
    "a model that is not there": (
        "path: model",
        "path: modle",
        1,
        ("model path modle does not exist; did you mean 'mo",),
    ),
    "text that is not there": (
        "text: text.txt",
        "text: txet.txt",
        2,
        ("no file matches 'txet.txt'; did you mean 'text",),
    ),
    "an output that is a file": ("output: out", "output: text.txt", 9, ("is a file; choose a folder",)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_recipe_is_named_with_place_value_and_remedy_before_anything_is_run(mistake: str) -> None:
    old, new, line, expected = MISTAKES[mistake]
    Path("wrong.yaml").write_text(RECIPE.replace(old, new, 1))
    said = refused("plan", "wrong.yaml")
    # a needed key that is misspelt is told as missing too, on a line of its own
    assert any(
        x.removeprefix("error: ").startswith(f"wrong.yaml:{line}:") and all(part in x for part in expected)
        for x in said.splitlines()
    ), said
    assert invoke("run", "wrong.yaml").stderr.endswith(said)


def test_standard_input_that_is_no_text_is_refused() -> None:
    given = ("generate", "model", "--prompt-file", "-")
    assert "--prompt-file -: standard input is not UTF-8 (invalid start byte)" in refused(*given, given=b"a\xff")
    assert "--prompt-file - is empty" in refused(*given, given="")


def test_an_attention_that_a_pruner_or_selector_cannot_read_is_named() -> None:
    save_tiny(Path("own/bloom"), "bloom")
    message = refused("init", "own/bloom", "--pruner", "attnprune")
    assert "attnprune prunes none of this model's linears: transformer.h.0.self_attention (BloomAttention)" in message
    assert message.endswith("give another --pruner\n")
    message = refused("generate", "own/bloom", "--prompt-file", "prompt.txt")
    assert "transformer.h.0: the attention of BloomBlock does not go through" in message
