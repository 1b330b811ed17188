"""The worker node of a swarm."""
