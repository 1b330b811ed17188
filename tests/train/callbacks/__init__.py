"""Tests of the callbacks of the training loop."""
