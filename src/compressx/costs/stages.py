"""The work of each stage of a recipe, and its memory, counted from shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from compressx.allocation.methods import held_out_of, windows_kept
from compressx.allocation.units import units_of
from compressx.api.work import Windows, Work
from compressx.blocks.fisher import CHANNEL_WINDOWS, ROW_WINDOWS
from compressx.blocks.prune import MEASURED_TOKENS
from compressx.costs import gradients
from compressx.costs.basis import Basis
from compressx.costs.block import BlockCost, summed
from compressx.costs.estimate import Stage, largest
from compressx.costs.exchanged import of_decisions, of_scores, of_sensitivities, of_training
from compressx.costs.forward import LOGIT_BYTES, Passed
from compressx.costs.loading import load
from compressx.costs.training import Trained, finetuning, reconstruction, steps_of
from compressx.models.shards import OUTSIDE
from compressx.pipeline.room import finetuning_bytes
from compressx.recipe.methods import MeasuredAllocation, OwlAllocation
from compressx.training.schedule import CHECKS

_CHOSEN = 80
"""Bytes that a processor moves in the time in which it takes one number or another by a mask: each by itself."""

_LINEAR, _BLOCK = 1000, 8000
"""Operations of torch that start in the time that Python takes to ask about a linear, check the answer and record it,
and to go on from one block to the next: its files, its report, its part of the log."""


def stages(of: Basis) -> Iterator[Stage]:
    """Yield the stages in their order."""
    yield load(of)
    # An allocation is one process's, on the text of all.
    for stage in (_evaluate(of, "dense"), _calibrate(of), _allocate(of.alone)):
        if stage is not None:
            yield stage
    if of.planned.linears:
        yield from _prune(of)
    tuning = _finetune(of)
    if tuning is not None:
        yield from (x for x in (_evaluate(of, "pruned"), tuning) if x is not None)
    last = _evaluate(of, "pruned" if tuning is None else "finetuned")
    yield from () if last is None or not of.planned.linears else (last,)
    yield _save(of)
    of.unknown |= of.costs.unknown | of.alone.costs.unknown
    if of.processes > 1:
        of.unknown["the time that processes take to exchange"] = None


def _evaluate(of: Basis, model: str) -> Stage | None:
    """Perplexity of one model."""
    settings = of.recipe.evaluate
    if settings is None:
        return None
    given = {"lm_eval": settings.lm_eval, "needle": settings.needle, "sample": settings.sample}
    of.unknown |= {f"evaluate.{name}": None for name, value in given.items() if value is not None}
    if (wanted := settings.token_perplexity) is None:
        return None
    if wanted.samples is None:
        of.unknown["evaluate.token_perplexity without samples, which reads all of the text"] = None
        return None
    windows = wanted.samples * len(wanted.texts)
    at_once = min(wanted.batch_size, wanted.samples)
    one = of.passed(at_once, wanted.sequence_length, of.dtype)
    logits = wanted.sequence_length * of.vocabulary
    work = windows / at_once * one.work + windows * Work.of(moved=LOGIT_BYTES / 2 * logits)
    # A batch's logits are let go of when the next batch's are there.
    before = float(at_once * logits * of.itemsize if windows > at_once else 0)
    blocks = max(block.work.memory for block in one.blocks.values())
    # A streamed model runs all batches through a block before the next one is loaded.
    states = {"hidden states": of.states(windows * wanted.sequence_length)} if of.streamed else {}
    held = largest(
        {"weights": of.weights, **states, "activations and logits": blocks + (0.0 if of.streamed else before)},
        {"weights": of.around, **states, "activations and logits": one.outside.work.memory + before},
    )
    return Stage(f"evaluate {model}", work, held)


def _calibrate(of: Basis) -> Stage | None:
    """Scores of the blocks that may be dropped, and gradients of the dense model's loss, where they are needed."""
    names, depth = of.planned.sensitive, of.planned.depth
    scored = Work()
    if depth is not None:
        last = max([*of.found.blocks].index(fqn) for fqn in depth.blocks)
        scored = of.text.batches * sum((b.work for b in [*of.batch.blocks.values()][: last + 1]), Work())
        if of.processes > 1:
            blocks = [of.block(i, fqn) for i, fqn in enumerate(of.found.blocks) if fqn in depth.blocks]
            of.exchanged.add(of_scores(depth.rule.build_depth(), blocks))
    if names or of.planned.reconstruct_block is not None:
        if of.processes > 1:
            of.exchanged.add(of_sensitivities(of.found, names, of.width))
        windows = min(max(1, (ROW_WINDOWS if names else CHANNEL_WINDOWS) // of.processes), of.text.count)
        return Stage("calibrate", scored + windows * gradients.work(of), gradients.memory(of, windows))
    if depth is None:
        return None
    states = {"hidden states": of.hidden(of.text.count)}
    held = largest({"weights": of.weights, **states, "activations": scored.memory}, {"weights": of.around, **states})
    return Stage("calibrate", scored, held)


def _allocate(of: Basis) -> Stage | None:
    """Measure what each sparsity of each unit costs."""
    settings = of.planned.allocation
    if not isinstance(settings, MeasuredAllocation):
        return None
    windows = min(settings.samples, of.text.count)
    one = 1 / of.text.batch
    used = list(of.batch.blocks.items())[: of.last + 1]
    kept = windows_kept(of.planned, settings, of.text.count)
    held = {"weights": of.weights, "hidden states": of.hidden(kept)}
    if isinstance(settings, OwlAllocation):
        work = Work()
        for index, (fqn, passed) in enumerate(used):
            before = [passed.inputs[x.name].before for x in of.planned.linears if x.block == fqn]
            again = max(before, key=lambda w: w.flops, default=Work())
            work = work + windows * one * (index < of.last) * passed.work
            work = work + passed.work + (math.ceil(windows * one) - 1) * again
        return Stage("allocate", work, {**held, "activations": max(b.work.memory for _, b in used)})
    held_out = held_out_of(settings.samples, of.text.count)
    seen = replace(of.text, count=windows - held_out)
    units = units_of(of.planned, settings.unit)
    first = next((i for i, (fqn, _) in enumerate(used) if of.planned.in_block(fqn)), 0)
    work, peak = held_out * gradients.work(of, after=first), 0.0
    for index, (fqn, passed) in enumerate(used):
        mine = [unit for unit in units if unit.block == fqn]
        cost = of.cost(index, fqn, of.planned.in_block(fqn), seen)
        observed = passed.work + (seen.batches - 1) * cost.observed
        work = work + one * windows * passed.work + observed
        work = work + cost.statistics + sum(cost.prepared.values(), Work())
        prepared = sum(w.memory for w in cost.prepared.values())
        asked = Work()
        for unit in mine:
            names = {x.name for x in unit.linears}
            rules = {r: {n: p for n, p in ps.items() if n in names} for r, ps in of.planned.in_block(fqn).items()}
            of_unit = of.cost(index, fqn, {r: ps for r, ps in rules.items() if ps}, seen).pruned
            asked = asked + sum(of_unit.values(), Work())
            copied = Work.of(moved=8.0 * of.itemsize * sum(x.weights for x in unit.linears))
            asked = asked + copied + held_out * one * passed.work
        work = work + len(settings.sparsities) * asked
        peak = max(peak, cost.statistics.memory + prepared + asked.memory)
    return Stage("allocate", work, {**held, "statistics and pruners": peak})


def _prune(of: Basis) -> Iterator[Stage]:
    """Yield the passes of the blocks, each pruner, and block reconstruction."""
    text, settings = of.text, of.planned.reconstruct_block
    order = [*of.found.blocks, OUTSIDE]
    passes, training = Work(), Work()
    pruners: dict[str, Work] = {}
    peak, peaks = 0.0, dict[str, float]()
    batches = text.batches if of.planned.needs_calibration else 0
    first = min(batches, math.ceil(MEASURED_TOKENS / (text.batch * text.length)))  # batches of the block's error
    for index, fqn in enumerate(order):
        wanted = of.planned.in_block(fqn)
        if index > of.last and not (fqn == OUTSIDE and wanted):
            continue
        passed = of.batch.blocks.get(fqn, of.batch.outside) if batches else Passed()
        outside = sum(x.weights for x in of.planned.linears if not x.block)
        size = of.itemsize * (of.sizes[fqn] if fqn else outside)
        cost = of.cost(index, fqn, of.planned.asked(fqn), text if batches else Windows(0, 1, 1, of.itemsize))
        runs = (2 * first if wanted and fqn else 0) + batches * (index < of.last)
        runs += batches if settings is not None else 0  # the dense stream
        # The first batch shows that each linear is called once, so that later ones may be left early.
        observed = passed.work + (batches - 1) * cost.observed if cost.statistics.counts else Work()
        passes = passes + runs * passed.work + observed + cost.statistics
        if wanted:  # looked through for damage and changes, hashed, written to the model and to disk
            hashed = 0.0 if of.machine.gpu else size  # weights of a GPU are hashed behind its work
            passes = passes + Work.of(moved=14.0 * size, hashed=hashed, written=size)
            numbers = 0.0 if of.machine.gpu else size / of.itemsize
            passes = passes + Work.of(moved=_CHOSEN * numbers)  # by the mask
            passes = passes + of.python(_BLOCK + _LINEAR * sum(map(len, wanted.values())))
        decided = of.slowest(cost)
        pruners = summed(
            [pruners, dict.fromkeys(cost.pruned, Work()), *(w for t in decided for w in (t.prepared, t.pruned))]
        )
        # What lies outside the blocks is in memory in place of a block.
        instead = 0.0 if fqn else of.around - of.weights
        # Outputs of the first batches stay, to measure the block's error.
        outputs = float(first * text.batch * text.length * of.width * of.itemsize) if wanted and fqn else 0.0
        asked, written = cost.peaks(of.processes)
        runs_memory = cost.statistics.memory if cost.statistics.counts else passed.work.memory if runs else 0.0
        peak = max(peak, instead + outputs + max(runs_memory, written))
        for name, most in asked.items():
            peaks[name] = max(peaks.get(name, 0.0), instead + outputs + most)
        if of.processes > 1 and wanted:
            _exchange(of, index, fqn, cost, batches)
        if settings is not None and wanted and fqn:
            training = training + reconstruction(
                settings, passed, of.text, batches, of.sizes[fqn], of.width, of.processes
            )
    streams = 1 if settings is None else 2
    held_always = {"weights": of.weights, "hidden states": of.hidden(streams * text.count) if batches else 0.0}
    # Batches of one shape share them; the last batch may have another.
    arguments = of.batch.arguments * (1 + (text.count % text.batch > 0)) if batches else 0.0
    held_always |= {"arguments of blocks": arguments} if arguments else {}
    if len({x.block for x in of.planned.linears}) > 1:  # the journal writes states after the first, at least
        passes = passes + Work.of(written=held_always["hidden states"])
    captured = {**held_always, "weights": of.around}  # when all batches have reached the first block
    held_always |= {"block being written": of.pending} if of.pending else {}
    passed_on = largest({**held_always, "statistics and activations": peak}, captured if batches else {})
    yield Stage("prune: passes and statistics", passes, passed_on)
    for name, work in pruners.items():
        yield Stage(f"prune: {name}", work, {**held_always, "statistics and pruners": peaks[name]})
    if settings is not None:
        yield Stage("prune: block reconstruction", training, {**held_always, "training": training.memory})


def _exchange(of: Basis, index: int, fqn: str, cost: BlockCost, batches: int) -> None:
    """Count what processes exchange while a block is pruned."""
    block, settings = of.block(index, fqn), of.planned.reconstruct_block
    parts = {**of.of_statistics(block, cost.gathered), **of_decisions(cost)}
    if settings is not None and fqn:
        masked = [x.name for x in of.planned.linears if x.block == fqn]
        steps = settings.passes * steps_of(settings, of.text, batches, of.processes)
        parts |= of_training(block, masked, settings, steps)
    of.exchanged.add(parts, of_block=bool(fqn))


def _finetune(of: Basis) -> Stage | None:
    """Train the whole model, and measure the loss of what is held out."""
    settings = of.recipe.finetune
    if settings is None:
        return None
    draw = settings.draw
    windows, length = (draw.samples, draw.sequence_length) if draw else (of.text.count, of.text.length)
    passed = of.passed(settings.batch_size, length, of.products)
    model = Trained(passed, of.parameters, of.width, of.vocabulary)
    tuned = finetuning(settings, model, windows, length, narrow=of.products != "float32")
    teacher = of.parameters if settings.teacher != "none" else 0
    room = finetuning_bytes(of.recipe, settings, of.planned, of.model, of.itemsize, teacher)
    steps: float = settings.total_steps
    if settings.minutes is not None:
        left = max(0.0, 60 * settings.minutes - (1 + CHECKS) * of.machine.seconds(tuned.check))
        steps = max(1, round(left / of.machine.seconds(tuned.step)))
        of.notes.append(f"{settings.minutes:g} minutes of fine-tuning are about {steps:g} steps")
    checks = 1 + min(CHECKS, steps)  # before the first step, and a few times during the training
    return Stage("finetune", steps * tuned.step + checks * tuned.check, {**room, "activations": tuned.kept})


def _save(of: Basis) -> Stage:
    """Write the model, and the masks, which are read three times from the finished blocks' files, checked each time."""
    size, masks = float(of.parameters * of.itemsize), sum(x.weights for x in of.planned.linears) / 8
    work = Work.of(written=size + masks, moved=2 * size, read=3 * masks, hashed=4 * masks)
    return Stage("save", work, {"weights": max(of.weights, of.around)})


def disk(of: Basis) -> dict[str, float]:
    """Bytes on the output's disk while the run goes on."""
    streams = 0 if not of.planned.needs_calibration else 1 if of.planned.reconstruct_block is None else 2
    pruned = {x.block for x in of.planned.linears if x.block}
    return {
        "model": float(of.parameters * of.itemsize),
        "journal: finished blocks": float(sum(of.sizes[fqn] for fqn in pruned) * of.itemsize),
        "journal: masks, twice": 2 * sum(x.weights for x in of.planned.linears) / 8,
        # Those of a block before are kept until the record lists the block.
        "journal: hidden states, twice": 2.0 * streams * sum(of.shares) * of.text.length * of.width * of.itemsize,
    }
