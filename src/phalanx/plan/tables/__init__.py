"""Runs of other trainers as table rows."""
