"""How surviving weights are trained: in one block, or in the whole model with its masks held."""
