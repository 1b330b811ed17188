"""Callbacks of the training loop: the base class, and those of every run."""
