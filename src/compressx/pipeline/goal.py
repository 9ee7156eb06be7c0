"""A first recipe for a goal, a model that is smaller or decodes faster: how much to remove, by arithmetic on shapes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from compressx.api.patterns import Structured
from compressx.models.architecture import architecture_of, positions_of, text_config
from compressx.models.checkpoint import find_checkpoint
from compressx.models.gguf_export import OWN_WIDTHS
from compressx.models.loading import load_skeleton, load_tokenizer
from compressx.pipeline.footprint import footprint
from compressx.pipeline.run import loaded_recipe
from compressx.pipeline.stages import prepare
from compressx.planning.draft import described
from compressx.plugins.manager import Plugins
from compressx.recipe.document import flow
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import CompressxError, UnsupportedModelError
from compressx.stages.state import RunState

_UNITS = {
    "experts": ("reap", "experts that routers and outputs weigh least are removed"),
    "neurons": ("ziplm", "neurons are removed whole, and the weights of the others solved for anew"),
    "blocks": ("depth", "blocks are removed whole, by trial, and the linear before each gap is solved for anew"),
}
"""What removes each kind of unit, in the order in which they are tried; of none more than half."""
_NOTES = {
    "calibration": "the text that decides what is removed, of several kinds",
    "allocation": "each block gets a width of its own; bytes of the file, at most",
    "shrink": "write the smaller model, not one with zeros",
    "finetune": "distillation from the dense model, which wins back a part of what is lost",
    "minutes": "more win back more",
    "held_out": "sequences that say which weights are best",
    "gradient_checkpointing": "false is faster, with more memory",
    "evaluate": "before and after: perplexity, and how far predictions are from the dense model's",
    "export": "for llama.cpp; add safetensors to keep the folder model/ as well",
}
_TEXTS = ["wikitext", "c4", {"name": "python-docs", "weight": 0.5}, {"name": "prompts", "weight": 0.5}]


class Goal(NamedTuple):
    """`smaller` by a share of the size, `25%` or `0.25`, or `faster` by a factor, `1.2x`; and for which runtime."""

    option: str
    text: str
    runtime: str

    def __str__(self) -> str:
        return f"--{self.option} {self.text} --for {self.runtime}"

    @property
    def share(self) -> float:
        """What share of the size, or of what decode reads, has to be removed."""
        faster = self.option == "faster"
        if match := re.fullmatch(r"(\d*\.?\d+)(x)" if faster else r"(\d*\.?\d+)(%?)", self.text):
            number = float(match[1])
            share = 1 - 1 / max(number, 1.0) if faster else number / 100 if match[2] else number
            if 0 < share < 1:
                return share
        expected = "a factor above 1, such as 1.2x" if faster else "a share between 0 and 1, such as 25% or 0.25"
        raise CompressxError(f"--{self.option} {self.text}: expected {expected}")

    def sizes(self, state: RunState) -> list[int]:
        """Return what has to become less, of the dense model and of the one that a planned run leaves."""
        found, kind = footprint(state), "Q8_0" if self.runtime == "llama.cpp" else "safetensors"
        of_file = found["bytes"][kind] if kind == "Q8_0" else found["parameters"]
        return list(found["decode_bytes"][kind] if self.option == "faster" else of_file)


def draft_for(goal: Goal, source: ModelSource, name: str, plugins: Plugins) -> str:
    """Write a recipe that reaches a goal, with comments. The output is named after `name`, as users call the model.

    Raises:
        CompressxError: a goal that cannot be reached, with the most that can.
    """
    share, checkpoint = goal.share, find_checkpoint(source)
    skeleton, tokenizer, error = load_skeleton(checkpoint), load_tokenizer(checkpoint), CompressxError()
    recipe = _recipe(goal, source, name, skeleton)

    def planned(unit: str, target: Any) -> tuple[RunState, list[int]]:
        recipe.update(_cut(goal, unit, target, text_config(skeleton)))
        state = RunState(loaded_recipe(_given(recipe), (), plugins), plugins, measured=False, replace=True)
        state.checkpoint, state.skeleton, state.tokenizer = checkpoint, skeleton, tokenizer
        prepare(state)
        return state, goal.sizes(state)

    for unit in _UNITS if goal.option == "smaller" else ("blocks",):
        try:
            state, (dense, least) = planned(unit, 0.5)
            break
        except CompressxError as refusal:
            error = error if error.args and unit == "blocks" else refusal  # of the unit that fits more models
    else:
        raise UnsupportedModelError(f"{goal}: {re.sub('^<dict>[^ ]*: ', '', str(error).splitlines()[0])}") from error
    if least > (wanted := math.floor(dense * (1 - share))):
        most = f"{1 - least / dense:.1%}" if goal.option == "smaller" else f"{dense / least:.2f}x"
        raise CompressxError(
            f"{goal}: at most {most}, with half of the {unit} removed: embeddings and the rest are kept"
        )
    if state.recipe.own_widths:
        kept = planned(unit, {"bytes": wanted})[1][1]
    else:
        pattern = state.plan.linears[0].pattern
        assert isinstance(pattern, Structured)  # noqa: S101 - of the only rule
        steps = math.ceil((dense - wanted) / (dense - least) * pattern.dropped / pattern.multiple - 1e-6)
        for count in range(steps * pattern.multiple, pattern.dropped + 1, pattern.multiple):
            kept = planned(unit, round(count / pattern.units.count, 5))[1][1]
            if kept <= wanted:
                break
    what = "parameters" if (goal.option, goal.runtime) == ("smaller", "transformers") else "bytes"
    what += " that a token reads" if goal.option == "faster" else ""
    lines = [
        *described(architecture_of(skeleton), skeleton, name),
        "#",
        f"# {goal}: of {dense} {what} {kept} are kept.",
    ]
    return _text(_given(recipe), [*lines, ""], {**_NOTES, "prune": _UNITS[unit][1]})


def _cut(goal: Goal, unit: str, target: Any, config: Any) -> dict[str, Any]:
    """Return the sections that remove units: of llama.cpp's models with own widths as an allocation chooses."""
    rule, gguf = {"targets": ["*"], "pruner": _UNITS[unit][0], "pattern": unit}, goal.runtime == "llama.cpp"
    if gguf and unit == "neurons" and {"mistral": "llama"}.get(kind := config.model_type, kind) in OWN_WIDTHS:
        widths = {"method": "divergence", "target": target, "sparsities": [0.1, 0.2, 0.4, 0.6, 0.8]}
        return {"prune": [rule], "allocation": widths, "shrink": None}
    if gguf and unit == "blocks" and len({*(getattr(config, "layer_types", None) or [])}) > 1:
        raise UnsupportedModelError(
            "llama.cpp tells by a block's number which attention it has, so none can be removed"
        )
    return {"prune": [{**rule, "sparsity": target}], "allocation": None, "shrink": True}


def _recipe(goal: Goal, source: ModelSource, name: str, skeleton: Any) -> dict[str, Any]:
    """Return all sections in their order, without what removes units."""
    length = min(512, positions_of(skeleton))
    text = {"datasets": _TEXTS, "samples": 64, "sequence_length": length}
    tuning = {
        "minutes": 10.0, "learning_rate": 1.6e-3 if goal.option == "faster" else 8e-4, "batch_size": 2, "held_out": 4,
        "norms": "gemma" not in text_config(skeleton).model_type, "gradient_checkpointing": True,
    }  # fmt: skip
    called = Path(name).expanduser().resolve().name.removesuffix(".gguf")  # a hub id's last part, too
    return {
        "model": source.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        "calibration": text,
        **dict.fromkeys(("prune", "allocation", "shrink")),
        "finetune": {**tuning, **text, "samples": 1500},
        "evaluate": {"fidelity": {"dataset": "wikitext", "sequence_length": length, "samples": 48}},
        "export": [{"format": "gguf", "options": {"type": "Q8_0"}}] if goal.runtime == "llama.cpp" else None,
        "output": f"runs/{called}-{goal.option}-{goal.text.rstrip('%')}",
    }


def _given(recipe: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if value is not None}


def _text(recipe: dict[str, Any], lines: list[str], notes: dict[str, str]) -> str:
    """Write a recipe after some lines, with a note above each section that has one."""
    for key, value in recipe.items():
        lines += [f"# {notes[key]}"] if key in notes else []
        if key != "finetune":
            lines.append(f"{key}: {flow(value)}")
            continue
        own = (f"  {k}: {flow(x)}" + (f"  # {notes[k]}" if k in notes else "") for k, x in value.items())
        lines += ["finetune:", *own]
    return "\n".join([*lines, ""])
