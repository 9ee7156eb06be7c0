"""Numerical methods of pruning, on plain tensors: OBS updates, ADMM, the error of a block's output."""
