"""How sparsity is spread over a model."""
