"""Shorten prompts by token selectors, and let a model answer them."""
