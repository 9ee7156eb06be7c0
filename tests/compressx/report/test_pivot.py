from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from compressx import ArtifactError, CompressxError
from compressx.api.record import AllocationReport, BlockReport, LayerReport, RunReport
from compressx.report.pivot import FORMATS, pivot
from compressx.report.section import Best, Section

SPARSEGPT = dict.fromkeys(("q_proj", "k_proj", "up_proj", "down_proj"), "sparsegpt")
MIXED = SPARSEGPT | {"q_proj": "attnprune", "k_proj": "attnprune"}


def saved(
    folder: Path, measured: float, pruners: dict[str, str] | None = None, asked: float | str = 0.5, seed: int = 0,
    dense: float = 20.0, **fields,
) -> Path:  # fmt: skip
    """Write the report of a run whose token perplexity is `measured`."""
    pattern, target = (asked, 0.5) if isinstance(asked, str) else (f"{100 * asked:g}% row", asked)
    layers = tuple(
        LayerReport(f"model.layers.0.x.{kind}", pruner, pattern, (4, 4), target, target, 1.0)
        for kind, pruner in (pruners or SPARSEGPT).items()
    )
    report = RunReport(
        compressx="0.1.0", model={"id": "a/b"}, sparsity=target, skipped=(), blocks=(BlockReport(0, "", layers, 1.0),),
        evaluation={"dense": {"token_perplexity": dense}, "pruned": {"token_perplexity": measured}},
        seconds={"total": 1.0}, peak_memory_bytes=2**30,
        calibration={"samples": 8, "sequence_length": 32, "seed": seed},
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(dataclasses.replace(report, **fields).to_json())
    return folder


def marked(shown: Section) -> set[tuple[object, str]]:
    names = shown.table.names
    return {(row[0], n) for row in shown.table.rows for n, x in zip(names, row, strict=True) if isinstance(x, Best)}


def test_rows_are_methods_after_dense_and_columns_sparsities_with_n_m_last_and_what_was_not_run_is_empty(tmp_path):
    (shown,) = pivot([
        saved(tmp_path / "a", 30.0, asked="2:4"), saved(tmp_path / "b", 90.0, asked=0.7),
        saved(tmp_path / "c", 28.0, asked=0.5), saved(tmp_path / "d", 26.0, MIXED, 0.5),
    ])  # fmt: skip
    assert shown.table.names == ["method", "50%", "70%", "2:4"]
    assert shown.table.texts == [
        ["dense", "20", "20", "20"],
        ["sparsegpt", "28 (1.4x)", "90 (4.5x)", "30 (1.5x)"],
        ["attnprune:qk+sparsegpt", "26 (1.3x)", "", ""],
    ]
    assert marked(shown) == {("attnprune:qk+sparsegpt", "50%")}, "alone in a column, nothing is best"


def test_several_seeds_give_mean_and_sample_deviation_and_everything_within_the_error_of_the_best_is_marked(tmp_path):
    """Means are 30, 31 and 34, deviations 1; a difference has the error sqrt(1/3 + 1/3), 0.816; twice that is 1.63."""
    rows = {"wanda": (29.0, 30.0, 31.0), "alps": (30.0, 31.0, 32.0), "magnitude": (33.0, 34.0, 35.0)}
    folders = [
        saved(tmp_path / f"{name}{seed}", value, dict.fromkeys(SPARSEGPT, name), seed=seed)
        for name, values in rows.items() for seed, value in enumerate(values)
    ]  # fmt: skip
    (shown,) = pivot(folders)
    assert shown.table.texts == [
        ["dense", "20"], ["wanda", "30 ± 1 (1.5x)"], ["alps", "31 ± 1 (1.55x)"], ["magnitude", "34 ± 1 (1.7x)"]
    ]  # fmt: skip
    assert marked(shown) == {("wanda", "50%"), ("alps", "50%")}
    near = [saved(tmp_path / f"n{seed}", x + 1.64, seed=seed) for seed, x in enumerate(rows["wanda"])]
    assert marked(pivot([*folders[:3], *near])[0]) == {("wanda", "50%")}, "1.64 is more than 1.63"


def test_of_single_runs_only_what_is_printed_alike_is_marked_with_the_best(tmp_path):
    given = {"wanda": 30.001, "alps": 30.0, "magnitude": 30.01}
    folders = [saved(tmp_path / name, x, dict.fromkeys(SPARSEGPT, name)) for name, x in given.items()]
    assert marked(pivot(folders)[0]) == {("wanda", "50%"), ("alps", "50%")}


def test_more_is_better_of_an_accuracy_and_nothing_is_marked_of_a_measure_that_is_not_known(tmp_path):
    def task(acc: float) -> dict[str, object]:
        return {"evaluation": {"pruned": {"arc": {"acc": acc}, "odd": acc, "token_perplexity": 9.0}}}

    given = {"wanda": 0.4, "alps": 0.5}
    folders = [saved(tmp_path / n, 0.0, dict.fromkeys(SPARSEGPT, n), **task(acc)) for n, acc in given.items()]
    (shown,) = pivot(folders, "arc acc")
    assert (marked(shown), shown.table.texts[0]) == ({("alps", "50%")}, ["dense", ""])
    assert marked(pivot(folders, "odd")[0]) == set()
    with pytest.raises(CompressxError, match=r"^--measure arc ac: no run has it; did you mean 'arc acc'\? valid: arc"):
        pivot(folders, "arc ac")


def test_without_a_perplexity_the_first_figure_is_shown_and_without_any_the_cells_are_empty(tmp_path):
    (shown,) = pivot([saved(tmp_path / "a", 0.0, evaluation={"pruned": {"odd": 1.5, "other": 2.0}})])
    assert (shown.note.split(":")[0], shown.table.texts[1]) == ("Odd", ["sparsegpt", "1.5"])
    blind = saved(tmp_path / "blind", 0.0, evaluation={})
    assert pivot([blind])[0].table.texts == [["dense", ""], ["sparsegpt", ""]]
    with pytest.raises(CompressxError, match=r"^--measure odd: no run has it; expected runs of recipes with evaluate$"):
        pivot([blind], "odd")


def test_rows_can_be_named_by_who_made_the_runs(tmp_path):
    folders = [saved(tmp_path / "a", 30.0), saved(tmp_path / "b", 31.0)]
    (shown,) = pivot(folders, methods=["wanda:model.layers.0.*+alps", "alps"])
    assert [row[0] for row in shown.table.rows] == ["dense", "wanda:model.layers.0.*+alps", "alps"]


def test_a_run_counts_by_the_last_model_that_it_made_and_what_trained_it_is_another_method(tmp_path):
    from compressx.api.record import FinetuneReport, ReconstructionReport

    tuned = {"finetune": FinetuneReport("dense", 1, 1, (1, 1), ()), "evaluation": {
        "pruned": {"token_perplexity": 30.0}, "finetuned": {"token_perplexity": 22.0}}}  # fmt: skip
    layer = LayerReport("model.layers.0.x.up", "wanda", "allocated row", (4, 4), 0.49999, 0.5, 1.0)
    trained = BlockReport(0, "", (layer,), 1.0, reconstruction=ReconstructionReport(1.0, 0.5, (), 1.0))
    allocated = {"allocation": AllocationReport("owl", 0.5, "block", 16, 8, ())}
    (shown,) = pivot([
        saved(tmp_path / "a", 30.0), saved(tmp_path / "b", 0.0, **tuned),
        saved(tmp_path / "c", 25.0, blocks=(trained,), **allocated), saved(tmp_path / "d", 21.0, targeted=0.2),
    ])  # fmt: skip
    assert [row[:2] for row in shown.table.texts[1:]] == [
        ["sparsegpt", "30 (1.5x)"], ["sparsegpt, finetune", "22"], ["wanda, owl, reconstruct_block", "25 (1.25x)"],
        ["sparsegpt:q_proj,k_proj,up_proj,down_proj", "21 (1.05x)"],
    ]  # fmt: skip


@pytest.mark.parametrize("other", [{}, {"seed": 1, "pruners": dict.fromkeys(["up_proj"], "sparsegpt")},
                                   {"calibration": {"samples": 9, "sequence_length": 32, "seed": 1}}])  # fmt: skip
def test_runs_of_one_cell_that_differ_in_anything_but_the_seed_are_refused(tmp_path, other):
    told = r"a, b: all are sparsegpt at 50%; expected runs that differ in calibration.seed and in nothing else"
    with pytest.raises(ArtifactError, match=told):
        pivot([saved(tmp_path / "a", 30.0), saved(tmp_path / "b", 31.0, **other)])


def test_runs_that_cannot_be_compared_are_warned_of_and_nothing_is_marked(tmp_path):
    alps = dict.fromkeys(SPARSEGPT, "alps")
    shown, warning = pivot([saved(tmp_path / "a", 30.0), saved(tmp_path / "b", 31.0, alps, dense=21.0)])
    assert "differs (20, 21)" in warning.note
    assert marked(shown) == set()
    assert shown.table.texts[0] == ["dense", "20.5"]


def test_every_format_has_the_same_cells_and_latex_is_escaped(tmp_path):
    odd = dict.fromkeys(SPARSEGPT, "a_b&c{50%}#$~^\\")
    (shown,) = pivot([
        saved(tmp_path / "a", 30.0), saved(tmp_path / "b", 31.0, seed=1), saved(tmp_path / "c", 41.0, odd),
        saved(tmp_path / "d", 50.0, odd, "2:4"),
    ])  # fmt: skip
    assert "| sparsegpt | **30.5 ± 0.71 (1.52x)** |  |" in FORMATS["markdown"](shown)
    latex = FORMATS["latex"](shown).splitlines()
    assert latex[:4] == [r"\begin{tabular}{lrr}", r"\toprule", r"method & 50\% & 2:4 \\", r"\midrule"]
    assert latex[5] == r"sparsegpt & \textbf{30.5 $\pm$ 0.71 (1.52x)} &  \\"
    escaped = r"a\_b\&c\{50\%\}\#\$\textasciitilde{}\textasciicircum{}\textbackslash{}"
    assert latex[6] == rf"{escaped} & 41 (2.05x) & 50 (2.5x) \\"
    assert latex[7:] == [r"\bottomrule", r"\end{tabular}"]
    rows = list(csv.DictReader(FORMATS["csv"](shown).splitlines()))
    assert [float(rows[1][name]) for name in ("50%", "50% deviation", "50% runs")] == [30.5, 0.5**0.5, 2]
    assert (rows[1]["2:4"], rows[2]["2:4"]) == ("", "50.0")
