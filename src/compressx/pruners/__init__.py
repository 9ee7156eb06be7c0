"""The built-in pruners; each module is a plugin."""
