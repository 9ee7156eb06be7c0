"""How sparsity is distributed over the linears of a model."""
