"""The parts of a block, each declared once as a list of operations. What follows from it is derived by rules."""
