"""A run, from a recipe to its output folder."""
