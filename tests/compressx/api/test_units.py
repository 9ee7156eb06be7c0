"""Units: whose rows and columns are whose, the sums of their scores, and the masks that take them whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressx import Owners, Structured, Units, Unstructured, count_dropped, keep_mask, keep_masks

SHAPES = {"up": (12, 5), "down": (3, 6)}
"""Six units: two rows of `up` each, as where gate and up are one weight, and a column of `down`."""


def six() -> Units:
    owners = {"up": Owners(0, torch.arange(6).repeat(2)), "down": Owners(1, torch.tensor([3, 1, 0, 2, 5, 4]))}
    return Units("neurons", "mlp", 6, owners)


def scores(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def reference(units: Units, of: dict[str, torch.Tensor]) -> torch.Tensor:
    """Add every single weight to its unit, in float64."""
    total = torch.zeros(units.count, dtype=torch.float64)
    for name, x in of.items():
        own = units.owners[name]
        for row in range(x.shape[0]):
            for column in range(x.shape[1]):
                total[own.unit[row if own.dim == 0 else column]] += x[row, column].double()
    return total


@pytest.mark.parametrize("names", [("up", "down"), ("down",), ("up",)])
def test_a_units_score_is_the_sum_over_its_weights_in_the_linears_that_are_given(names):
    of = {name: x for name, x in scores().items() if name in names}
    torch.testing.assert_close(six().summed(of).double(), reference(six(), of), rtol=1e-5, atol=1e-6)


def test_narrow_scores_are_added_in_float32_and_scores_of_other_linears_are_refused():
    of = {"down": torch.full((4096, 6), 0.1, dtype=torch.bfloat16)}
    total = six().summed(of)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, torch.full((6,), 4096 * float(of["down"][0, 0])), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match=r"scores are for \['gate'\], none of which belongs to up, down"):
        six().summed({"gate": torch.ones(2, 2)})


def test_a_mask_has_every_row_and_column_of_a_unit_and_no_other():
    keep = torch.tensor([True, True, False, True, True, False])
    masks = six().masks(keep, SHAPES)
    assert masks["up"].all(dim=1).tolist() == [*keep.tolist(), *keep.tolist()] == masks["up"].any(dim=1).tolist()
    assert masks["down"][0].tolist() == keep[six().owners["down"].unit].tolist()
    assert torch.equal(masks["down"], masks["down"][:1].expand(3, 6))
    masks["up"][0, 0] = False  # a mask of its own, no view of others


@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_which_units_are_kept_is_read_back_from_their_masks(chosen):
    keep = torch.tensor(chosen)
    masks = six().masks(keep, SHAPES)
    assert torch.equal(six().kept(masks), keep)
    masks["up"][2, 3] = True
    assert six().kept(masks)[2], "one weight that is left anywhere keeps a unit"


@given(st.integers(0, 5), st.integers(0, 99))
def test_the_units_of_the_lowest_sums_go_as_many_as_were_asked_for(dropped, seed):
    units, of = six(), scores(seed)
    pattern = Structured("neurons", dropped / 6, units)
    assert pattern.dropped == dropped
    masks = keep_masks(of, {"up": pattern, "down": pattern})
    kept = units.kept(masks)
    assert int((~kept).sum()) == dropped
    total = reference(units, of)
    if dropped:
        assert float(total[~kept].max()) <= float(total[kept].min()) + 1e-6
    assert all(torch.equal(x, units.masks(kept, SHAPES)[n]) for n, x in masks.items())


@given(st.sampled_from([(6, 1), (6, 2), (6, 3), (96, 32), (1536, 32), (1536, 256)]), st.floats(0, 1))
def test_as_many_units_stay_as_the_multiple_nearest_to_what_the_sparsity_asks_for(size, sparsity):
    count, multiple = size
    pattern = Structured("neurons", sparsity, Units("neurons", "mlp", count, {}), multiple)
    left, asked = count - pattern.dropped, count - count_dropped(sparsity, count)
    assert left in range(0, count + 1, multiple)
    assert abs(left - asked) == min(abs(n - asked) for n in range(0, count + 1, multiple))
    assert Structured("neurons", pattern.dropped / count, pattern.units, multiple).dropped == pattern.dropped
    with pytest.raises(ValueError, match="are no multiple of"):
        Structured("neurons", sparsity, pattern.units, count + 1)


def test_units_and_weights_are_chosen_side_by_side_and_units_of_two_modules_by_themselves():
    first, second = six(), six()
    owners = {f"{name}2": own for name, own in second.owners.items()}
    second = Units("neurons", "mlp2", 6, owners)
    of = {**scores(), **{f"{n}2": x for n, x in scores(1).items()}, "q": torch.rand(4, 4)}
    one, two = Structured("neurons", 1 / 3, first), Structured("neurons", 0.5, second)
    masks = keep_masks(of, {"up": one, "down": one, "up2": two, "down2": two, "q": Unstructured(0.5, "row")})
    assert int((~first.kept({n: masks[n] for n in first.owners})).sum()) == 2
    assert int((~second.kept({n: masks[n] for n in second.owners})).sum()) == 3
    assert (~masks["q"]).sum(dim=1).tolist() == [2] * 4


def test_one_linears_mask_is_not_made_of_units_and_some_go_and_some_stay_at_the_nearest_sparsity():
    pattern = Structured("neurons", 0.5, six())
    with pytest.raises(ValueError, match="6 neurons of mlp own several linears; take keep_masks"):
        keep_mask(torch.ones(12, 5), pattern)
    pairs = Structured("neurons", 0.5, pattern.units, multiple=2)
    assert [pairs.at(s).sparsity * 6 for s in (0.01, 0.3, 0.55, 0.99)] == pytest.approx([2, 2, 4, 4])
    assert Structured("neurons", 0.5, pattern.units, multiple=6).at(0.5).sparsity == 0
    assert pattern.zeros(12, 5) is None
    assert pattern == Structured("neurons", 0.5, six())
    assert pattern != Structured("kv-groups", 0.5, six())


def test_scores_that_are_no_numbers_are_refused():
    pattern = Structured("neurons", 0.5, six())
    of = scores()
    of["up"][3, 3] = torch.nan
    with pytest.raises(ValueError, match="scores must be finite"):
        keep_masks(of, {"up": pattern, "down": pattern})
