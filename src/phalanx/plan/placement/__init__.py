"""Placement of ranks on nodes, and the resulting traffic."""
