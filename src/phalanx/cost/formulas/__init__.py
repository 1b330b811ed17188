"""Closed formulas for collectives, fabrics, reliability and energy."""
