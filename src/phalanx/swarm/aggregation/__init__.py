"""Aggregation of node updates."""
