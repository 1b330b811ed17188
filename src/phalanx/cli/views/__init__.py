"""Printing of results as tables and text."""
