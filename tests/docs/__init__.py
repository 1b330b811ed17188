"""Documents: commands run, links lead to targets, and generated pages are current."""
