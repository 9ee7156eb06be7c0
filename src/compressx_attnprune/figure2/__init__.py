"""The synthetic experiment of the paper's Figure 2."""
