"""Processes and nodes: start, failure detection and restart."""
