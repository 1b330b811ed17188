"""Traces and metrics for other tools."""
