from __future__ import annotations

import torch


def random_scores(rows: int, columns: int, seed: int, levels: int) -> torch.Tensor:
    """Scores with many ties when `levels` is small."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, levels, (rows, columns), generator=generator).float()
