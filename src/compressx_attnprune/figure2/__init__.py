"""The synthetic experiment behind the paper's Figure 2, and its command."""
