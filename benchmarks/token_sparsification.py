"""Attention and removed tokens in a shallow vision transformer, on random tokens.

    python benchmarks/token_sparsification.py --output DIR

Data and model are those of Li et al. (2023, arXiv 2302.06015). A token is one of five orthonormal patterns in ten
dimensions plus Gaussian noise. Two patterns are relevant, one for each label, and a sample's label is that of the
majority of its relevant tokens. SGD with hinge loss trains self-attention and a hidden layer with fixed output signs:

    F(X) = mean_l a^T relu(W_O sum_s W_V x_s softmax_s(x_s^T W_K^T W_Q x_l))

First, training moves attention to the relevant tokens. Half of the neurons of that model are then removed by the norm
of their weights (a row of W_O), without more training: the smallest cost less than random ones, the largest more.

Second, the same number of tokens is removed from every sample of training and test. After the same number of steps,
removing random tokens gains nothing; removing irrelevant tokens, or those with most noise, lowers the test loss. Which
tokens these are is known, not estimated. The least attended tokens need no labels: a model trained on whole samples
says how much attention its tokens pay to each, and a fresh model is trained without the last. The loss on whole test
samples is shown, too.

The claims are tested on differences within seeds: their 95% interval (Student's t) excludes zero, or for random tokens
is not below zero. If one does not hold, the status is 1.

The printed initialisation, W_Q = W_K = delta^2 I / c_0^2, saturates the softmax for a small c_0: with delta = .2 and
c_0 = .1 a pattern's score with itself is 16, and 0 with the others. Here W_Q = W_K = delta I, so that it is .04, and
W_V is delta times a random orthogonal matrix. DIR gets `token-sparsification.csv` (each seed at each measured step),
`.json` (settings and claims), `.md` (the tables, which are printed, too) and `.svg`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from scipy.stats import t as student_t
from torch import Tensor

WIDTH, PATTERNS, TOKENS, SIGMA, NOISY_SIGMA = 10, 5, 50, 0.1, 1.0
MAJORITY = 0.6  # of the relevant tokens carry the pattern of the label
DELTA, HIDDEN_SCALE, NEURONS = 0.2, 0.1, 100
BATCH, RATE, EVERY, TEST_SAMPLES = 20, 0.2, 20, 200  # EVERY: steps between measures
ATTENTION = {"samples": 200, "steps": 600, "relevant": 0.5, "noisy": 0.0}  # shares of the tokens
REMOVAL = {"samples": 80, "steps": 300, "relevant": 0.6, "noisy": 0.3}  # BATCH divides the samples
REMOVED, REMOVALS = 15, ("none", "random", "irrelevant", "noisiest", "least attended")  # tokens of each sample
HALVES = ("smallest", "random", "largest")  # of the neurons, by the norm of their weights

Curves: TypeAlias = dict[str, Tensor]  # [points, seeds], by measure


class Data(NamedTuple):
    """Samples of several seeds. `relevant` says whether a token carries a relevant pattern; `noise` is a norm."""

    tokens: Tensor  # [seeds, samples, tokens, width]
    labels: Tensor  # 1 or -1, [seeds, samples]
    relevant: Tensor  # bool, [seeds, samples, tokens]
    noise: Tensor  # [seeds, samples, tokens]


class Model(NamedTuple):
    """Weights of several seeds."""

    query: Tensor  # [seeds, width, width]
    key: Tensor  # the same
    value: Tensor  # the same
    hidden: Tensor  # [seeds, neurons, width]

    def attention(self, tokens: Tensor) -> Tensor:
        """Return the attention [seeds, samples, query tokens, key tokens] of [seeds, samples, tokens, width]."""
        queries, keys = (tokens @ w.mT[:, None] for w in (self.query, self.key))
        return (queries @ keys.mT).softmax(dim=-1)

    def outputs(self, tokens: Tensor) -> Tensor:
        """Return F [seeds, samples] of tokens [seeds, samples, tokens, width]; the signs alternate over neurons."""
        neurons = (self.attention(tokens) @ tokens @ self.value.mT[:, None] @ self.hidden.mT[:, None]).relu()
        return (neurons[..., ::2] - neurons[..., 1::2]).sum(dim=-1).mean(dim=-1) / math.sqrt(neurons.shape[-1])


def draw(seed: int, samples: int, relevant: float, noisy: float) -> Data:
    """Draw samples of one seed, without the dimension of seeds; shares of tokens are exact in every sample."""
    generator, shape = torch.Generator().manual_seed(seed), (samples, TOKENS)
    patterns = torch.linalg.qr(torch.randn(WIDTH, PATTERNS, generator=generator)).Q.T
    place, order = (torch.rand(shape, generator=generator).argsort() for _ in range(2))
    own, count = torch.randint(2, (samples, 1), generator=generator), round(relevant * TOKENS)  # pattern 0: label 1
    which = torch.randint(2, PATTERNS, shape, generator=generator)
    which = torch.where(place < count, 1 - own, which)
    which = torch.where(place < round(MAJORITY * count), own, which)
    sigma = torch.where(order < round(noisy * TOKENS), NOISY_SIGMA, SIGMA)
    noise = sigma[..., None] * torch.randn(*shape, WIDTH, generator=generator)
    return Data(patterns[which] + noise, 1.0 - 2.0 * own[:, 0], which < 2, noise.norm(dim=-1))


def without(data: Data, removal: str, trained: Model | None = None) -> Data:
    """Remove `REMOVED` tokens of each sample by one of `REMOVALS`; the others come in another order.

    `trained` is the model whose attention, a mean over query tokens, finds the least attended ones.
    """
    if removal == "none":
        return data
    # Tokens are drawn in random order, so the last ones are random.
    ranks = {"random": torch.zeros_like(data.noise), "irrelevant": ~data.relevant, "noisiest": data.noise}
    if trained is not None:
        ranks["least attended"] = -trained.attention(data.tokens).mean(dim=2)
    kept = ranks[removal].argsort(dim=-1, stable=True)[..., : data.noise.shape[-1] - REMOVED]
    relevant, noise = (v.take_along_dim(kept, dim=2) for v in (data.relevant, data.noise))
    return Data(data.tokens.take_along_dim(kept[..., None], dim=2), data.labels, relevant, noise)


def start(seed: int) -> Model:
    """Draw an untrained model of one seed, without the dimension of seeds."""
    generator = torch.Generator().manual_seed(1000 + seed)
    value = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q
    hidden = HIDDEN_SCALE * torch.randn(NEURONS, WIDTH, generator=generator)
    return Model(DELTA * torch.eye(WIDTH), DELTA * torch.eye(WIDTH), DELTA * value, hidden)


def hinge(model: Model, data: Data) -> Tensor:
    """Return the mean hinge loss, [seeds]."""
    return (1.0 - data.labels * model.outputs(data.tokens)).clamp(min=0.0).mean(dim=1)


def accuracy(model: Model, data: Data) -> Tensor:
    """Return the share of samples with the right sign, [seeds]."""
    return (data.labels * model.outputs(data.tokens) > 0).float().mean(dim=1)


def halved(model: Model, removed: str) -> Model:
    """Set the weights of half of the neurons, one of `HALVES`, to zero."""
    norms = model.hidden.norm(dim=-1)
    chance = torch.rand(norms.shape, generator=torch.Generator().manual_seed(3000)).to(norms)
    ranks = {"smallest": norms, "random": chance, "largest": -norms}[removed]
    gone = ranks.argsort(dim=-1)[:, : norms.shape[-1] // 2]
    return model._replace(hidden=model.hidden.scatter(1, gone[..., None].expand(-1, -1, WIDTH), 0.0))


def relevant_attention(model: Model, data: Data) -> Tensor:
    """Return the attention to all relevant tokens, the mean over query tokens and samples, [seeds]."""
    return (model.attention(data.tokens) * data.relevant[:, :, None]).sum(dim=-1).mean(dim=(1, 2))


def gradients(model: Model, data: Data) -> Model:
    """Return the gradient of each seed's loss, of the weights' shapes."""
    with torch.enable_grad():
        weights = Model(*(w.detach().requires_grad_() for w in model))
        return Model(*torch.autograd.grad(hinge(weights, data).sum(), weights))


@torch.no_grad()
def train(data: Data, steps: int, measures: Mapping[str, Callable[[Model], Tensor]]) -> tuple[Curves, Model]:
    """Train by SGD; return each measure at steps 0, `EVERY`, 2 `EVERY` and so on, [points, seeds], and the model."""
    seeds, samples = data.labels.shape
    model, found = Model(*map(torch.stack, zip(*map(start, range(seeds)), strict=True))), []
    generators = [torch.Generator().manual_seed(2000 + seed) for seed in range(seeds)]
    for step in range(steps + 1):
        if step % EVERY == 0:
            found.append([measure(model) for measure in measures.values()])
        if step == steps:
            break
        at = step * BATCH % samples
        if at == 0:
            order = torch.stack([torch.randperm(samples, generator=g) for g in generators])
        batch = Data(*(values[torch.arange(seeds)[:, None], order[:, at : at + BATCH]] for values in data))
        model = Model(*(w - RATE * g for w, g in zip(model, gradients(model, batch), strict=True)))
    return dict(zip(measures, map(torch.stack, zip(*found, strict=True)), strict=True)), model


def measured(seeds: int) -> dict[str, Curves]:
    """Run both experiments: the curves of `attention`, and of each removal by name."""
    found: dict[str, Curves] = {}
    for setting, removals in ((ATTENTION, {"attention": "none"}), (REMOVAL, {name: name for name in REMOVALS})):
        count, shares = int(setting["samples"]), (setting["relevant"], setting["noisy"])
        each = [draw(seed, count + TEST_SAMPLES, *shares) for seed in range(seeds)]
        both = Data(*map(torch.stack, zip(*each, strict=True)))
        data, test = Data(*(v[:, :count] for v in both)), Data(*(v[:, count:] for v in both))
        trained = None
        for name, removal in removals.items():
            seen, other = without(data, removal, trained), without(test, removal, trained)
            losses = {"training loss": seen, "test loss": other, "whole test loss": test}
            measures: dict[str, Callable[[Model], Tensor]] = {m: partial(hinge, data=of) for m, of in losses.items()}
            measures["attention"] = partial(relevant_attention, data=other)
            if name == "attention":
                measures["test accuracy"] = partial(accuracy, data=test)
                for half in HALVES:
                    for measure, figure in (("test loss", hinge), ("test accuracy", accuracy)):
                        measures[f"{measure} without the {half} neurons"] = partial(_of_half, figure, half, data=test)
            found[name], model = train(seen, int(setting["steps"]), measures)
            trained = trained or model  # on whole samples: the first
    return found


def _of_half(figure: Callable[[Model, Data], Tensor], removed: str, model: Model, data: Data) -> Tensor:
    return figure(halved(model, removed), data)


def interval(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over the last dimension, the seeds, and half the 95% confidence interval."""
    values, seeds = values.double(), values.shape[-1]
    return values.mean(dim=-1), float(student_t.ppf(0.975, seeds - 1)) * values.std(dim=-1) / math.sqrt(seeds)


def below_zero(change: Tensor) -> bool:
    """Return whether the whole interval is below zero."""
    return bool(sum(interval(change)) < 0)


def claims(found: Mapping[str, Curves]) -> dict[str, bool]:
    """Return whether each claim holds at the last step."""
    increase, half = interval(found["attention"]["attention"][-1] - found["attention"]["attention"][0])
    changes = {name: found[name]["test loss"][-1] - found["none"]["test loss"][-1] for name in REMOVALS}
    lower = {name: below_zero(change) for name, change in changes.items()}
    halves = {half: found["attention"][f"test loss without the {half} neurons"][-1] for half in HALVES}
    return {
        "training increases the attention to relevant tokens": bool(increase > half),
        "removing random tokens does not lower the test loss": not lower["random"],
        "removing irrelevant tokens lowers the test loss": lower["irrelevant"],
        "removing the noisiest tokens lowers the test loss": lower["noisiest"],
        "removing the least attended tokens lowers the test loss": lower["least attended"],
        "removing irrelevant tokens lowers it more than removing the least attended": below_zero(
            changes["irrelevant"] - changes["least attended"]
        ),
        "removing the smallest neurons costs less than removing random ones": below_zero(
            halves["smallest"] - halves["random"]
        ),
        "removing the largest neurons costs more than removing random ones": below_zero(
            halves["random"] - halves["largest"]
        ),
    }


def tables(found: Mapping[str, Curves]) -> str:
    """Return the tables and the claims as Markdown."""

    def cell(values: Tensor, sign: str = "") -> str:
        return "{:{sign}.3f} ± {:.3f}".format(*interval(values), sign=sign)

    lines = ["| steps | attention to relevant tokens | test loss |", "|---:|---:|---:|"]
    points = zip(found["attention"]["attention"][::5], found["attention"]["test loss"][::5], strict=True)
    lines += [f"| {at * 5 * EVERY} | {cell(mass)} | {cell(loss)} |" for at, (mass, loss) in enumerate(points)]
    lines += ["", "| neurons removed | test loss | change | test accuracy |", "|---|---:|---:|---:|"]
    end = {name: values[-1] for name, values in found["attention"].items()}
    lines.append(f"| none | {cell(end['test loss'])} | | {cell(end['test accuracy'])} |")
    for half in HALVES:
        loss, right = (end[f"{measure} without the {half} neurons"] for measure in ("test loss", "test accuracy"))
        lines.append(f"| {half} half | {cell(loss)} | {cell(loss - end['test loss'], '+')} | {cell(right)} |")
    lines += ["", "| tokens removed | training loss | test loss | change | whole test samples | change |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for name in REMOVALS:
        cells = [name, cell(found[name]["training loss"][-1])]
        for measure in ("test loss", "whole test loss"):
            last, base = found[name][measure][-1], found["none"][measure][-1]
            cells += [cell(last), cell(last - base, "+") if name != "none" else ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {claim}: {'holds' if held else 'DOES NOT HOLD'}" for claim, held in claims(found).items())]
    return "\n".join(lines) + "\n"


def plot(found: Mapping[str, Curves], path: Path) -> None:
    """Draw attention and test losses over the steps, with 95% confidence bands."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "token-sparsification", "font.size": 9}):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        drawn = [(left, "", found["attention"]["attention"]), *((right, n, found[n]["test loss"]) for n in REMOVALS)]
        colours = ("#D55E00", "#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7")
        looks = zip(colours, ("-", "-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))), strict=True)
        for (axes, label, values), (colour, dashes) in zip(drawn, looks, strict=True):
            steps, (mean, half) = [at * EVERY for at in range(len(values))], interval(values)
            axes.plot(steps, mean.tolist(), color=colour, linestyle=dashes, label=label)
            axes.fill_between(steps, (mean - half).tolist(), (mean + half).tolist(), color=colour, alpha=0.15, lw=0)
            axes.grid(alpha=0.3)
            axes.set(xlabel="steps", ylabel="test loss" if label else "attention to relevant tokens")
        right.legend(title="tokens removed", frameon=False)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print and write; exit with status 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=10, help="at least 2")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds {arguments.seeds}: a confidence interval needs at least 2 seeds")
    arguments.output.mkdir(parents=True, exist_ok=True)
    started, path = time.perf_counter(), arguments.output / "token-sparsification.csv"
    found = measured(arguments.seeds)
    print(f"{tables(found)}\n{time.perf_counter() - started:.0f} seconds")
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(["curve", "measure", "step", "seed", "value"])
        for name, measure in ((name, measure) for name, measures in found.items() for measure in measures):
            for at, row in enumerate(found[name][measure].tolist()):
                csv.writer(file).writerows([name, measure, at * EVERY, *cells] for cells in enumerate(row))
    record = {"attention": ATTENTION, "removal": REMOVAL, "removed": REMOVED, "claims": claims(found)}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(tables(found), encoding="utf-8")
    plot(found, path.with_suffix(".svg"))
    sys.exit(not all(claims(found).values()))


if __name__ == "__main__":
    main()
