"""Memory, traffic, FLOPs and time of a training run."""
