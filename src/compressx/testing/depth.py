"""The check of pruners that score whole blocks: the same scores again, and in other batches, of a model left alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from compressx.api.patterns import Structured
from compressx.api.units import Units
from compressx.blocks.depth import score_blocks
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.planning.plan import PlannedDepth
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing.models import tiny_model, tiny_tokens
from compressx.testing.subject import NoSuchPromiseError, RefusedError, Subject, expect
from compressx.testing.untouched import Snapshot


def scores(subject: Subject) -> None:
    """Score every block of a model, again with another global seed, and in batches of other sizes."""
    if "blocks" not in subject.spec.units:
        raise NoSuchPromiseError("it does not say blocks")
    whole = _scored(subject, (4, 4), seed=0)
    expect(whole == _scored(subject, (4, 4), seed=1), "two runs of one recipe, with other global seeds, gave others")
    for name, score in _scored(subject, (7, 1), seed=0).items():
        same = math.isclose(score, whole[name], rel_tol=1e-3, abs_tol=1e-6)
        advice = "a statistic has to be a sum or a maximum over tokens, not an average of batches"
        expect(same, f"{name}: in other batches its score is {score:.6g}, expected {whole[name]:.6g}; {advice}")


def _scored(subject: Subject, sizes: Sequence[int], *, seed: int) -> dict[str, float]:
    model = tiny_model(subject.architecture)
    before = Snapshot(model)
    tokens = tiny_tokens()
    tokens[-1] = 7  # one sequence is nothing like the others, so that its weight shows
    blocks = tuple(survey(model).blocks)
    pattern = Structured("blocks", 0.5, Units("blocks", "", len(blocks), {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            found = score_blocks(
                InMemory(model), PlannedDepth(subject.rule, pattern, blocks), torch.split(tokens, list(sizes))
            )
        except UnsupportedModelError as refusal:
            raise RefusedError(str(refusal)) from refusal
    before.expect_same()
    return found
