"""Run files: loading, schema, template."""
