"""Documents: their commands run, their links lead somewhere, their generated pages are current."""
