"""Run files: loader, schema and template."""
