"""Benchmarks of a machine: `phalanx bench`."""
