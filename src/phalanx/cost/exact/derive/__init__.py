"""Numbers that follow from the declaration of a part (`spec.parts`), by one rule per kind of operation.

Why: `docs/design/decisions/declared-parts.md`."""
