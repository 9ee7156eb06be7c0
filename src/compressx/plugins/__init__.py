"""Which plugins there are, where they came from, and the manager that holds them."""

from compressx.plugins.manager import PluginRecord, Plugins, load_plugins

__all__ = ["PluginRecord", "Plugins", "load_plugins"]
