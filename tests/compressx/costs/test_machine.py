"""Machines of an estimate: assumed ones are read or refused, this one is measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from compressx.api.work import KINDS, Work
from compressx.costs import machine as module
from compressx.costs.machine import ASSUMED, Machine, assumed, measured
from compressx.runtime.errors import RecipeError
from compressx.runtime.rates import Rates

UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@pytest.mark.parametrize("name", ASSUMED)
def test_every_assumed_machine_has_a_rate_for_every_kind_of_work(name):
    machine = assumed(name)
    assert {*machine.rates} == {*KINDS}
    assert all(rate > 0 for rate in machine.rates.values())
    assert machine.gpu


@given(st.integers(1, 9999), st.sampled_from("KMGT"), st.integers(1, 999), st.sampled_from("KMGT"))
def test_a_processor_is_read_from_two_rates_in_any_units(flops, of_flops, moved, of_moved):
    machine = assumed(f"cpu:{flops}{of_flops}F,{moved}.5{of_moved}B/s")
    assert machine.rates["float32"] == flops * UNITS[of_flops]
    assert machine.rates["moved"] == pytest.approx((moved + 0.5) * UNITS[of_moved] / 2)
    assert {*machine.rates} == {*KINDS}
    assert not machine.gpu


@given(st.text())
@example("cpu")
@example("cpu:250GF")
@example("cpu:0GF,20GB/s")
@example("cpu:250GF,0GB/s")
@example("cpu:250GF,20GB")
@example("h100:250GF,20GB/s")
@example("gpu:250GF,20GB/s")
@example("cpu:-1GF,20GB/s")
@example("cpu:1e3GF,20GB/s")
@example("cpu:250GF,20GB/s ")
def test_anything_else_is_refused_with_what_was_given_and_what_was_expected(text):
    if text in ASSUMED:
        return
    with pytest.raises(RecipeError) as refused:
        assumed(text)
    assert str(refused.value).startswith(f"--assume {text}: expected h100, a100, 4090, or ")
    assert "cpu:250GF,20GB/s" in str(refused.value)


def test_kinds_of_work_take_place_one_after_the_other():
    machine = Machine("", dict.fromkeys(KINDS, 2.0) | {"moved": 10.0})
    assert machine.seconds(Work.of(float32=6, moved=5, launches=1)) == 3 + 0.5 + 0.5


@pytest.mark.slow
def test_this_machine_is_measured_once_and_multiplies_faster_than_it_decomposes(monkeypatch):
    monkeypatch.undo()  # other tests have a machine that is not measured
    module._of_a_thread.cache_clear()
    here = measured(torch.device("cpu"))
    assert here == measured(torch.device("cpu"))
    assert {*here.rates} == {*KINDS}
    assert here.rates["float32"] > here.rates["eigen"] > 1e6
    assert here.rates["moved"] > 1e8
    module._of_a_thread.cache_clear()


@pytest.mark.parametrize("kind", ["factor", "eigen", "selected"])
def test_a_gpu_is_measured_with_enough_work_to_be_busy(kind):
    of_gpu, of_cpu = (module._SAMPLES[kind](torch.device(name))[1] for name in ("meta", "cpu"))  # meta is no CPU
    assert of_gpu > 30 * of_cpu


def test_kernels_of_a_program_follow_one_another_no_faster_than_any_program_was_seen_to_launch_them(monkeypatch):
    monkeypatch.setattr(module, "rates", lambda _: Rates(dict.fromkeys(("float32", "bfloat16"), 1.0), 1.0))
    monkeypatch.setattr(module, "_rate", lambda *_: 1e9)
    found = {name: module._of_a_thread.__wrapped__(torch.device(name))["launches"] for name in ("cuda", "cpu")}
    assert found == {"cuda": ASSUMED["h100"].rates["launches"], "cpu": 1e9}


@pytest.mark.parametrize(
    ("given", "processes", "multiplies", "moves"),
    # Of eight cores: all for one process, four each, one each, half of one each.
    [(None, 1, 8, 1), (None, 2, 4, 1), (None, 8, 1, 1), (None, 16, 0.5, 0.5), ("3", 2, 3, 1), ("3", 4, 2, 1)],
)
def test_processes_part_the_cores_of_a_processor_among_them(monkeypatch, given, processes, multiplies, moves):
    monkeypatch.setattr(module, "_of_a_thread", lambda _: dict.fromkeys(KINDS, 1.0))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: int(given or 8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    found = measured(torch.device("cpu"), processes).rates
    assert (found["float32"], found["attention16"], found["moved"]) == (multiplies, multiplies, moves)


def test_processes_part_an_assumed_processor_and_have_a_gpu_each():
    whole, part = (assumed("cpu:200GF,20GB/s", n).rates for n in (1, 4))
    assert (part["float32"], part["moved"]) == (whole["float32"] / 4, whole["moved"] / 4)
    assert assumed("h100", 4) == assumed("h100")
