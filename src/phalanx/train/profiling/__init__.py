"""Measurement of steps: time, memory, collectives, FLOPs."""
