"""Detection of hangs, divergence and corrupted replicas."""
