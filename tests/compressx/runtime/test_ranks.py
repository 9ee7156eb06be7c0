"""Several processes: what they tell one another, and runs that end as one process's run."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compressx.saved import save_tiny
from torch import distributed

from compressx import PruneResult
from compressx.api.statistics import FeatureNorms, Hessian, SequenceSample
from compressx.blocks.exchange import combine, exchange
from compressx.masks.maskset import MaskEntry, MaskSet
from compressx.models.architecture import survey
from compressx.models.capture import capture_calls, replay
from compressx.pipeline.preparation import refuse_nothing_held_out, refuse_uneven_steps
from compressx.pipeline.run import plan, run
from compressx.recipe.schema import ReconstructBlock, load_recipe
from compressx.runtime.errors import CalibrationError, RecipeError
from compressx.runtime.ranks import Ranks, assign, joined_ranks
from compressx.testing import tiny_model, tiny_tokens
from compressx.training.reconstruct import Passage, reconstruct


@pytest.mark.slow
@given(weights=st.lists(st.integers(1, 1000), max_size=30), size=st.integers(1, 8))
def test_tasks_are_spread_so_that_no_process_has_much_more_than_its_share(weights: list[int], size: int):
    owners = assign(weights, size)
    loads = [sum(w for w, o in zip(weights, owners, strict=True) if o == rank) for rank in range(size)]
    assert all(0 <= o < size for o in owners)
    assert max(loads, default=0) <= sum(weights) / size + max(weights, default=0)


def test_the_heaviest_task_is_given_out_first():
    assert assign([1, 1, 1, 1, 4], 2) == [1, 1, 1, 1, 0]


@given(windows=st.integers(1, 50), size=st.integers(1, 8))
def test_windows_are_shared_out_in_order_and_evenly(windows: int, size: int):
    tokens = torch.arange(windows)[:, None]
    if windows < size:
        with pytest.raises(
            CalibrationError, match=f"{windows} calibration windows are fewer than the {size} processes"
        ):
            Ranks(0, size).share(tokens)
        return
    parts = [Ranks(rank, size).share(tokens) for rank in range(size)]
    assert torch.equal(torch.cat(parts), tokens)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_process_alone_tells_itself():
    ranks = Ranks()
    norms = FeatureNorms(3)
    assert ranks.first
    assert ranks.broadcast("x") == "x"
    assert ranks.all_gather("x") == ["x"]
    assert combine(ranks, norms, lambda: None) is norms
    result = PruneResult(torch.ones(1, 1) > 0)
    assert list(exchange(ranks, [0], {0: {"a": result}}, torch.device("cpu"))) == [{"a": result}]


class Highest:
    """A statistic that is no sum."""

    def __init__(self) -> None:
        self.highest = torch.tensor([1.0, 5.0])

    def tensors(self) -> dict[str, tuple[torch.Tensor, str]]:
        return {"highest": (self.highest, "max")}


def test_of_a_statistic_that_is_a_highest_the_highest_of_all_processes_is_taken(monkeypatch: pytest.MonkeyPatch):
    others = torch.tensor([3.0, 2.0])
    reduce = {distributed.ReduceOp.MAX: torch.maximum, distributed.ReduceOp.SUM: torch.add}
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(
        distributed, "all_reduce", lambda x, op=distributed.ReduceOp.SUM: x.copy_(reduce[op](x, others))
    )
    assert combine(Ranks(0, 2), Highest(), Highest).highest.tolist() == [3.0, 5.0]  # type: ignore[arg-type]


# --- two processes


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _member(action: Callable[[], Any], environment: dict[str, str], folder: str) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    torch.save(action(), Path(folder, f"{environment['RANK']}.pt"))


def in_two(action: Callable[[], Any], folder: Path) -> list[Any]:
    """Run something in two processes, as `torchrun` would start them, and return what each made of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.compressx.preloaded"])
    group = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    members = [
        context.Process(target=_member, args=(action, {**group, "RANK": str(rank)}, str(folder))) for rank in range(2)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert [member.exitcode for member in members] == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def joined(action: Callable[[Ranks], Any]) -> Any:
    """Do something with the processes as they know one another."""
    with joined_ranks(torch.device("cpu")) as ranks:
        return action(ranks)


def inputs() -> torch.Tensor:
    return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))


def _combined(ranks: Ranks) -> dict[str, torch.Tensor]:
    mine = torch.tensor_split(inputs(), 2)[ranks.rank] if ranks.size > 1 else inputs()
    found = {}
    for kind in (FeatureNorms, Hessian, SequenceSample):
        statistic = kind(4)
        for batch in mine.split(2):
            statistic.update(batch)
        merged = combine(ranks, statistic, lambda kind=kind: kind(4))
        found |= {f"{kind.__name__}.{name}": t.clone() for name, (t, _) in merged.tensors().items()}
        if kind is not SequenceSample:
            assert merged.tokens == 30
    return found


@pytest.mark.slow
def test_statistics_of_two_processes_are_those_of_one(tmp_path: Path):
    alone = _combined(Ranks())
    for found in in_two(partial(joined, _combined), tmp_path):
        assert found.keys() == alone.keys()
        assert torch.equal(found["SequenceSample.sequences"], inputs())
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)  # batches of other sizes


def _exchanged(ranks: Ranks) -> list[Any]:
    info = {"error": 0.5}
    decided = {}
    for task in range(3):
        if task % 2 == ranks.rank:
            keep = torch.arange(6).view(2, 3) % (task + 2) == 0
            weight = None if task == 1 else torch.full((2, 3), float(task))
            images, history = {"map": torch.ones(2, 2)}, {"loss": (1.0, 0.5)}
            decided[task] = dict.fromkeys("ab", PruneResult(keep, weight, info, images, history))
    told = []
    for results in exchange(ranks, [0, 1, 0], decided, torch.device("cpu")):
        assert results["a"].info is results["b"].info
        assert results["a"].images is results["b"].images
        told.append([[n, r.keep, r.weight, dict(r.info), r.images["map"], list(r.history["loss"])]
                     for n, r in results.items()])  # fmt: skip
    return told


@pytest.mark.slow
def test_every_process_gets_every_result_and_what_linears_share(tmp_path: Path):
    first, second = in_two(partial(joined, _exchanged), tmp_path)
    assert len(first) == 3
    for task, (one, other) in enumerate(zip(first, second, strict=True)):
        for mine, theirs in zip(one, other, strict=True):
            assert mine[0] == theirs[0]
            assert torch.equal(mine[1], theirs[1])
            assert torch.equal(mine[1], torch.arange(6).view(2, 3) % (task + 2) == 0)
            assert (mine[2] is None and theirs[2] is None) if task == 1 else torch.equal(mine[2], theirs[2])
            assert mine[3] == theirs[3] == {"error": 0.5}
            assert mine[5] == theirs[5] == [1.0, 0.5]


_SEEN, _HELD_OUT = [[0, 1, 2], [3, 4, 5]], [[6], [7]]  # of each process


def _reconstructed(ranks: Ranks) -> dict[str, Any]:
    model = tiny_model("llama")
    mine = [0, 1] if ranks.size == 1 else [ranks.rank]
    order = [window for parts in (_SEEN, _HELD_OUT) for rank in mine for window in parts[rank]]
    states, calls = capture_calls(model, survey(model).blocks, tiny_tokens(sequences=8).split(1))
    fqn, block = next(iter(survey(model).blocks.items()))
    with torch.no_grad():
        targets = [replay(block, x, call) for x, call in zip(states, calls[fqn], strict=True)]
    masks = {}
    for name, module in block.named_modules(prefix=fqn):
        if isinstance(module, torch.nn.Linear):
            keep = module.weight.abs() > module.weight.abs().median()
            module.weight.data.mul_(keep)
            masks[name] = MaskEntry(keep, "50%", "magnitude", "")
    passages = [Passage(states[i], targets[i], partial(replay, block, call=calls[fqn][i])) for i in order]
    settings = ReconstructBlock(passes=3, learning_rate=0.03, held_out=0.25, batch_size=6)
    report = reconstruct(model, fqn, masks, passages, settings, ranks)
    return {"history": list(report.history), **{n: p.detach() for n, p in block.named_parameters()}}


@pytest.mark.slow
def test_two_processes_train_a_block_as_one_does_on_both_their_texts(tmp_path: Path):
    alone = _reconstructed(Ranks())
    assert alone["history"][-1] < 0.9 * alone["history"][0]
    for found in in_two(partial(joined, _reconstructed), tmp_path):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


# --- whole runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama")


RULES = {
    "mixed": [
        {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.6},
        {"targets": ["*.v_proj"], "pruner": "wanda", "sparsity": 0.5, "reconstruct": "sparsegpt"},
        {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5},
    ],
    "wanda": [{"targets": ["*"], "pruner": "wanda", "pattern": "2:4"}],
}


def write_recipe(saved: Path, rules: list[dict[str, Any]], folder: Path, **more: Any) -> Path:
    text = {"text": str(saved.with_name("text.txt"))}
    asked = {
        "model": {"path": str(saved)},
        "calibration": {"dataset": text, "samples": 8, "sequence_length": 32, "batch_size": 2},
        "prune": rules,
        "evaluate": {"token_perplexity": {"dataset": text, "sequence_length": 32, "samples": 8}},
        "output": str(folder / "out"),
        **more,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(asked))
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))


def _run(recipe: Path) -> None:
    run(recipe)  # what it returns is not for torch.save


def report_of(recipe: Path, processes: int) -> dict[str, Any]:
    """Run a recipe on so many processes; returns its report."""
    if processes == 2:
        in_two(partial(_run, recipe), recipe.parent)
    else:
        run(recipe)
    told: dict[str, Any] = json.loads((recipe.parent / "out/report.json").read_text())
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "streaming"), [("mixed", True), ("wanda", False)])
def test_two_processes_end_as_one_does(model: Path, rules: str, streaming: bool, tmp_path: Path):
    outputs = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        source = {"path": str(model), "streaming": streaming}
        report = report_of(write_recipe(model, RULES[rules], folder, model=source), processes)
        outputs.append((MaskSet.load(folder / "out/masks.safetensors"), report))
    (one, alone), (two, together) = outputs
    assert one.keys() == two.keys()
    differing = sum(int((one[n].keep != two[n].keep).sum()) for n in one) / sum(one[n].keep.numel() for n in one)
    assert differing < 1e-4
    figures = [r["evaluation"]["pruned"]["token_perplexity"] for r in (alone, together)]
    assert figures[1] == pytest.approx(figures[0], rel=1e-3)
    linears = [[x["name"] for block in r["blocks"] for x in block["layers"]] for r in (alone, together)]
    assert linears[0] == linears[1]


def allocations(model: Path, tmp_path: Path, method: str = "divergence", **rule: Any) -> list[dict[str, Any]]:
    """Return what one process and two report of an allocation that they measured."""
    told = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        allocation = {"method": method, "target": 0.5, **({"sparsities": [0.3, 0.7]} if method == "divergence" else {})}
        asked = write_recipe(model, [{"targets": ["*"], **rule}], folder, allocation=allocation, evaluate=None)
        told.append(report_of(asked, processes)["allocation"])
    return told


@pytest.mark.slow
def test_an_allocation_is_measured_on_the_text_of_all_processes(model: Path, tmp_path: Path):
    alone, together = allocations(model, tmp_path, "owl", pruner="wanda")
    assert alone["units"] == together["units"]


@pytest.mark.slow
def test_what_sparsity_costs_is_measured_by_the_first_of_several_processes_as_by_one(model: Path, tmp_path: Path):
    alone, together = allocations(model, tmp_path, pruner="wanda")
    assert alone["units"] == together["units"]


@pytest.mark.slow
def test_the_first_of_two_processes_fine_tunes_as_one_does(model: Path, tmp_path: Path):
    losses = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        rules = [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}]
        asked = write_recipe(model, rules, folder, finetune={"steps": 3, "learning_rate": 1e-3})
        losses.append(report_of(asked, processes)["finetune"]["losses"])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_two_processes_train_blocks_on_both_their_texts_and_end_with_one_model(model: Path, tmp_path: Path):
    rules = [{"targets": ["*"], "pruner": "sensitivity", "sparsity": 0.5, "group": "joint"}]
    reports = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        trained = {"reconstruct_block": {"passes": 3, "learning_rate": 0.03, "held_out": 0.25, "batch_size": 4}}
        reports.append(report_of(write_recipe(model, rules, folder, evaluate=None, **trained), processes))
    alone, together = ([x["reconstruction"] for x in r["blocks"]] for r in reports)
    for one, two in zip(alone, together, strict=True):
        assert two["after"] < two["before"]
        assert two["before"] == pytest.approx(one["before"], rel=0.2)  # other windows are held out


def test_a_training_step_that_processes_cannot_share_is_refused(model: Path, tmp_path: Path):
    """Each would take a batch, and blocks be trained in larger and fewer steps than the recipe says."""
    rules = [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]
    loaded = load_recipe(write_recipe(model, rules, tmp_path, reconstruct_block={"batch_size": 6}))
    for processes in (1, 3):
        refuse_uneven_steps(loaded, processes)
    with pytest.raises(RecipeError) as refused:
        refuse_uneven_steps(loaded, 2)
    assert "a step of 6 windows cannot be shared by 2 processes in calibration batches of 2" in str(refused.value)
    assert str(refused.value).endswith("expected a multiple of 4, or calibration.batch_size: 3")
    with pytest.raises(RecipeError, match=r"in calibration batches of 2; expected a multiple of 8$"):
        refuse_uneven_steps(loaded, 4)


def test_training_of_which_nothing_could_be_held_out_is_refused(model: Path, tmp_path: Path):
    """Its error would be that of the text that it learns from, and go down whatever is learnt."""
    rules = [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]
    loaded = load_recipe(write_recipe(model, rules, tmp_path, reconstruct_block={}))
    samples, batch = loaded.recipe.calibration.samples, loaded.recipe.calibration.batch_size
    refuse_nothing_held_out(loaded, (samples - 1) // (batch + 1))
    processes = samples // batch
    with pytest.raises(RecipeError) as refused:
        refuse_nothing_held_out(loaded, processes)
    assert f"are one batch of {batch} for each of {processes} processes; expected" in str(refused.value)
    assert f"calibration.samples of {(batch + 1) * processes} or more, or a smaller" in str(refused.value)
    few = load_recipe(tmp_path / "recipe.yaml", [f"calibration.samples={batch}"])
    with pytest.raises(
        RecipeError, match=r"recipe\.yaml:\d+:\d+: no batch could be held out: 2 calibration windows are"
    ):
        plan(few)


# --- processes that torchrun starts, and that end early


def torchrun(
    recipe: Path, *options: str, plugins: tuple[str, ...] = (), command: str = "run"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}",
             "-m", "compressx", *(f"--plugin={name}" for name in plugins), command, str(recipe), *options]  # fmt: skip
    return subprocess.run(whole, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_a_run_refuses_training_steps_that_its_processes_cannot_share(model: Path, tmp_path: Path):
    rules = [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]
    told = torchrun(write_recipe(model, rules, tmp_path, reconstruct_block={"batch_size": 6}))
    assert told.returncode != 0
    assert re.search(r"recipe\.yaml:1:\d+: a step of 6 windows cannot be shared by 2 processes", told.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_runs_of_a_sweep_find_one_another_each_time_and_the_first_process_tells(model: Path, tmp_path: Path):
    rules = [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}]
    recipe = write_recipe(model, rules, tmp_path, evaluate=None, calibration=None)
    sparsities = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    done = torchrun(recipe, f"--grid=prune.0.sparsity={','.join(map(str, sparsities))}", command="sweep")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"[{i}/6]") for i in range(1, 7)] == [1] * 6
    reports = [json.loads((tmp_path / f"out-sweep/sparsity={s}/report.json").read_text()) for s in sparsities]
    assert [r["sparsity"] for r in reports] == pytest.approx(sparsities, abs=0.01)
    assert (tmp_path / "out-sweep/compare.csv").is_file()


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others_with_its_error(model: Path, tmp_path: Path):
    recipe = write_recipe(model, RULES["wanda"], tmp_path)
    done = torchrun(recipe, "--set", "calibration.samples=1")
    assert done.returncode != 0
    assert "1 calibration windows are fewer than the 2 processes" in done.stderr
    assert not (tmp_path / "out").exists()


CRASHING = '''
import os, signal
from pathlib import Path
from pydantic import BaseModel
from compressx import FeatureNorms, PruneResult, PrunerSpec, hookimpl, keep_masks

class Options(BaseModel):
    pass

class Crashing:
    """Magnitude pruning whose second process is killed once, in the second block."""

    def observe(self, block, name):
        return FeatureNorms(block.linears[name].in_features)

    def prune(self, block, patterns, stats):
        marker = Path(os.environ["MARKER"])
        if block.index == 1 and os.environ.get("RANK") == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        scores = {n: block.linears[n].weight.abs() * stats[n].norms for n in patterns}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}

@hookimpl
def compressx_pruners():
    return [PrunerSpec("crashing", "for a test", Options, lambda _: Crashing(), separable=True)]
'''


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_both_go_on_from_the_last_finished_block(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "crashing.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MARKER", str(tmp_path / "killed"))
    rules = [{"targets": ["*"], "pruner": "crashing", "sparsity": 0.5}]
    recipe = write_recipe(model, rules, tmp_path, evaluate=None)
    died = torchrun(recipe, plugins=("crashing",))
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr, died.stderr
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob(".out.partial-*/state.json")
    assert json.loads(left.read_text())["finished"] == ["model.layers.0"]
    resumed = torchrun(recipe, "--resume", plugins=("crashing",))
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("written to") == 1
    whole = torchrun(recipe, "--set", f"output={tmp_path / 'whole'}", plugins=("crashing",))
    assert whole.returncode == 0, whole.stderr
    for file in ("masks.safetensors", "model/model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
