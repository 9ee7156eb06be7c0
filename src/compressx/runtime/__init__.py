"""What every other package builds on and no model is needed for: errors, files, caching, timing, processes."""
