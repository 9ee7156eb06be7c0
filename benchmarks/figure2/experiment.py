"""The paper's Figure 2: error of the attention matrix against lambda, n and the pruning ratio.

Attention Weights Pruning, arXiv 2410.11261. The paper does not give the constants of its figure; those of `Settings`
are ours. So is the choice of lambda in the panels over n and the pruning ratio: for each point, the grid value with the
lowest mean error on separate tuning seeds, which are not reported. The baselines prune the two factors, which are what
a model stores. Everything is float64 and batched: the first dimension of every tensor is the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, TypeAlias

import torch
from scipy.stats import t as student_t
from torch import Tensor

from compressx import Unstructured, drop_lowest
from compressx.numerics.obs import inverse_cholesky, sweep, wanda_scores
from compressx_attnprune.attention import Attention, Pair, Projection, matrix_gradients, squared_errors
from compressx_attnprune.training import learn_masks

Panel: TypeAlias = Literal["lambda", "n", "rho"]

OURS = "attention-aware on fused W"
"""Name of Algorithm 1 in the figure."""


FIRST_TUNING_SEED = 1_000_000
"""First tuning seed; reported seeds start at 0."""


@dataclass(frozen=True)
class Settings:
    """The constants of the experiment; the defaults are ours, since the paper gives none.

    Attributes:
        seeds: number of reported problems, at least two.
        tuning_seeds: number of problems for choosing lambda in the panels over n and the pruning ratio.
        width: d, number of features of X.
        tokens: n of the panels over lambda and the pruning ratio.
        rank: rank of W_Q and W_K after truncation; four in the paper.
        scale: standard deviation of the entries of W_Q and W_K before truncation.
        sparsity: rho, the pruning ratio, of the panels over lambda and n.
        regularizations: the grid of lambda, increasing.
        token_counts: the grid of n, increasing.
        sparsities: the grid of rho, increasing.
        steps: of gradient descent on a mask.
    """

    seeds: int = 10
    tuning_seeds: int = 5
    width: int = 32
    tokens: int = 128
    rank: int = 4
    scale: float = 0.15
    sparsity: float = 0.7
    regularizations: tuple[float, ...] = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    token_counts: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    sparsities: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    steps: int = 300

    def __post_init__(self) -> None:
        if self.rank > self.width:
            raise ValueError(f"rank {self.rank} exceeds width {self.width}; reduce the rank or increase the width")
        if self.seeds < 2:
            raise ValueError(f"a confidence interval needs at least two seeds, got {self.seeds}")

    @property
    def reported(self) -> range:
        """The seeds that are reported."""
        return range(self.seeds)

    @property
    def tuning(self) -> range:
        """The seeds for choosing lambda."""
        return range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + self.tuning_seeds)


QUICK = Settings(
    seeds=5,
    tuning_seeds=3,
    width=16,
    tokens=64,
    scale=0.2,
    regularizations=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
    token_counts=(16, 32, 64, 128),
    sparsities=(0.3, 0.5, 0.7, 0.9),
    steps=150,
)
"""Smaller constants that take seconds."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Random problems of the published experiment, one per seed, with softmax(X W X^T) under a causal mask.

    Attributes:
        inputs: X [seeds, tokens, width].
        query: the factor W_Q^T, weight[out, in] as a model stores it, [seeds, width, width].
        key: W_K^T likewise.
    """

    inputs: Tensor
    query: Tensor
    key: Tensor

    @property
    def weight(self) -> Tensor:
        """The fused W = W_Q W_K^T, [seeds, width, width]."""
        return self.query.transpose(1, 2) @ self.key

    @property
    def attention(self) -> Attention:
        """The geometry of all problems together: each is a head."""
        heads = Projection(len(self.inputs))
        return Attention(heads, heads, head_dim=self.inputs.shape[2], scaling=1.0)

    def sides(self, weight: Tensor) -> Pair:
        """Return X W as the queries and X as the keys of a fused weight, [1, seeds, tokens, width] both."""
        return (self.inputs @ weight)[None], self.inputs[None]

    def relative_error(self, weight: Tensor) -> Tensor:
        """Compute ||P~ - P||_F^2 / ||P||_F^2 of a pruned weight, the ratio of *squared* norms, [seeds]."""
        errors, norms = squared_errors(self.attention, self.sides(self.weight), [self.sides(weight)])
        return errors[0] / norms


def sample(seeds: Sequence[int], *, tokens: int, width: int, rank: int = 4, scale: float = 0.15) -> Sample:
    """Draw Gaussian W_Q and W_K, truncated to their largest singular values, and a full-rank Gaussian X.

    Args:
        seeds: one per problem; the factors do not depend on the number of tokens.
        tokens: rows of X.
        width: columns of X.
        rank: number of singular values kept; four in the paper.
        scale: standard deviation of the factors' entries before truncation (ours).
    """
    factors, inputs = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        factors.append(scale * torch.randn(2, width, width, generator=generator, dtype=torch.float64))
        inputs.append(torch.randn(tokens, width, generator=generator, dtype=torch.float64))
    u, singular, v = torch.linalg.svd(torch.stack(factors))  # [seeds, 2, width, width]
    query, key = ((u[..., :rank] * singular[..., None, :rank]) @ v[..., :rank, :]).unbind(dim=1)
    return Sample(torch.stack(inputs), query, key)


def learn(drawn: Sample, regularization: float, steps: int) -> Tensor:
    """Learn a mask in [0, 1] on each fused W by Algorithm 1, which `mode: mask` of attnprune runs on two factors.

    Minimises 1/2 ||P~ - P||_F^2 + regularization / 2 ||M||_F^2.

    Returns:
        M [seeds, width, width].
    """
    weight = drawn.weight
    dense = drawn.sides(weight)

    def gradients(_x: Tensor, pruned: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        errors, _, (by_query, _) = matrix_gradients(drawn.attention, dense, drawn.sides(pruned[0]))
        return errors.sum(), [drawn.inputs.transpose(1, 2) @ by_query[0]]

    of_all = regularization * weight.numel()
    (relaxed,), _ = learn_masks(gradients, drawn.inputs, [weight], regularization=of_all, steps=steps)
    return relaxed


def binarize(relaxed: Tensor, weight: Tensor, sparsity: float) -> Tensor:
    """Keep the largest entries of M, dropping exactly round(sparsity * n) for each seed.

    Clipping leaves many entries at exactly 0 and 1; of equal ones the smallest |W| is dropped first (ours).

    Args:
        relaxed: [seeds, width, width].
        weight: W, of the same shape.
        sparsity: fraction of zeros.

    Returns:
        bool, of the same shape, True = keep.
    """
    by_weight = weight.abs().flatten(1).argsort(dim=1, stable=True)
    order = by_weight.gather(1, relaxed.flatten(1).gather(1, by_weight).argsort(dim=1, stable=True))
    ranks = order.argsort(dim=1).to(weight.dtype)  # [seeds, width * width]
    return drop_lowest(ranks, round(sparsity * ranks.shape[1])).view(relaxed.shape)


def magnitude_fused(drawn: Sample, sparsity: float) -> Tensor:
    """Drop the smallest |W| of each fused matrix."""
    weight = drawn.weight
    keep = drop_lowest(weight.abs().flatten(1), round(sparsity * weight[0].numel()))
    return weight * keep.view(weight.shape)


def wanda_factors(drawn: Sample, sparsity: float) -> Tensor:
    """Prune each factor by Wanda (arXiv 2306.11695), |W_ij| ||X_j||_2 within each output row, then fuse them."""
    norms = drawn.inputs.norm(dim=1)[:, None]  # [seeds, 1, width]
    query, key = (_wanda(w, norms, sparsity) for w in (drawn.query, drawn.key))
    return query.transpose(1, 2) @ key


def _wanda(weight: Tensor, norms: Tensor, sparsity: float) -> Tensor:
    scores = wanda_scores(weight, norms).flatten(0, 1)  # [seeds * out, in]
    return weight * drop_lowest(scores, round(sparsity * scores.shape[1])).view(weight.shape)


def sparsegpt_factors(drawn: Sample, sparsity: float) -> Tensor:
    """Prune and update each factor by SparseGPT (arXiv 2301.00774), thresholds over column blocks, then fuse them."""
    pattern = Unstructured(sparsity, group="layer")
    fused = []
    for x, query, key in zip(drawn.inputs, drawn.query, drawn.key, strict=True):
        factor, _ = inverse_cholesky(x.T @ x)
        fused.append(sweep(query, factor, pattern)[1].T @ sweep(key, factor, pattern)[1])
    return torch.stack(fused)


BASELINES: Mapping[str, Callable[[Sample, float], Tensor]] = {
    "SparseGPT on factors": sparsegpt_factors,
    "Wanda on factors": wanda_factors,
    "magnitude on fused W": magnitude_fused,
}
"""By name, functions of a sample and a sparsity that return the fused pruned weight [seeds, width, width]."""


@dataclass(frozen=True)
class Point:
    """One method at one point of a panel.

    Attributes:
        panel: the panel.
        method: `OURS` or a name of `BASELINES`.
        regularization: lambda; None for the baselines.
        tokens: n.
        sparsity: the pruning ratio.
        errors: ||P~ - P||_F^2 / ||P||_F^2 of each reported seed, the ratio of *squared* norms.
    """

    panel: Panel
    method: str
    regularization: float | None
    tokens: int
    sparsity: float
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean error over the seeds."""
        return fmean(self.errors)

    @property
    def half_width(self) -> float:
        """Half-width of the 95% confidence interval of the mean, by Student's t."""
        return float(student_t.ppf(0.975, len(self.errors) - 1)) * stdev(self.errors) / math.sqrt(len(self.errors))


@dataclass(frozen=True)
class Choice:
    """The lambda chosen for a number of tokens and a sparsity.

    Attributes:
        tokens: n.
        sparsity: the pruning ratio.
        regularization: the chosen lambda.
        tuning_errors: mean error over the tuning seeds, by lambda.
    """

    tokens: int
    sparsity: float
    regularization: float
    tuning_errors: Mapping[float, float]


@dataclass(frozen=True)
class Figure:
    """The measured figure.

    Attributes:
        settings: its constants.
        points: of all panels.
        choices: lambdas of the panels over n and the pruning ratio.
    """

    settings: Settings
    points: Sequence[Point]
    choices: Sequence[Choice]


def measure(settings: Settings, log: Callable[[str], None] = lambda _: None) -> Figure:
    """Run the whole experiment."""
    choices: dict[tuple[int, float], Choice] = {}
    for tokens in sorted({settings.tokens, *settings.token_counts}):
        log(f"choosing lambda on {settings.tuning_seeds} tuning seeds, n = {tokens}")
        sparsities = {settings.sparsity, *(settings.sparsities if tokens == settings.tokens else ())}
        choices |= {(tokens, c.sparsity): c for c in _choose(settings, tokens, sorted(sparsities))}
    log(f"error against lambda on {settings.seeds} seeds")
    drawn = _draw(settings, settings.tokens, settings.reported)
    learned = {value: learn(drawn, value, settings.steps) for value in settings.regularizations}
    points = [
        *(_ours("lambda", drawn, learned[value], value, settings.sparsity) for value in learned),
        *_baselines("lambda", drawn, settings.sparsity),
    ]
    for tokens in settings.token_counts:
        log(f"error against n on {settings.seeds} seeds, n = {tokens}")
        value = choices[tokens, settings.sparsity].regularization
        same = tokens == settings.tokens
        longer = drawn if same else _draw(settings, tokens, settings.reported)
        masks = learned[value] if same else learn(longer, value, settings.steps)
        points += [_ours("n", longer, masks, value, settings.sparsity), *_baselines("n", longer, settings.sparsity)]
    log(f"error against the pruning ratio on {settings.seeds} seeds")
    for sparsity in settings.sparsities:
        value = choices[settings.tokens, sparsity].regularization
        points += [_ours("rho", drawn, learned[value], value, sparsity), *_baselines("rho", drawn, sparsity)]
    return Figure(settings, points, list(choices.values()))


def _choose(settings: Settings, tokens: int, sparsities: Sequence[float]) -> Iterator[Choice]:
    """Choose lambda by the mean error over the tuning seeds, for each sparsity."""
    drawn = _draw(settings, tokens, settings.tuning)
    learned = {value: learn(drawn, value, settings.steps) for value in settings.regularizations}
    for sparsity in sparsities:
        errors = {value: fmean(_errors(drawn, masks, sparsity)) for value, masks in learned.items()}
        yield Choice(tokens, sparsity, min(errors, key=errors.__getitem__), errors)


def _draw(settings: Settings, tokens: int, seeds: Sequence[int]) -> Sample:
    return sample(seeds, tokens=tokens, width=settings.width, rank=settings.rank, scale=settings.scale)


def _errors(drawn: Sample, relaxed: Tensor, sparsity: float) -> list[float]:
    keep = binarize(relaxed, drawn.weight, sparsity)
    return [float(e) for e in drawn.relative_error(drawn.weight * keep)]


def _ours(panel: Panel, drawn: Sample, relaxed: Tensor, regularization: float, sparsity: float) -> Point:
    errors = tuple(_errors(drawn, relaxed, sparsity))
    return Point(panel, OURS, regularization, drawn.inputs.shape[1], sparsity, errors)


def _baselines(panel: Panel, drawn: Sample, sparsity: float) -> Iterator[Point]:
    tokens = drawn.inputs.shape[1]
    for name, prune in BASELINES.items():
        errors = drawn.relative_error(prune(drawn, sparsity))
        yield Point(panel, name, None, tokens, sparsity, tuple(float(e) for e in errors))
