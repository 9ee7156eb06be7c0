"""What a model is worth: token perplexity and lm-evaluation-harness."""
