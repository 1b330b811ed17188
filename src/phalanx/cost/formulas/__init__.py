"""Closed formulas: collectives, fabrics, reliability, energy."""
