"""Parsers of tool outputs."""
