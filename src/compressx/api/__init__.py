"""What a plugin sees: the pruner protocol, hooks, patterns, statistics, and the record of a run."""
