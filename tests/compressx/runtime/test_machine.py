"""Tests of the measured rates of a device."""

import time

import pytest
import torch

from compressx.runtime import machine as module
from compressx.runtime.machine import Rates, rates

CPU = torch.device("cpu")
MEASURED = module._measured
"""The real one, which other tests do without."""


@pytest.fixture
def fresh(monkeypatch):
    """Measure anew and briefly, and forget what a test measured."""
    monkeypatch.setattr(module, "_BUDGET", 0.05)
    monkeypatch.setattr(module, "_measured", MEASURED)
    MEASURED.cache_clear()
    yield
    MEASURED.cache_clear()


def test_rates_are_those_of_a_product_of_ones_own(fresh):
    measured = rates(CPU).of(torch.float32) / torch.get_num_threads()
    x, weight, times = torch.randn(128, 1024), torch.randn(1024, 1024), []
    for _ in range(20):
        started = time.thread_time()
        x @ weight.T
        times.append(time.thread_time() - started)
    assert 1 / 4 < measured / (2 * 128 * 2**20 / min(times)) < 4 * torch.get_num_threads()


def test_a_product_counts_two_operations_an_entry(fresh, monkeypatch):
    monkeypatch.setattr(time, "thread_time", iter(range(10**6)).__next__)  # every operation takes a second
    measured = module._measured(CPU)
    assert measured.products == dict.fromkeys(("float32", "bfloat16", "float16"), 2 * 64 * 1024 * 1024)


def test_quick_products_are_measured_with_more_rows(fresh, monkeypatch):
    tick = module._LONG_ENOUGH / 4
    clock = iter(i * tick for i in range(10**6))
    monkeypatch.setattr(time, "thread_time", clock.__next__)
    monkeypatch.setattr(module, "_ROWS", (64, 256))
    assert module._product(CPU, "float32").operation.args[0].shape == (256, 1024)


def test_rates_are_measured_once_a_process_and_grow_with_the_threads(fresh, monkeypatch):
    measured = rates(CPU)
    monkeypatch.setattr(module, "_measure", None)  # called a second time, it would fail
    assert rates(CPU) == measured
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert rates(CPU).products["float32"] == pytest.approx(3 * module._measured(CPU).products["float32"])


def test_measuring_leaves_threads_and_random_numbers_as_they_are(fresh):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        rates(CPU)
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


def test_a_dtype_that_a_device_cannot_multiply_has_no_rate(fresh, monkeypatch):
    linear = torch.nn.functional.linear

    def without_bfloat16(x, weight):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return linear(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", without_bfloat16)
    measured = rates(CPU)
    assert measured.of(torch.bfloat16) == 0.0
    assert measured.of(torch.float32) > 0.0


def test_a_rate_is_that_of_the_fastest_run():
    seconds, inner, outer = iter([0.03, 0.01, 0.02]), [], []
    timed = module._Timed(lambda: inner.append(busy(next(seconds))), 100, CPU)
    for _ in range(3):
        started = time.thread_time()
        shortest = timed.run()
        outer.append(time.thread_time() - started)
    assert min(inner) <= shortest <= min(outer)
    assert timed.rate == pytest.approx(100 / shortest)


def test_time_in_which_other_processes_run_is_not_counted():
    timed = module._Timed(lambda: (busy(0.01), time.sleep(0.1)), 100, CPU)
    started = time.thread_time()
    spent = timed.run()
    assert 0.01 <= spent <= time.thread_time() - started


def busy(seconds):
    """Run on the CPU for so long; return how long it was."""
    started = time.thread_time()
    while (spent := time.thread_time() - started) < seconds:
        pass
    return spent


def test_rates_are_asked_by_dtype():
    assert Rates({"float32": 2.0}).of(torch.float32) == 2.0
