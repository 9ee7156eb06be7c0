"""Shared infrastructure that needs no model: errors, files, caching, timing, processes."""
