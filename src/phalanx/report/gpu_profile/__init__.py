"""Figures of a step on a GPU, from a trace of torch.profiler."""
