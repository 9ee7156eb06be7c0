from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accelerator import pretended_accelerator

from compressx.api.patterns import _drop_lowest_of_few_on_device, _drop_lowest_on_device, drop_lowest


def random_scores(rows: int, columns: int, seed: int, levels: int) -> torch.Tensor:
    """Scores with many ties when `levels` is small."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, levels, (rows, columns), generator=generator).float()


def kept_by_sorting(scores: torch.Tensor, count: int) -> torch.Tensor:
    """What is left when each row's scores are sorted by value, then by position, and the first are dropped."""
    columns = range(scores.shape[1])
    dropped = [set(sorted(columns, key=lambda i, v=values: (v[i], i))[:count]) for values in scores.tolist()]
    return torch.tensor([[i not in row for i in columns] for row in dropped]).view(scores.shape)


@settings(max_examples=40)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), levels=st.integers(1, 5), part=st.integers(1, 30),
       seed=st.integers(0, 9999), data=st.data())  # fmt: skip
def test_what_is_dropped_is_what_sorting_by_score_and_then_position_puts_first(rows, columns, levels, part, seed, data):
    scores = random_scores(rows, columns, seed, levels)
    count = data.draw(st.integers(0, columns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressx.api.patterns._PART", part)
        assert torch.equal(drop_lowest(scores, count), kept_by_sorting(scores, count))


# Ties, both zeros, the least and the largest denormal, and the largest numbers, of either sign; of bfloat16 and float16
# in their own precision.
SCORES = st.sampled_from([0.0, 1e-45, 1.17e-38, 5e-324, 6e-8, 1.0, 1.0078125, 3.0, 65504.0, 3.3e38]).flatmap(
    lambda value: st.sampled_from([value, -value])
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=60)
@given(rows=st.integers(1, 4), columns=st.integers(1, 12), known=st.booleans(), data=st.data())
def test_an_accelerator_drops_the_same_scores_as_a_cpu(dtype, rows, columns, known, data):
    values = data.draw(st.lists(SCORES, min_size=rows * columns, max_size=rows * columns))
    scores = torch.tensor(values, dtype=torch.float64).view(rows, columns).to(dtype)
    if not known:
        scores = scores.nan_to_num(posinf=0.0, neginf=0.0)  # float16 holds no 3e38
    count = data.draw(st.integers(0, columns))
    expected = kept_by_sorting(scores, count)
    assert torch.equal(drop_lowest(scores, count, known_finite=known), expected)
    if count:
        assert torch.equal(_drop_lowest_on_device(scores, count), expected)
    assert torch.equal(_drop_lowest_of_few_on_device(scores, count), expected)


@pytest.mark.parametrize(
    ("shape", "waits", "launches"), [((6, 4), 1, 15), ((6, 40), 1, 25), ((1, 240), 1, 25)], ids=str
)
def test_an_accelerator_is_waited_for_once_or_not_at_all(shape, waits, launches):
    scores = random_scores(*shape, 0, 30)
    expected = drop_lowest(scores, shape[1] // 2)
    with pretended_accelerator() as record:
        placed = scores.cuda()
        for known in (False, True):
            with record.counted() as counts:
                keep = drop_lowest(placed, shape[1] // 2, known_finite=known)
            assert counts.synchronisations == (0 if known else waits), counts.places()
            assert counts.launches <= launches
            assert torch.equal(keep.cpu(), expected)


@pytest.mark.parametrize("count", [1, 700, 1400, 2099, 2100])
def test_an_accelerator_drops_the_same_of_a_long_row_from_either_end(count):
    scores = random_scores(3, 2100, count, 300)
    assert torch.equal(_drop_lowest_on_device(scores, count), drop_lowest(scores, count))
    assert torch.equal(drop_lowest(scores.long(), count), drop_lowest(scores, count))
