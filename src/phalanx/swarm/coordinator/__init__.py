"""The coordinator of a swarm."""
