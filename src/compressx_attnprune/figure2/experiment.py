"""The paper's Figure 2: error of the attention matrix against lambda, n and the pruning ratio.

Attention Weights Pruning, arXiv 2410.11261. The paper does not give the constants of its figure; those of `Settings`
are ours. So is the choice of lambda in the panels over n and the pruning ratio: for each point, the grid value with the
lowest mean error on separate tuning seeds, which are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, TypeAlias

from compressx_attnprune.figure2 import synthetic
from compressx_attnprune.figure2.settings import Settings
from compressx_attnprune.figure2.synthetic import BASELINES, Learned, Sample

Panel: TypeAlias = Literal["lambda", "n", "rho"]

OURS = "attention-aware on fused W"
"""Name of Algorithm 1 in the figure."""


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
        unconverged: number of seeds that did not reach the tolerance.
    """

    panel: Panel
    method: str
    regularization: float | None
    tokens: int
    sparsity: float
    errors: tuple[float, ...]
    unconverged: int = 0

    @property
    def mean(self) -> float:
        """Mean error over the seeds."""
        return fmean(self.errors)

    @property
    def half_width(self) -> float:
        """Half-width of the 95% confidence interval of the mean, by Student's t."""
        return student_t(len(self.errors) - 1) * stdev(self.errors) / math.sqrt(len(self.errors))


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
    """Run the whole experiment.

    Raises:
        compressx_attnprune.figure2.descent.DivergedError: the `momentum` optimizer diverged.
    """
    choices: dict[tuple[int, float], Choice] = {}
    for tokens in sorted({settings.tokens, *settings.token_counts}):
        log(f"choosing lambda on {settings.tuning_seeds} tuning seeds, n = {tokens}")
        sparsities = {settings.sparsity, *(settings.sparsities if tokens == settings.tokens else ())}
        choices |= {(tokens, c.sparsity): c for c in _choose(settings, tokens, sorted(sparsities))}
    log(f"error against lambda on {settings.seeds} seeds")
    drawn = _draw(settings, settings.tokens, settings.reported)
    learned = {value: _learn(settings, drawn, value) for value in settings.regularizations}
    points = [
        *(_ours("lambda", drawn, learned[value], value, settings.sparsity) for value in learned),
        *_baselines("lambda", drawn, settings.sparsity),
    ]
    for tokens in settings.token_counts:
        log(f"error against n on {settings.seeds} seeds, n = {tokens}")
        value = choices[tokens, settings.sparsity].regularization
        same = tokens == settings.tokens
        longer = drawn if same else _draw(settings, tokens, settings.reported)
        masks = learned[value] if same else _learn(settings, longer, value)
        points += [_ours("n", longer, masks, value, settings.sparsity), *_baselines("n", longer, settings.sparsity)]
    log(f"error against the pruning ratio on {settings.seeds} seeds")
    for sparsity in settings.sparsities:
        value = choices[settings.tokens, sparsity].regularization
        points += [_ours("rho", drawn, learned[value], value, sparsity), *_baselines("rho", drawn, sparsity)]
    return Figure(settings, points, list(choices.values()))


def _choose(settings: Settings, tokens: int, sparsities: Sequence[float]) -> Iterator[Choice]:
    """Choose lambda by the mean error over the tuning seeds, for each sparsity."""
    drawn = _draw(settings, tokens, settings.tuning)
    learned = {value: _learn(settings, drawn, value) for value in settings.regularizations}
    for sparsity in sparsities:
        errors = {value: fmean(_errors(drawn, masks, sparsity)) for value, masks in learned.items()}
        yield Choice(tokens, sparsity, min(errors, key=errors.__getitem__), errors)


def _draw(settings: Settings, tokens: int, seeds: Sequence[int]) -> Sample:
    return synthetic.sample(seeds, tokens=tokens, width=settings.width, rank=settings.rank, scale=settings.scale)


def _learn(settings: Settings, drawn: Sample, regularization: float) -> Learned:
    return synthetic.learn_mask(
        drawn.attention,
        regularization,
        optimizer=settings.optimizer,
        steps=settings.steps,
        tolerance=settings.tolerance,
        step_size=settings.step_size,
        momentum=settings.momentum,
    )


def _errors(drawn: Sample, learned: Learned, sparsity: float) -> list[float]:
    weight = drawn.attention.weight
    keep = synthetic.binarize(learned.relaxed, weight, sparsity)
    return [float(e) for e in drawn.attention.relative_error(weight * keep)]


def _ours(panel: Panel, drawn: Sample, learned: Learned, regularization: float, sparsity: float) -> Point:
    errors = tuple(_errors(drawn, learned, sparsity))
    tokens = drawn.attention.inputs.shape[1]
    return Point(panel, OURS, regularization, tokens, sparsity, errors, int((~learned.converged).sum()))


def _baselines(panel: Panel, drawn: Sample, sparsity: float) -> Iterator[Point]:
    tokens = drawn.attention.inputs.shape[1]
    for name, prune in BASELINES.items():
        errors = drawn.attention.relative_error(prune(drawn, sparsity))
        yield Point(panel, name, None, tokens, sparsity, tuple(float(e) for e in errors))


def student_t(freedom: int) -> float:
    """Compute the 97.5% quantile of Student's t, which bounds a two-sided 95% confidence interval.

    Bisection on the distribution function, a finite sum for integer degrees of freedom (Abramowitz and Stegun 26.7.3
    and 26.7.4).
    """
    low, high = 1.9, 13.0  # between the normal distribution and one degree of freedom
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Compute the probability of |T| < t."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
