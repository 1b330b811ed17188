"""Exact memory, traffic and FLOPs of Phalanx, counted per tensor."""
