"""Export of a run to the configuration of other trainers."""
