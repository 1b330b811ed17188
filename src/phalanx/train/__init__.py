"""Training on one rank: the loop, optimizers, checkpoints, guards and profiling."""
