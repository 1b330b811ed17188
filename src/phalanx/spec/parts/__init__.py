"""Parts of a block, each declared once as a list of operations.

Why: `docs/design/decisions/declared-parts.md`."""
