"""Training of the remaining weights, in one block or the whole model, with masks fixed."""
