"""Documents whose answers change, counted and judged."""

from __future__ import annotations

import pytest

from compressx.report.flips import Flips, as_text, documents_key, flips, flips_in, mcnemar

DENSE, PRUNED = [0, 0, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0, 0, 1]


def test_flips_are_those_of_a_hand_count() -> None:
    """Right to wrong are the fourth, seventh and eighth document, wrong to right is the second."""
    found = flips(as_text(DENSE), as_text(PRUNED))
    assert found == Flips(3, 1, 0.625)
    assert str(found) == "3 right to wrong, 1 wrong to right, p = 0.62"
    assert flips(as_text(PRUNED), as_text(DENSE)) == Flips(1, 3, 0.625)


@pytest.mark.parametrize(
    ("one", "other", "p"),
    [(12, 5, 0.14346313), (5, 12, 0.14346313), (10, 0, 2 / 1024), (4, 4, 1.0), (5, 4, 1.0), (0, 0, 1.0),
     (1200, 1000, 2.18170264e-5)],
)  # fmt: skip
def test_mcnemars_p_is_the_binomials_of_both_sides(one: int, other: int, p: float) -> None:
    assert mcnemar(one, other) == pytest.approx(p, rel=1e-6)


@pytest.mark.parametrize("other", [as_text(DENSE[1:]), as_text([1, *DENSE]), "", "0", "-f", "0x1f", "1F", 7, None])
def test_other_documents_or_what_is_no_such_text_have_no_flips(other: object) -> None:
    assert flips(as_text(DENSE), other) is None


def test_flips_stand_under_the_names_of_the_metrics_of_every_model_but_the_dense_one() -> None:
    assert [documents_key(name) for name in ("acc", "em,strict")] == ["acc_documents", "em_documents,strict"]
    dense, other = ({"acc": 0.5, "f1": 0.1, "acc_documents": as_text(x)} for x in (DENSE, PRUNED))
    figures = {
        "dense": {"token_perplexity": 3.0, "arc": dense, "only": dense},
        "pruned": {"token_perplexity": 4.0, "arc": other, "new": other},
        "finetuned": {"arc": dense | {"em,strict": 0.5}},
    }
    assert flips_in(figures) == {("arc acc", "pruned"): Flips(3, 1, 0.625), ("arc acc", "finetuned"): Flips(0, 0, 1.0)}
    assert flips_in({"pruned": figures["pruned"]}) == {}
