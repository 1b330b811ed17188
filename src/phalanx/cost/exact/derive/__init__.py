"""What follows from the declaration of a part (`spec.parts`), by one rule per kind of operation: one file a number."""
