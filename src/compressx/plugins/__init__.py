"""Plugins: how they are found, loaded and checked, what kinds of things they offer, and a template for a new one."""

from compressx.plugins.manager import Plugins, load_plugins
from compressx.plugins.record import PluginRecord

__all__ = ["PluginRecord", "Plugins", "load_plugins"]
