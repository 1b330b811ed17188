"""Checks of a machine, one per file."""
