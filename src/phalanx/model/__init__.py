"""The transformer and its parts, for a single process."""
