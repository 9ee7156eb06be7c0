"""What pruning costs: token perplexity, lm-evaluation-harness, saved models measured again."""
