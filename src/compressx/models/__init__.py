"""Models: locate, load, stream, run block by block, and save."""
