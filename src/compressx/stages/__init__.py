"""The order of a run: what every stage shares, and where finished blocks are kept."""
