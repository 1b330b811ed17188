"""Benchmarks that need a GPU; __main__.py runs them."""
