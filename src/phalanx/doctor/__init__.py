"""Whether a machine is fit for a run: one short file per check."""
