from __future__ import annotations

import pytest
import torch
from tests.accelerator import pretended_accelerator

from compressx.api.statistics import Covariance, FeatureNorms, Hessian, SequenceSample


@pytest.mark.parametrize("width", [1, 10, 256, 600])
@pytest.mark.parametrize("kind", [FeatureNorms, Hessian])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1] * 12])
def test_batches_of_any_size_and_width_give_the_float64_sum_though_half_of_a_hessian_is_gathered(kind, sizes, width):
    x = torch.randn(12, 6, width, generator=torch.Generator().manual_seed(0))
    statistic = kind(width)
    for batch in x.split(sizes):
        statistic.update(batch)
    flat = x.reshape(-1, width).double()
    value, count = statistic.tensors().values()
    assert value[1] == count[1] == "sum"
    assert int(count[0]) == 72
    squares = statistic.diagonal if kind is Hessian else value[0]
    torch.testing.assert_close(squares, flat.square().sum(dim=0), rtol=1e-5, atol=1e-4)
    if kind is Hessian:
        torch.testing.assert_close(statistic.matrix.double(), flat.T @ flat, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(statistic.matrix, statistic.matrix.T)
        assert statistic.sums.numel() <= width * (width + 256) / 2
        assert statistic.assembled().data_ptr() != statistic.assembled().data_ptr()


@pytest.mark.parametrize("kind", [FeatureNorms, Hessian])
def test_bfloat16_inputs_are_summed_in_float32_at_least(kind):
    x = torch.full((1, 4096, 2), 0.1, dtype=torch.bfloat16)
    statistic = kind(2)
    statistic.update(x)
    value, _ = statistic.tensors()["squares" if kind is FeatureNorms else "sums"]
    expected = 4096 * float(x[0, 0, 0]) ** 2
    assert value.dtype in (torch.float32, torch.float64)
    assert float(value.flatten()[0]) == pytest.approx(expected, rel=1e-4)


def test_the_order_of_batches_does_not_change_a_hessian():
    batches = torch.randn(40, 1, 64, 48, generator=torch.Generator().manual_seed(0))
    there, back = Hessian(48), Hessian(48)
    for batch, other in zip(batches, batches.flip(0), strict=True):
        there.update(batch)
        back.update(other)
    assert torch.equal(there.matrix, back.matrix)


@pytest.mark.parametrize("kind", [FeatureNorms, Hessian])
def test_sums_take_memory_only_when_a_batch_comes_or_they_are_to_be_written(kind):
    (seen, unseen), name = (kind(600), kind(600)), "squares" if kind is FeatureNorms else "sums"
    assert getattr(unseen, name).untyped_storage().nbytes() == 8
    assert not (unseen.matrix if kind is Hessian else unseen.norms).any()
    seen.update(torch.ones(1, 2, 600))
    for statistic in (seen, unseen):
        value, _ = statistic.tensors()[name]
        assert value is getattr(statistic, name)
        value += 1.0
        assert statistic.tensors()[name][0].min() == (3.0 if statistic is seen else 1.0)


@pytest.mark.parametrize("width", [1, 600])
@pytest.mark.parametrize("kind", [FeatureNorms, Hessian])
def test_sums_are_made_on_the_device_of_the_batches(kind, width):
    with pretended_accelerator() as record:
        batches = torch.ones(3, 2, width).cuda()
        copied = record.to_device_bytes
        statistic = kind(width)
        with record.counted() as counts:
            for batch in batches:
                statistic.update(batch)
        value, _ = statistic.tensors()["squares" if kind is FeatureNorms else "sums"]
        assert value.is_cuda
        if width > 1:
            assert record.to_device_bytes == copied
            assert counts.synchronisations == 0, counts.places()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_products_of_bfloat16_are_summed_in_float32():
    x = torch.randn(2, 500, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    hessian = Hessian(300)
    hessian.update(x.cuda())
    flat = x.reshape(-1, 300).double()
    torch.testing.assert_close(hessian.matrix.double().cpu(), flat.T @ flat, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("sizes", [[12], [5, 7]])
@pytest.mark.parametrize("width", [10, 600])
def test_a_covariance_is_the_hessian_of_inputs_less_their_mean_though_the_mean_is_large(sizes, width):
    x = 10 + torch.randn(12, 6, width, generator=torch.Generator().manual_seed(0))
    statistic = Covariance(width)
    for batch in x.split(sizes):
        statistic.update(batch)
    flat = x.reshape(-1, width).double()
    torch.testing.assert_close(statistic.mean, flat.mean(dim=0), rtol=1e-6, atol=1e-6)
    centred = flat - flat.mean(dim=0)
    found = statistic.assembled()
    torch.testing.assert_close(found.double(), centred.T @ centred, rtol=1e-4, atol=5e-3)
    assert {name: how for name, (_, how) in statistic.tensors().items()} == dict.fromkeys(
        ("sums", "count", "total"), "sum"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1e-5, 1e-3])
def test_a_covariance_of_features_that_hardly_vary_is_none_of_rounding(spread, dtype):
    """Scaled to a unit diagonal, as for a factor, rounding in place of two variances is a correlation above one."""
    x = torch.randn(4, 512, 24, generator=torch.Generator().manual_seed(0))
    x[..., :4] = torch.tensor([100.0, 33.3, 0.1, 17.0]) + spread * x[..., :4]
    x[..., 4:] += 1000.0
    statistic = Covariance(24)
    for batch in x.to(dtype):
        statistic.update(batch)
    flat = x.to(dtype).double().flatten(0, 1)
    centred = flat - flat.mean(dim=0)
    exact, found = centred.T @ centred, statistic.assembled().double()
    varies = exact.diagonal() > 1e-12 * flat.square().sum(dim=0)
    scale = torch.where(varies, exact.diagonal().sqrt(), 1.0)
    assert not found[~varies].any()
    assert not found[:, ~varies].any()
    wanted = (exact / scale / scale[:, None]) * varies * varies[:, None]
    torch.testing.assert_close(found / scale / scale[:, None], wanted, rtol=0, atol=5e-4)


def test_a_covariance_takes_a_batch_without_tokens():
    statistic = Covariance(3)
    statistic.update(torch.empty(0, 3))
    statistic.update(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
    assert statistic.mean.tolist() == [2.0, 2.0, 2.0]
    assert statistic.assembled().tolist() == [[2.0, 0.0, -2.0], [0.0, 0.0, 0.0], [-2.0, 0.0, 2.0]]


def test_covariances_of_two_processes_add_up_to_that_of_all():
    x = torch.randn(8, 6, 10, generator=torch.Generator().manual_seed(0))
    whole, first, second = Covariance(10), Covariance(10), Covariance(10)
    for statistic, batch in ((whole, x), (first, x[:3]), (second, x[3:])):
        statistic.update(batch)
    for name, (tensor, _) in first.tensors().items():
        tensor.add_(second.tensors()[name][0])
    torch.testing.assert_close(first.assembled(), whole.assembled(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(first.mean, whole.mean, rtol=1e-5, atol=1e-6)
    assert not Covariance(3).mean.any()
    assert not Covariance(3).assembled().any()


def test_norms_add_many_small_batches_to_a_large_one():
    statistic = FeatureNorms(1)
    statistic.update(torch.tensor([[[1e4]]]))
    for _ in range(100):
        statistic.update(torch.ones(1, 1, 1))
    assert statistic.tensors()["squares"][0].tolist() == [1e8 + 100]


@pytest.mark.parametrize(("before", "kept"), [(0, 5), (2, 3), (5, 0), (9, 0)])
def test_a_sequence_sample_keeps_the_first_sequences_up_to_its_limit_less_those_of_other_processes(before, kept):
    x = torch.randn(7, 3, 4)
    sample = SequenceSample(4, limit=5)
    sample.after(before)
    for batch in x.split(2):
        sample.update(batch)
    wanted = x[:kept].clone()
    x.zero_()
    assert torch.equal(sample.sequences, wanted)
    assert sample == SequenceSample(4, limit=5)


def test_a_sequence_sample_of_flattened_windows_does_not_take_windows_for_tokens():
    sample = SequenceSample(4, limit=5)
    sample.after(3)
    sample.update(torch.randn(6, 4))
    assert len(sample.sequences) == 5


def test_fresh_statistics_of_one_kind_and_size_compare_equal_so_that_the_walk_shares_them():
    assert Hessian(4) == Hessian(4)
    assert Hessian(4) != Hessian(5)
    assert Hessian(4) != FeatureNorms(4)
    assert SequenceSample(4, 2) != SequenceSample(4, 3)
    filled = Hessian(4)
    filled.update(torch.randn(1, 2, 4))
    assert filled == Hessian(4)
