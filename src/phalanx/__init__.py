"""Phalanx plans, runs and verifies distributed training of language models."""

__version__ = "0.1.0"
