"""The explorer: a page on which all layouts of a run can be seen, compared and copied."""
