"""What could be broken without another test noticing, as changing single lines of the source showed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.compressx.blocks.test_walk import HALF, SPECS, batches, plan_all, spec_of
from tests.compressx.test_admm import problem as admm_problem
from tests.compressx.test_admm import pruned
from tests.compressx.test_obs import problem

from compressx import PruneResult
from compressx.admm import Metric, prune, solve
from compressx.architecture import survey
from compressx.blocks.walk import prune_model
from compressx.models.access import InMemory
from compressx.models.capture import capture_calls, replay
from compressx.obs import Factors, inverse_cholesky
from compressx.patterns import NM, FixedMask, Unstructured, drop_lowest, keep_mask
from compressx.recipe.schema import ReconstructBlock
from compressx.recipe.tuning import Finetune
from compressx.statistics import FeatureNorms, Hessian
from compressx.testing import tiny_model, tiny_tokens
from compressx.training import finetune as tuning
from compressx.training.distillation import distillation_loss
from compressx.training.reconstruct import Passage, reconstruct


# obs1
def test_features_that_never_fire_do_not_water_the_damping_down():
    _, x = problem(1, 12)
    x[:, :6] = 0
    hessian = x.T @ x
    factor, _ = inverse_cholesky(hessian, 0.1)
    live = hessian[6:, 6:]
    damped = live + 0.1 * live.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close((factor.T @ factor)[6:, 6:], torch.linalg.inv(damped), rtol=1e-9, atol=1e-12)


# obs2
def test_each_linear_gets_the_factor_of_its_own_hessian():
    factors, hessians = Factors(0.01), {}
    for seed, name in enumerate("ab"):
        hessians[name] = Hessian(12)
        hessians[name].update(problem(1, 12, seed=seed)[1])
    for name in "aba":
        assert torch.equal(factors.of(name, hessians[name])[0], inverse_cholesky(hessians[name].matrix)[0])


# admm1
def test_where_the_start_wins_its_weights_are_solved_for():
    weight, x = admm_problem(mix=0.003, tokens=20_000)
    metric = Metric.of(x.T @ x, 0.01)
    target = metric.scaled(weight)
    start = keep_mask(target.square(), NM(2, 4))
    solution = prune(weight, metric, NM(2, 4))
    solved, steps, _ = solve(target, metric, start)
    assert torch.equal(solution.keep, start)
    assert solution.solver_steps == steps > 0
    torch.testing.assert_close(metric.scaled(solution.weight), solved)


# admm2
def test_the_steps_of_the_solver_are_limited_on_a_given_mask_too():
    weight, x = admm_problem()
    keep = torch.rand(24, 48, generator=torch.Generator().manual_seed(1)) > 0.5
    assert pruned(weight, x.T @ x, FixedMask(keep, Unstructured(0.5)), solver_steps=2).solver_steps == 2


# admm3
def test_a_change_that_the_inputs_do_not_see_costs_nothing_and_never_less():
    weight, x = admm_problem(tokens=20)
    metric = Metric.of((x.T @ x).float(), 0.01)
    unseen = torch.linalg.svd(x, full_matrices=True).Vh[20:].float()
    costs = [metric.squares(metric.scaled(change[None]))[1] for change in unseen]
    assert min(costs) >= 0.0
    assert max(costs) < 1e-3 * metric.squares(metric.scaled(weight))[1]


# pat1
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_scores_of_any_dtype_drop_exactly_the_lowest(dtype):
    scores = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(6)])
    assert torch.equal(drop_lowest(scores.to(dtype), 13), scores >= 13)


# stat2
def test_norms_add_many_small_batches_to_a_large_one():
    statistic = FeatureNorms(1)
    statistic.update(torch.tensor([[[1e4]]]))
    for _ in range(100):
        statistic.update(torch.ones(1, 1, 1))
    assert statistic.tensors()["squares"][0].tolist() == [1e8 + 100]


class Spy:
    """Asks for norms, keeps what it is given, and prunes by magnitude."""

    def __init__(self):
        self.given = {}

    def observe(self, block, name):
        return FeatureNorms(block.linears[name].in_features)

    def prune(self, block, patterns, stats):
        self.given |= stats
        return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}


# obsv1
def test_a_linear_that_a_block_calls_twice_is_observed_twice_on_every_batch():
    model, spy = tiny_model("llama"), Spy()
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: output + module.gate_proj(2.0 * args[0])[..., :64])
    plan = plan_all(model, spec_of(spy), HALF, only="layers.0.mlp.gate_proj")
    list(prune_model(InMemory(model), plan, batches(2)))
    assert spy.given["model.layers.0.mlp.gate_proj"].tokens == 2 * 8 * 32


# obsv2
def test_a_linear_that_shares_its_input_only_later_keeps_a_statistic_of_its_own():
    model, spy = tiny_model("llama"), Spy()
    model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(
        lambda module, args: (args[0].clone(),) if len(args[0]) == 5 else args
    )
    plan = plan_all(model, spec_of(spy), HALF, only=".0.self_attn.")
    list(prune_model(InMemory(model), plan, batches(5)))
    query, key = (spy.given[f"model.layers.0.self_attn.{n}_proj"] for n in "qk")
    assert query is not key
    assert query.tokens == key.tokens == 8 * 32
    torch.testing.assert_close(query.squares, key.squares)


def trained_twice(architecture, of, **settings):
    """Train a pruned block, and measure it again where another training of it begins."""
    model = tiny_model(architecture, dtype=of)
    plan = plan_all(model, SPECS["wanda"], Unstructured(0.5))
    masks = next(iter(prune_model(InMemory(model), plan, batches(2)))).masks
    fqn, block = next(iter(survey(model).blocks.items()))
    dense = tiny_model(architecture, dtype=of)
    states, calls = capture_calls(dense, survey(dense).blocks, batches(2))
    with torch.no_grad():
        targets = [replay(survey(dense).blocks[fqn], x, c) for x, c in zip(states, calls[fqn], strict=True)]
    runs = [partial(replay, block, call=c) for c in calls[fqn]]
    passages = [Passage(*each) for each in zip(states, targets, runs, strict=True)]
    asked = ReconstructBlock(**{"passes": 2, "learning_rate": 0.03, "held_out": 0.25, **settings})
    return [reconstruct(model, fqn, masks, passages, asked) for _ in range(2)]


# rec7
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_error_after_training_is_that_of_the_weights_that_are_left_in_bfloat16(architecture):
    first, second = trained_twice(architecture, torch.bfloat16, dtype="float32")
    assert first.after < first.before
    assert second.before == first.after


# rec4
def test_what_is_measured_sees_every_parameter_that_a_step_changed_whatever_the_products():
    """Within one autocast, narrow copies of biases would be kept from step to step."""
    first, second = trained_twice("qwen2", torch.float32, dtype="bfloat16", passes=4)
    assert first.after < first.before
    assert second.before == first.after


# rec5
def test_products_of_a_blocks_training_are_in_the_dtype_that_is_asked_for():
    for model_dtype, automatic in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        before = {
            d: trained_twice("llama", model_dtype, dtype=d, passes=1)[0].before for d in ("float32", "bfloat16", "auto")
        }
        assert before["float32"] != before["bfloat16"]
        assert before["auto"] == before[automatic]


# rec3
def test_a_step_of_a_blocks_training_is_as_many_windows_as_are_asked_for(monkeypatch):
    steps = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda optimizer: steps.append(1) or step(optimizer))
    counts = []
    for size in (2, 4, 6):  # six windows in batches of two are trained on
        trained_twice("llama", torch.float32, passes=1, batch_size=size)
        counts.append(len(steps) // 2)
        steps.clear()
    assert counts == [3, 2, 1]


from tests.compressx.training.test_finetune import WINDOWS, tuned  # noqa: E402
from tests.compressx.training.test_finetune import pruned as pruned_model  # noqa: E402


# ft3
def test_the_temperature_divides_the_logits_of_both():
    model, _ = pruned_model("llama")
    dense = tiny_model("llama")
    with torch.no_grad():
        logits = [m(WINDOWS).logits.flatten(0, 1) for m in (model, dense)]
    for temperature in (1.0, 3.0):
        _, _, report = tuned(steps=1, batch_size=8, temperature=temperature)
        assert report.losses[0] == pytest.approx(float(distillation_loss(*logits, temperature)), rel=1e-5)


# ft2
def test_weights_do_not_decay(monkeypatch):
    seen = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda optimizer: seen.extend(optimizer.param_groups) or step(optimizer)
    )
    tuned(steps=2)
    assert {group["weight_decay"] for group in seen} == {0.0}


# ft1
def test_gradients_are_clipped_to_a_norm_of_one(monkeypatch):
    norms = []
    step = torch.optim.AdamW.step

    def watched(optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.stack([g.norm() for g in gradients]).norm()))
        return step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    monkeypatch.setattr(tuning, "next_token_loss", lambda *a: 1000.0 * real(*a))
    tuned(steps=2, teacher="none")
    assert norms == pytest.approx([1.0, 1.0], rel=1e-3)


real = tuning.next_token_loss


# ft4
def test_dropout_drops_other_units_at_every_step():
    model, masks = pruned_model("gpt2")
    settings = Finetune(steps=3, warmup=0.0, learning_rate=1e-12, batch_size=1, teacher="none")
    losses = tuning.finetune(model, masks, WINDOWS[:1], settings).losses
    assert len(set(losses)) == 3  # of the same window and, all but, the same weights


from tests.compressx_attnprune.test_kronecker import PATTERNS, by  # noqa: E402
from tests.compressx_attnprune.test_kronecker import problem as kronecker_problem  # noqa: E402

from compressx_attnprune import kronecker  # noqa: E402


# kr1
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("iterations", [2, 24])
def test_a_selection_takes_the_steps_of_admm_with_the_dual_as_published(pattern, iterations):
    """A linear system for W, a projection for Z, the dual V itself, which a rise of the penalty does not change."""
    of, choose = kronecker_problem(0), by(pattern)
    metrics = [torch.stack([torch.kron(r, h) for r, h in zip(c.rows, c.inputs, strict=True)]) for c in of.curvatures]
    units = [m.diagonal(dim1=1, dim2=2).sqrt() for m in metrics]
    grams = [m / u[:, :, None] / u[:, None, :] for m, u in zip(metrics, units, strict=True)]
    dense = [w.flatten(1) * u for w, u in zip(of.dense, units, strict=True)]

    def project(points):
        keeps = choose([p.square().view_as(w) for p, w in zip(points, of.dense, strict=True)])
        return [p * k.flatten(1) for p, k in zip(points, keeps, strict=True)], keeps

    sparse, keeps = project(dense)
    duals = [torch.zeros_like(w) for w in dense]
    for penalty in torch.logspace(*(torch.tensor(kronecker.PENALTIES).log10().tolist()), iterations).double():
        sums = []
        for gram, w, z, v in zip(grams, dense, sparse, duals, strict=True):
            system = gram + penalty * torch.eye(w.shape[1], dtype=w.dtype)
            near = torch.linalg.solve(system, (gram @ w[..., None])[..., 0] + penalty * z - v)
            sums.append(kronecker.RELAXATION * near + (1 - kronecker.RELAXATION) * z + v / penalty)
        sparse, keeps = project(sums)
        duals = [penalty * (s - z) for s, z in zip(sums, sparse, strict=True)]
    for got, wanted in zip(kronecker.select(of, choose, iterations=iterations)[0], keeps, strict=True):
        assert torch.equal(got, wanted)


from tests.compressx_attnprune.test_solver import both, make_layer  # noqa: E402
from tests.compressx_attnprune.test_solver import solve as solve_layer  # noqa: E402

from compressx_attnprune import objective, solver  # noqa: E402
from compressx_attnprune.baselines import Inputs  # noqa: E402
from compressx_attnprune.geometry import Attention, Projection  # noqa: E402


# so2
def test_ties_between_relaxed_masks_fall_by_the_norm_of_the_feature_too():
    x = torch.tensor([1.0, 10.0, 0.1]).expand(1, 4, 3)
    weights = (torch.tensor([[3.0, 1.0, 1.0]]), torch.tensor([[2.0, 0.5, 4.0]]))
    query, key = solver.ranked((torch.ones(1, 3), torch.ones(1, 3)), Inputs(x), weights)
    order = torch.cat([query, key], dim=1).flatten().argsort().tolist()
    assert order == [2, 5, 3, 0, 4, 1]  # 3, 10, 0.1 and 2, 5, 0.4


# so3
def test_no_damping_beyond_the_most_is_tried(monkeypatch):
    layer, dampings = replace(make_layer(), damping=0.1), []

    def gauss_newton(layer, budget, problem=None):
        dampings.append((problem or layer.problem).damping)
        return budget.choose(layer.dense), (-layer.dense[0], layer.dense[1])

    monkeypatch.setattr(solver, "gauss_newton", gauss_newton)
    assert solve_layer(layer, both(Unstructured(0.5, "joint"))).fell_back
    assert dampings == [0.1, 0.3]


# ob1
def test_a_shift_common_to_all_keys_costs_mixed_values_no_precision():
    attention = Attention(Projection(2), Projection(1), head_dim=8, scaling=0.3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 40, 8, generator=generator) for h in (2, 1, 1))
    q, k = q - q.mean(dim=-1, keepdim=True), k + 300.0  # the shift leaves every score as it is
    exact = objective.mixed(attention, q.double(), k.double(), v.double())
    got = objective.mixed(attention, q, k, v)
    assert (got - exact).norm() <= 1e-6 * exact.norm()


from tests.compressx_attnprune import blocks as attention_blocks  # noqa: E402
from tests.compressx_attnprune.pruning import prune as prune_attention  # noqa: E402

from compressx_attnprune import curvature  # noqa: E402


# pl2
def test_the_damping_that_is_asked_for_reaches_the_curvature(monkeypatch):
    seen = []
    original = solver.solve
    monkeypatch.setattr(solver, "solve", lambda of, *rest: seen.append(of.problem.damping) or original(of, *rest))
    recorded = attention_blocks.record("llama", sequences=16)
    default, heavy = (
        next(iter(prune_attention(recorded, Unstructured(0.5, "joint"), **o).values())) for o in ({}, {"damping": 0.2})
    )
    assert seen == [0.003, 0.2]
    assert not torch.equal(default.weight, heavy.weight)


# cu1
def test_every_token_counts_in_expectation_what_it_weighs_the_light_ones_too():
    weights = torch.linspace(0.1, 1.0, 20) ** 3
    drawn = weights.expand(20_000, -1)
    chosen, importance = curvature._sample(drawn, 8, torch.Generator().manual_seed(0))
    mean = torch.zeros_like(drawn).scatter_(1, chosen, importance).mean(dim=0)
    torch.testing.assert_close(mean, weights, rtol=0.25, atol=0.0)


import os  # noqa: E402

from compressx.allocation.spread import _MonotoneCubic  # noqa: E402
from compressx.errors import ArtifactError  # noqa: E402
from compressx.models.hidden import InFiles  # noqa: E402
from compressx.models.loading import Checkpoint, load_model  # noqa: E402
from compressx.models.streaming import open_streamed  # noqa: E402
from compressx.ranks import assign  # noqa: E402


# al9
def test_a_slope_is_nearer_to_that_of_the_narrower_side():
    """Fritsch and Butland: (w0 + w1) / (w0 / s0 + w1 / s1) with w0 = h0 + 2 h1 and w1 = 2 h0 + h1."""
    assert _MonotoneCubic((0.0, 1.0, 3.0), (0.0, 1.0, 2.0)).slopes[1] == pytest.approx(9 / (5 / 1.0 + 4 / 0.5))


# rank1
def test_the_heaviest_task_is_given_out_first():
    assert assign([1, 1, 1, 1, 4], 2) == [1, 1, 1, 1, 0]


from tests.compressx.masks.test_sparsifier import two_of_four  # noqa: E402


# mask4
def test_masks_that_are_loaded_after_a_move_are_those_of_the_state_dict_too():
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    others = two_of_four(other)
    sparsifier = two_of_four(model).to_torch_ao(model)
    model._apply(lambda tensor: tensor.clone())  # what `.to(device)` does: every buffer becomes another tensor
    sparsifier.load_state_dict(others.to_torch_ao(other).state_dict())
    for fqn, value in sparsifier.state_dict()["state"].items():
        assert torch.equal(value["mask"], others[fqn.removesuffix(".weight")].keep)


# mod1
def test_what_transformers_keeps_in_float32_is_streamed_in_float32(tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    checkpoint = Checkpoint(str(tmp_path), dtype="bfloat16")
    expected, streamed = load_model(checkpoint).state_dict(), open_streamed(checkpoint)
    assert len({t.dtype for t in expected.values()}) == 2
    with streamed.materialise("model.layers.1"):
        assert all(t.dtype == expected[n].dtype for n, t in streamed.tensors("model.layers.1").items())


# mod3
def test_room_for_hidden_states_is_taken_up_before_they_are_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArtifactError, match=r"0\.states: No space left"):
        InFiles(tmp_path)(torch.ones(3))


# al2, al3
def test_owl_measures_as_many_windows_and_counts_as_many_outliers_as_are_asked_for():
    from tests.compressx.allocation.test_measure import REST, plan, rule
    from tests.compressx.allocation.test_measure import SPECS as ALLOCATED

    from compressx.allocation.methods import allocate
    from compressx.recipe.methods import OwlAllocation

    model = tiny_model("llama")
    planned = plan(model, (rule(0, ALLOCATED["magnitude"]), "layer", REST))

    def outliers(samples, threshold):
        settings = OwlAllocation(method="owl", target=0.5, samples=samples, outlier_threshold=threshold)
        return [u.outliers for u in allocate(InMemory(model), planned, settings, tiny_tokens().split(2))[1].units]

    few, all_of_them, rarer = outliers(2, 2.0), outliers(8, 2.0), outliers(8, 4.0)
    assert few != all_of_them
    assert all(a > b for a, b in zip(all_of_them, rarer, strict=True))


from tests.compressx.pipeline import test_resume as resuming  # noqa: E402
from tests.compressx.saved import save_tiny  # noqa: E402

from compressx.pipeline.run import run  # noqa: E402


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama")


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))


MAGNITUDE = [{"targets": ["*.up_proj", "lm_head"], "pruner": "wanda", "sparsity": 0.5}]


# wk2
@pytest.mark.usefixtures("in_tmp")
def test_what_lies_outside_the_blocks_is_not_pruned_again(saved):
    asked = {**resuming.recipe(saved), "prune": MAGNITUDE, "evaluate": None}
    run({**asked, "output": "whole"})
    resuming.stopped(asked, 4)
    told = []
    run(asked, resume=True, progress=lambda stage, done, total, _: told.append((stage, done, total)))
    assert [x for x in told if x[0] == "prune"] == [("prune", 4, 4)]
    assert resuming.artifacts("out") == resuming.artifacts("whole")


# jn1
@pytest.mark.usefixtures("in_tmp")
def test_hidden_states_of_the_last_finished_block_alone_are_kept(saved):
    resuming.stopped({**resuming.recipe(saved), "prune": MAGNITUDE, "evaluate": None}, 2)
    (left,) = resuming.leftovers()
    assert [p.name for p in left.glob("blocks/states-*")] == ["states-2.0.safetensors"]


# fp1, fp2
@pytest.mark.usefixtures("in_tmp")
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"true_sequential": True}, "true_sequential: was false, is true"),
        ({"reconstruct_block": {"passes": 1}}, "reconstruct_block: was null"),
        ({}, r"plugins\..* was"),
        ({}, r"versions\.compressx: was"),
    ],
)
def test_another_run_is_not_resumed(saved, changed, named, monkeypatch):
    from compressx.pipeline import run as module
    from compressx.plugins.manager import load_plugins

    rules = [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]
    asked = {**resuming.recipe(saved), "prune": rules, "evaluate": None}
    resuming.stopped(asked, 1)
    plugins = load_plugins()
    if named.startswith("plugins"):
        records = tuple(replace(r, version="99") if "wanda" in r.pruners else r for r in plugins.records)
        plugins = replace(plugins, records=records)
    if named.startswith("versions"):
        monkeypatch.setattr(module, "__version__", "99")
    with pytest.raises(ArtifactError, match=f"cannot be resumed.*{named}"):
        run({**asked, **changed}, plugins=plugins, resume=True)


# ke1
@pytest.mark.usefixtures("in_tmp")
def test_both_streams_of_block_reconstruction_count_against_the_memory_limit(saved, monkeypatch):
    from compressx.models import hidden

    kept = []
    real = hidden.InFiles.__call__
    monkeypatch.setattr(hidden.InFiles, "__call__", lambda self, x: kept.append(x.numel() * 4) or real(self, x))
    asked = {
        **resuming.recipe(saved),
        "prune": [{"targets": ["*.up_proj"], "pruner": "wanda", "sparsity": 0.5}],
        "evaluate": None,
        "reconstruct_block": {"passes": 1},
    }
    for limit, size in (("131KB", 2 * 65536), ("132KB", 0)):  # 8 x 32 x 64 floats, twice
        run({**asked, "calibration": {**asked["calibration"], "memory_limit": limit}, "output": limit})
        assert sum(kept) == size
        kept.clear()


from tests.compressx.evaluation.test_perplexity import TOKENS, measure_cached, settings, text, tokenizer  # noqa: E402, F401


# ev1
def test_the_models_config_decides_the_key(text, tokenizer):  # noqa: F811
    model = tiny_model("llama")
    ran = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    asked = settings(token_perplexity=TOKENS)
    for eps, expected in ((1e-6, 8), (1e-6, 0), (1e-3, 8)):
        model.config.rms_norm_eps = eps
        measure_cached(InMemory(model), tokenizer, asked, "dense")
        assert bool(ran) == bool(expected)
        ran.clear()


# sens1
def test_a_linear_that_some_batches_did_not_reach_has_no_weights_of_tokens():
    from compressx.blocks.sensitivity import Gathering

    linears = {"q": survey(tiny_model("llama")).linears["model.layers.0.self_attn.q_proj"]}
    gathering = Gathering(linears, [torch.Size([2, 5]), torch.Size([2, 5])], torch.device("cpu"))
    gathering.sums["q"].add(torch.ones(2, 5, 64))
    its = gathering.result()["q"]
    assert its.rows.tolist() == [1.0] * 64
    assert its.tokens == ()


# fin1
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_finite_numbers_whose_sum_overflows_are_finite(dtype):
    from compressx.finite import all_finite

    large = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
    assert not large.sum().isfinite()
    assert all_finite(large)
    for value in (float("nan"), float("inf"), -float("inf")):
        large[3] = value
        assert not all_finite(large)


# dec1
def test_linears_that_share_their_input_in_one_process_only_are_refused(monkeypatch):
    from compressx import UnsupportedModelError
    from compressx.ranks import Ranks

    model = tiny_model("llama")
    monkeypatch.setattr(Ranks, "everyones", lambda self, told: [told, told if isinstance(told, set) else []])
    with pytest.raises(UnsupportedModelError, match="share inputs in one process and not in another"):
        list(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], HALF), batches(), ranks=Ranks(0, 2)))


# rank2
def test_of_a_statistic_that_is_a_highest_the_highest_of_all_processes_is_taken(monkeypatch):
    from torch import distributed

    from compressx.ranks import Ranks

    class Highest:
        def __init__(self):
            self.highest = torch.tensor([1.0, 5.0])

        def tensors(self):
            return {"highest": (self.highest, "max")}

    others = torch.tensor([3.0, 2.0])
    reduce = {distributed.ReduceOp.MAX: torch.maximum, distributed.ReduceOp.SUM: torch.add}
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(
        distributed, "all_reduce", lambda x, op=distributed.ReduceOp.SUM: x.copy_(reduce[op](x, others))
    )
    assert Ranks(0, 2).combine(Highest(), Highest).highest.tolist() == [3.0, 5.0]
