"""Estimated memory and time of many layouts of any trainer at once, as numpy columns."""
