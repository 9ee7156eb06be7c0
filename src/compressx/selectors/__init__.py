"""The built-in token selectors; each module is a plugin."""
