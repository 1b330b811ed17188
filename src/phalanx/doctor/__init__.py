"""Health checks of machines for a run, one short file per check."""
