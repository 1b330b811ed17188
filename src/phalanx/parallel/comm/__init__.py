"""Collectives and their measurement."""
