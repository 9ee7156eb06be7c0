"""Plugins: how they are found, loaded and checked, and a template for a new one."""

from compressx.plugins.manager import PluginRecord, Plugins, load_plugins

__all__ = ["PluginRecord", "Plugins", "load_plugins"]
