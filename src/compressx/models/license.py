"""The license of a model: from its card, or from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressx.models.checkpoint import Checkpoint
from compressx.models.gguf_header import values_of
from compressx.runtime.quiet import quiet_libraries

_KEYS = ("license", "license_name", "license_link")


def license_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the license of a checkpoint, under the keys of a model card.

    Returns:
        `license`, and for a license that is not on the hub's list `license_name` and `license_link`; empty if no
        license is known, or its card cannot be read.
    """
    try:
        with quiet_libraries():
            found = _of_gguf(checkpoint) if checkpoint.gguf_file is not None else _of_card(checkpoint)
    except Exception:  # noqa: BLE001 - whatever is wrong with a card, the pruned model must be written
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _of_card(checkpoint: Checkpoint) -> dict[str, object]:
    from huggingface_hub import ModelCard, hf_hub_download

    path = Path(checkpoint.location) / "README.md"
    if not Path(checkpoint.location).is_dir():
        path = Path(hf_hub_download(checkpoint.location, "README.md", revision=checkpoint.revision))
    data = ModelCard.load(path, ignore_metadata_errors=True).data
    return {key: data.get(key) for key in _KEYS}


def _of_gguf(checkpoint: Checkpoint) -> dict[str, object]:
    found = values_of(Path(checkpoint.location) / str(checkpoint.gguf_file))
    return {key: found.get("general." + key.replace("_", ".")) for key in _KEYS}
