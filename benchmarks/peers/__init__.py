"""Trainers that are compared with Phalanx, one per file.

`build` creates the model for a shape and a layout on this rank. It returns a function that runs one optimizer update
and returns its loss.
"""
