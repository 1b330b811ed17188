"""Descriptions of runs, models, layouts and machines."""
