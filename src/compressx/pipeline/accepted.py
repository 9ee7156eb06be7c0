"""Which models and tokenizers in memory `prune` takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from compressx.masks.adapters import has_adapters
from compressx.models.architecture import refuse_prepared
from compressx.runtime.errors import CalibrationError, UnsupportedModelError


def check_model(model: Any) -> None:
    """Check that a model is a dense transformers language model on one device.

    Raises:
        UnsupportedModelError: it is not; the message says what to pass instead.
        ArtifactError: its weights are no plain parameters, see `refuse_prepared`.
    """
    from transformers import PreTrainedModel

    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        wrapped = "unwrap it first (PEFT: model.merge_and_unload(); torch.compile: model._orig_mod; DDP: model.module)"
        other = "load one by AutoModelForCausalLM.from_pretrained, or write a recipe and call compressx.run"
        raise UnsupportedModelError(
            f"prune takes a transformers causal language model, got {kind}; "
            f"{wrapped if isinstance(model, nn.Module) else other}"
        )
    if has_adapters(model):  # get_peft_model puts them into the model that it is given, too
        raise UnsupportedModelError(f"{kind} has PEFT adapters; merge them into its weights, or load it without them")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{kind} has no head to predict tokens; load the model by AutoModelForCausalLM.from_pretrained"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{kind} is quantized; prune the full-precision model, then quantize")
    refuse_prepared(model, "pruned")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise UnsupportedModelError(
            f"{kind} has weights on {' and '.join(sorted(devices))}, expected one device; load it without device_map, "
            "or write a recipe with model.streaming: true and call compressx.run"
        )


def check_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer; in place of None, one of which any use is an error.

    Raises:
        CalibrationError: something else was passed.
    """
    if tokenizer is None:
        return _NoTokenizer()
    if not callable(tokenizer):
        raise CalibrationError(f"tokenizer is {tokenizer!r}; expected what AutoTokenizer.from_pretrained returns")
    return tokenizer


class _NoTokenizer:
    """In place of a tokenizer that is None: any use is an error."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise CalibrationError("tokenizer is None, but the recipe has text to read; pass the model's tokenizer")

    def __getattr__(self, name: str) -> Any:
        return self()
