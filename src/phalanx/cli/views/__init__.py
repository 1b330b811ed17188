"""Output of results as tables and text."""
