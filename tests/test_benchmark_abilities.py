"""The benchmark of abilities: where it asks, what it counts as right, and what is kept of the dense model's lead."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.conftest import Loaded

import abilities


def whole(asked: abilities.Asked) -> str:
    return "".join(part for part, _ in asked.parts)


@pytest.mark.parametrize("name", ["numbered", "inline", "lookup"])
def test_each_label_that_is_asked_is_the_one_that_the_text_goes_on_with(name: str) -> None:
    for asked in [*abilities.FORMATS[name].documents()][:8]:
        assert len(asked.parts) == 12
        for (_, label), (after, _) in zip(asked.parts, asked.parts[1:], strict=False):
            assert after.startswith(label), "it is shown as an example of what comes next"
            assert label in asked.labels


def test_a_rule_has_each_label_as_often_and_a_list_gives_each_name_one_value() -> None:
    for asked in abilities.FORMATS["inline"].documents():
        text = whole(asked) + asked.parts[-1][1]
        assert text.count(" cold") == text.count(" warm") == abilities.SHOTS // 2
    for asked in abilities.FORMATS["lookup"].documents():
        given = dict(line.split(": ") for line in asked.parts[0][0].splitlines()[:12])
        assert len({*given.values()}) == 12
        queries = [whole(asked).splitlines()[12 + i].split(":")[0] for i in range(12)]
        assert [f" {given[name]}" for name in queries] == [label for _, label in asked.parts]


def test_the_labels_of_a_word_are_asked_with_both_meanings() -> None:
    first, second = [*abilities.FORMATS["in_context"].documents()][:2]
    assert first.parts[0][1] != second.parts[0][1]
    assert first.parts[0][0].translate(str.maketrans("AB", "BA")) != first.parts[0][0]
    assert len(first.parts[0][0].splitlines()) == 17


@pytest.mark.slow
@pytest.mark.parametrize("name", [*abilities.FORMATS])
def test_a_model_that_knows_the_labels_is_always_right(name: str, smollm2: Loaded) -> None:
    documents, tokenizer = [*abilities.FORMATS[name].documents()][:3], smollm2.tokenizer
    coded = [abilities.encoded(x, tokenizer, None) for x in documents]
    for asked, (ids, places, labels) in zip(documents, coded, strict=True):
        for (_, label), (at, answer) in zip(asked.parts, places, strict=True):
            assert asked.labels[answer] == label
            if at + 1 < len(ids):
                assert ids[at + 1] == labels[answer], "the next token is the label's first"
    known = {tuple(ids[: at + 1]): labels[x] for ids, places, labels in coded for at, x in places}

    class Knows:
        """Puts one at the label that comes after each text that it knows."""

        def get_decoder(self) -> Any:
            return lambda ids, **_: SimpleNamespace(last_hidden_state=ids[..., None] * 0 + positions(ids))

        def get_output_embeddings(self) -> Any:
            return lambda states: torch.stack([row(states_of) for states_of in states])

    seen: dict[int, torch.Tensor] = {}

    def positions(ids: torch.Tensor) -> torch.Tensor:
        keys = torch.arange(ids.numel()).view(*ids.shape, 1) + len(seen)
        for i, text in enumerate(ids):
            for j in range(len(text)):
                seen[int(keys[i, j])] = text[: j + 1]
        return keys

    def row(key: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(tokenizer))
        logits[known[tuple(seen[int(key)].tolist())]] = 1.0
        return logits

    assert abilities.right(Knows(), tokenizer, documents, None) == [1.0] * 3


def test_what_is_kept_is_a_share_of_the_lead_over_chance_and_its_error_is_that_of_a_bootstrap() -> None:
    draw = random.Random(0)  # noqa: S311 - figures, no secret
    dense = [draw.choice([0.5, 0.75, 1.0]) for _ in range(400)]
    pruned = [max(0.0, x - draw.choice([0.0, 0.25])) for x in dense]
    rows = {"inline": pruned}, {"inline": dense}
    kept, error = abilities.share(*rows, "inline")
    assert kept == pytest.approx((sum(pruned) / 400 - 0.5) / (sum(dense) / 400 - 0.5))
    again = []
    for _ in range(500):
        some = draw.choices(range(400), k=400)
        again.append(
            abilities.share({"inline": [pruned[i] for i in some]}, {"inline": [dense[i] for i in some]}, "inline")[0]
        )
    spread = (sum((x - kept) ** 2 for x in again) / 500) ** 0.5
    assert error == pytest.approx(spread, rel=0.15)
    assert abilities.share(rows[1], rows[1], "inline") == (1.0, 0.0)


def test_formats_in_which_the_dense_model_does_not_lead_say_nothing_of_what_is_kept() -> None:
    dense = {
        "in_context": [0.5, 0.5],
        "numbered": [0.4, 0.7],
        "inline": [0.9, 0.8],
        "lookup": [0.1, 0.0],
        "needle": [1.0, 1.0],
    }
    assert [name for name in dense if abilities.leads(dense, name)] == ["inline", "needle"]
    assert abilities.kept({**dense, "in_context": [1.0, 1.0], "needle": [0.5, 0.5]}, dense)[0] == pytest.approx(0.75)
    with pytest.raises(SystemExit, match="no better than chance"):
        abilities.kept(dense, {**dense, "inline": [0.5, 0.5], "needle": [0.0, 0.0]})


@pytest.mark.parametrize(
    ("ids", "looped"),
    [([1, 2, 3, 4], False), ([9, 5, 5, 5, 5], True), ([5, 5, 5], False), ([0, *[1, 2, 3] * 4], True),
     ([1, 2] * 4 + [1], True), ([1, 2] * 3 + [1], False), ([*range(24)] * 4, True), ([*range(25)] * 4, False)],
)  # fmt: skip
def test_an_answer_loops_if_it_ends_with_one_piece_four_times(ids: list[int], looped: bool) -> None:
    assert abilities.loops(ids) == looped


def test_a_rank_correlation_knows_no_scale_and_shares_the_ranks_of_equal_values() -> None:
    assert abilities.spearman([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0]) == pytest.approx(1.0)
    assert abilities.spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert abilities.spearman([1.0, 1.0, 2.0], [5.0, 6.0, 7.0]) == pytest.approx(3**0.5 / 2)


@pytest.mark.slow
def test_a_second_run_measures_nothing_again_and_a_model_keeps_all_of_itself(
    smollm2_short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, copy = tmp_path / "text.txt", tmp_path / "copy"
    text.write_text("The rain fell on the roof of the old house. " * 150)
    copy.symlink_to(smollm2_short_folder)
    monkeypatch.setattr(abilities, "DOCUMENTS", 2)
    monkeypatch.setattr(abilities, "TOKENS", 4)
    monkeypatch.setattr(abilities, "needles", lambda *_: [1.0, 0.5, 1.0])  # a thousand tokens each
    arguments = ["--models", str(copy), "--text", str(text), "--windows", "2", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["abilities.py", "--dense", str(smollm2_short_folder), *arguments])
    abilities.main()
    told = capsys.readouterr().out
    assert f"{copy}: answers" in told
    row = next(line for line in told.splitlines() if line.startswith(f"| {copy}"))
    figures = [cell.strip() for cell in row.strip("|").split("|")]
    assert figures[2:4] == ["0.000", "1.000"], "no divergence from itself, and always the same first choice"
    assert "1.00 ± 0.00" in figures
    abilities.main()
    assert ": answers" not in capsys.readouterr().out
