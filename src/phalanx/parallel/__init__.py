"""Parallel execution of a model on this rank."""
