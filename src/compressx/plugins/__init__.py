"""The plugin host: discovery, loading and checks, the kinds of things plugins offer, and a template for new ones."""

from compressx.plugins.discovery import PluginRecord
from compressx.plugins.manager import Plugins, load_plugins

__all__ = ["PluginRecord", "Plugins", "load_plugins"]
