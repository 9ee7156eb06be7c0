"""Training what pruning left: one block at a time, or the whole model."""
