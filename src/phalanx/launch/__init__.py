"""Processes and nodes: start, failure detection, restart."""
