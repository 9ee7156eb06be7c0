"""The smaller dense model of `shrink: true`: its config, cuts of its tensors, and whether it computes the same."""
