"""Pruning one decoder block after another: observe, decide, check, write."""
