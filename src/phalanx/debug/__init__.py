"""Post-mortem analysis of failed and hung runs: `phalanx debug`."""
