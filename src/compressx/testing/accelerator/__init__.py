"""Code that asks for `cuda` runs on the CPU, and what would cost time on a GPU is counted."""
