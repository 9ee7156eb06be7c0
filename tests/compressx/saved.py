"""A tiny model in a folder with a text beside it, as a user has them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from compressx.testing import save_tiny_model, tiny_text


def save_tiny(folder: Path, architecture: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny model with its tokenizer, and a text of words that it knows as `text.txt` beside the folder."""
    save_tiny_model(folder, architecture, dtype=dtype)
    folder.with_name("text.txt").write_text(tiny_text())
    return folder


def rename_tokens(folder: Path) -> None:
    """Give each token of a saved tokenizer the number of another."""
    held = json.loads((path := folder / "tokenizer.json").read_text())
    vocabulary = held["model"]["vocab"]
    held["model"]["vocab"] = dict(zip(reversed(vocabulary), vocabulary.values(), strict=True))
    path.write_text(json.dumps(held))
