"""Models: loading them, their blocks, where their weights are, and how one block is run alone."""
