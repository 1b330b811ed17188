"""Patterns with which dashboards and health checks parse the output of nccl-tests."""

from __future__ import annotations

import re

# Pattern of a row that dashboards and health checks use.
ROW = re.compile(
    r"^\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+)"
    r"\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+)",
    re.MULTILINE,
)
AVERAGE = re.compile(r"^# Avg bus bandwidth\s*:\s*([\d.]+)", re.MULTILINE)
