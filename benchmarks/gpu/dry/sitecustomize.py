"""Every process of a dry run (PYTHONPATH) is given the numbers that a GPU that computes nothing does not have."""

from tests.null_gpu.given_numbers import give_numbers

give_numbers()
