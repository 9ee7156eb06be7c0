"""Tensors in GGUF files: transformers' own readers, which say how one lies there, and what undoes them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from compressx.models.architecture import text_config
from compressx.models.gguf_header import BLOCK, names_mapped_once
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.quiet import quiet_libraries


class Readers:
    """How tensors of one model lie in a file: `sources` has their names in the model by those in the file."""

    def __init__(self, model: Any, architecture: str, rotated_as: str | None = None) -> None:
        from transformers import modeling_gguf_pytorch_utils as readers

        self.architecture, self.config = architecture, text_config(model).to_dict()
        known: Any = readers.TENSOR_PROCESSORS
        self._kind = known.get(rotated_as or architecture, readers.TensorProcessor)
        with quiet_libraries(), names_mapped_once():
            mapped = readers.get_gguf_hf_weights_map(
                model, self._kind(config=self.config), architecture, text_config(model).num_hidden_layers
            )
        # Those of experts have no `.weight`.
        self.sources = {x if "." in BLOCK.sub("", x) else f"{x}.weight": source for x, source in mapped.items()}

    def process(self, name: str, stored: np.ndarray, heads: Mapping[str, int]) -> np.ndarray:
        """Return what transformers makes of a tensor of the file; heads are settings that are others in its block."""
        if name == "output.weight":  # which GPT-2's reader puts elsewhere
            return stored
        result: np.ndarray = self._kind(config={**self.config, **heads}).process(stored, name).weights
        return result

    def shape(self, name: str, shape: tuple[int, ...], heads: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape in the file of a tensor that has a shape in transformers."""
        if re.search(r"ffn_(gate|up)_exps", name):
            return (shape[0], shape[1] // 2, *shape[2:])
        for tried in (shape, shape[::-1], tuple(n for n in shape if n != 1)):
            with contextlib.suppress(ValueError, IndexError):
                if self.process(name, np.broadcast_to(np.float32(0), tried), heads).shape == shape:
                    return tried
        raise self._unknown(name)

    def stored(self, name: str, wanted: np.ndarray, shape: tuple[int, ...], heads: Mapping[str, int]) -> np.ndarray:
        """Return the tensor of a shape in the file of which transformers makes the wanted one.

        Its readers move entries and add a constant, so they are asked where each entry goes.
        """
        if half := re.search(r"ffn_(gate|up)_exps", name):
            return np.split(wanted, 2, axis=1)[half[1] == "up"]
        plain = wanted.reshape(shape)
        if np.array_equal(self.process(name, plain, heads), wanted):
            return plain
        added = self.process(name, np.zeros(shape), heads)
        positions = self.process(name, np.arange(wanted.size, dtype=np.float64).reshape(shape), heads) - added
        found = np.empty(wanted.size, np.float32)
        found[positions.astype(np.int64).ravel()] = (wanted - added).ravel()
        found = found.reshape(shape)
        if not np.allclose(self.process(name, found, heads), wanted, rtol=1e-6, atol=1e-6):
            raise self._unknown(name)
        return found

    def _unknown(self, name: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"format gguf: {name} of {self.architecture} is not as transformers reads it, or not finite; "
            "export another format"
        )
