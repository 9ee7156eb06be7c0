"""Pruning block by block."""
