"""Models: where they come from, how they are loaded, streamed, run block by block and saved."""
