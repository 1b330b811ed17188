"""Search over all layouts of a run."""
