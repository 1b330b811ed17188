"""Verification of the plan against the traced program."""
