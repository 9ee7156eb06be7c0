"""The plugin host: discovery, loading and checks, the kinds of things plugins offer, and a template for new ones."""
