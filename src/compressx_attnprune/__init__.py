"""Attention-aware pruning of query and key projections (Attention Weights Pruning, arXiv 2410.11261) for compressx."""
