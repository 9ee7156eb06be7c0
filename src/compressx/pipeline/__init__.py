"""The order of a run: its stages, its journal, resuming it, sweeping over it."""
