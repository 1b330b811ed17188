"""Calibration of a machine's constants from its own runs and benchmarks."""
