"""A recipe and a model become a plan: each linear, its pruner, its pattern."""
