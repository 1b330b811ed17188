"""Topology of a node, from the outputs of its tools."""
