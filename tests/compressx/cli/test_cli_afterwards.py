"""What the command line does with pruned models and with several runs: eval, apply, inspect, compare, sweep."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tests.compressx.cli.commands import RECIPE, TEXT, invoke, printed, refused
from tests.compressx.saved import rename_tokens, save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressx.masks import MaskSet
from compressx.report.compare import read_report


def measured(name: str) -> float:
    return json.loads(Path("out/report.json").read_text())["evaluation"][name]["token_perplexity"]


def test_eval_of_tasks_measures_these_alone_and_writes_the_standard_error_beside_the_figure(work, monkeypatch):
    asked = []
    monkeypatch.setattr("compressx.evaluation.lm_eval.run_tasks", lambda *given: asked.append(given[2]) or {
        "mine": {"acc": 0.4124, "acc_stderr": 0.0138, "em,strict": 0.5, "em_stderr,strict": 0.02}})  # fmt: skip
    Path("mine.yaml").write_text("task: mine\n")
    Path("other.yaml").write_text("task: other\n")
    shown = printed("eval", "out", "--tasks", "mine.yaml,other.yaml", "--limit", "3", "--trust-task-code",
                    "--set", "evaluate.lm_eval.num_fewshot=2")  # fmt: skip
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert {"mine acc 0.4124 ± 0.014", "mine em,strict 0.5 ± 0.02"} <= set(rows)
    assert "perplexity" not in shown
    assert asked[0].model_dump(exclude_unset=True) == {
        "tasks": ["mine.yaml", "other.yaml"], "limit": 3, "trust_task_code": True, "num_fewshot": 2
    }  # fmt: skip
    assert "no chat template" in refused(
        "eval", "out", "--tasks", "mine.yaml", "--trust-task-code", "--set", "evaluate.lm_eval.apply_chat_template=true"
    )


@pytest.mark.parametrize("model", ["out", "out/model"])
def test_eval_gives_the_figure_that_the_run_gave(work, model):
    done = printed("eval", model, "--recipe", "r.yaml", "--json")
    assert json.loads(done)["token_perplexity"] == pytest.approx(measured("pruned"), rel=1e-6)
    table = printed("eval", model, "--recipe", "r.yaml")
    assert "token_perplexity" in table
    assert f"{measured('pruned'):.6g}"[:5] in table


def test_eval_measures_a_dense_model_with_masks_as_masked_and_without_as_dense(work):
    for masks, stage in (((), "dense"), (("--masks", "out/masks.safetensors"), "pruned")):
        done = invoke("eval", "model", *masks, "--set", TEXT, "--json")
        assert json.loads(done.stdout)["token_perplexity"] == pytest.approx(measured(stage), rel=1e-6)


FIDELITY = "evaluate.fidelity={dataset: {text: text.txt}, sequence_length: 32, samples: 4}"


def test_eval_against_the_dense_model_measures_both_and_what_compares_them(work):
    found = json.loads(printed("eval", "out", "--against", "model", "--set", FIDELITY, "--json"))
    assert [*found] == ["dense", "pruned", "flips"]
    assert [found[of]["token_perplexity"] for of in ("dense", "pruned")] == [
        pytest.approx(measured(of), rel=1e-6) for of in ("dense", "pruned")
    ]
    ratio = found["pruned"]["token_perplexity"] / found["dense"]["token_perplexity"]
    assert found["pruned"]["perplexity_ratio"] == pytest.approx(ratio)
    assert found["dense"].keys() == {"token_perplexity"}
    assert found["flips"] == {}
    same = json.loads(printed("eval", "model", "--against", "model", "--set", FIDELITY, "--json"))["pruned"]
    assert (same["kl_divergence"], same["top1_agreement"]) == (0.0, 1.0)
    rows = [
        " ".join(line.split()) for line in printed("eval", "out", "--against", "model", "--set", FIDELITY).splitlines()
    ]
    assert "measure dense pruned change" in rows
    divergence, error = (found["pruned"][f"kl_divergence{x}"] for x in ("", "_stderr"))
    assert f"kl_divergence {divergence:.4g} ± {error:.2g}" in rows


def test_eval_of_tasks_against_the_dense_model_counts_the_documents_whose_answer_changed(work, monkeypatch):
    right = iter(["1c", "1a"] * 2)  # the dense model's first
    monkeypatch.setattr("compressx.evaluation.lm_eval.run_tasks", lambda *_: {
        "mine": {"acc": 0.5, "acc_documents": next(right)}})  # fmt: skip
    Path("mine.yaml").write_text("task: mine\n")
    asked = ("eval", "out", "--against", "model", "--tasks", "mine.yaml", "--trust-task-code")
    flips = json.loads(printed(*asked, "--json"))["flips"]
    assert flips == {"mine acc": {"right_to_wrong": 1, "wrong_to_right": 1, "p": 1.0}}
    shown = " ".join(printed(*asked).split())
    assert "1 right to wrong, 1 wrong to right, p = 1" in shown
    assert "1c" not in shown


def test_a_dense_model_of_another_vocabulary_is_refused(work):
    other = AutoModelForCausalLM.from_pretrained("model")
    other.resize_token_embeddings(200)
    other.save_pretrained("other")
    AutoTokenizer.from_pretrained("model").save_pretrained("other")
    assert "--against: the dense model has a vocabulary of 200 tokens and the model one of 128" in refused(
        "eval", "out", "--against", "other", "--set", FIDELITY
    )


def test_a_dense_model_of_other_tokens_is_refused(work):
    shutil.copytree("model", "other")
    rename_tokens(Path("other"))
    told = refused("eval", "out", "--against", "other", "--set", FIDELITY)
    assert re.search(r"--against: the dense model has '.*' as token \d+ and the model '.*'; expected the same", told)


def test_a_recipe_that_only_what_is_set_makes_whole_can_be_evaluated_by(work):
    Path("part.yaml").write_text(RECIPE.replace("sequence_length: 32, samples: 4}\nsel", "samples: none}\nsel"))
    given = ("--set", "evaluate.token_perplexity.samples=4", "--set", "evaluate.token_perplexity.sequence_length=32")
    done = printed("eval", "out", "--recipe", "part.yaml", *given, "--json")
    assert json.loads(done)["token_perplexity"] == pytest.approx(measured("pruned"), rel=1e-6)


def test_apply_puts_masks_on_another_checkpoint_of_the_same_shapes(work):
    tuned = AutoModelForCausalLM.from_pretrained("model")
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.01)
    tuned.save_pretrained("tuned")
    AutoTokenizer.from_pretrained("model").save_pretrained("tuned")
    done = printed("apply", "out/masks.safetensors", "tuned", "--output", "masked")
    masks = MaskSet.load("out/masks.safetensors")
    masked = AutoModelForCausalLM.from_pretrained("masked/model")
    for name, entry in masks.items():
        weight = masked.get_submodule(name).weight
        assert torch.equal(weight, torch.where(entry.keep, tuned.get_submodule(name).weight, 0.0))
    dropped = sum(int((~entry.keep).sum()) for entry in masks.values())
    assert done.startswith(f"masks on 21 of 21 linears: {dropped} weights became zero")
    assert Path("masked/model/tokenizer.json").is_file()
    assert MaskSet.load("masked/masks.safetensors").keys() == masks.keys()


def test_apply_can_insist_on_the_weights_that_were_pruned(work):
    printed("apply", "out/masks.safetensors", "model", "--output", "one", "--original")
    told = refused("apply", "out/masks.safetensors", "out/model", "--output", "two", "--original")
    assert "load that model, in the dtype" in told
    assert not Path("two").exists()


def test_inspect_counts_what_the_run_says_it_pruned(work):
    done = printed("inspect", "out", "--json")
    found = {x["name"]: x for x in json.loads(done)["linears"]}
    for layer in read_report(Path("out")).layers:
        mine = [found[layer.name][key] for key in ("sparsity", "pattern", "off_mask")]
        assert mine == [layer.sparsity, layer.pattern, 0]
    table = printed("inspect", "out")
    assert "compared with" in table
    assert "sparsity 50.00% of 21 linears" in table
    assert "sparsity 0.00% of 21 linears" in printed("inspect", "model")


def test_inspect_compares_a_run_with_its_base(work):
    assert "change" not in printed("inspect", "out")
    compared = printed("inspect", "out", "--base", "model")
    assert "changes are from model" in compared
    assert "unchanged" in compared
    linears = json.loads(printed("inspect", "out", "--base", "model", "--json"))["linears"]
    assert all(x["unchanged"] == 0.5 and 0 < x["change"] < 0.6 for x in linears), "half became zero"
    save_tiny(work / "other" / "model", "llama-mqa")
    told = refused("inspect", "out", "--base", "other/model")
    assert told.startswith("error: other/model: model.layers.0.self_attn.k_proj is [16, 64], and [32, 64] in out;")
    assert told.count("\n") == 1


@pytest.mark.slow
def test_sweep_runs_every_combination_compares_them_and_goes_on_where_it_stopped(work):
    arguments = ["sweep", "r.yaml", "--grid", "prune.0.sparsity=0.25,0.5", "--grid", "prune.1.pattern=2:4,1:4"]
    done = printed(*arguments, "--output", "grid")
    names = [f"sparsity={s}_pattern={p}" for s in ("0.25", "0.5") for p in ("2-4", "1-4")]
    assert sorted(p.name for p in Path("grid").iterdir() if p.is_dir()) == sorted(names)
    for name in names:
        kinds = {x.pruner: x.sparsity for x in read_report(Path("grid") / name).layers}
        assert kinds == {"wanda": float(name[9:].split("_")[0]), "magnitude": 0.5 if name.endswith("2-4") else 0.75}
        assert name in done
    table = Path("grid/compare.md").read_text()
    assert table.count("| sparsity=") == 4
    assert Path("grid/compare.svg").is_file()

    kept = read_report(Path("grid") / names[1])
    shutil.rmtree(Path("grid") / names[1])
    again = printed(*arguments, "--output", "grid")
    assert again.count("finished before") == 3
    assert read_report(Path("grid") / names[1]).evaluation == kept.evaluation


def test_sweep_does_not_take_another_recipes_run_for_its_own(work):
    arguments = ["sweep", "r.yaml", "-q", "--grid", "prune.0.sparsity=0.5", "--output", "grid"]
    assert invoke(*arguments).exit_code == 0
    other = refused(*arguments, "--set", "calibration.samples=5")
    assert "was written by another recipe (calibration.samples: was 4, is 5); this one is with prune.0.sp" in other
    assert "choose another --output, or remove it" in other
    notes = next(Path("grid").glob("*/report.json")).with_name("notes.md")
    notes.write_text("years")
    assert invoke(*arguments).exit_code == 0, "what is finished is not replaced, so notes beside it do no harm"
    assert notes.read_text() == "years"


def test_compare_prints_runs_and_writes_where_it_is_told(work):
    done = printed("compare", "out", "out", "--output", "sides")
    assert done.count("magnitude, wanda") == 2
    assert {p.name for p in Path("sides").iterdir()} == {"compare.md", "compare.csv", "compare.svg"}
