"""Files of a run directory: writers and readers."""
