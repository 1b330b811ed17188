"""Training over slow links: nodes train independently and periodically combine their weights."""
