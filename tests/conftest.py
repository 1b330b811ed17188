"""Tests share two cores with the pool's ranks: this process computes with one thread, and no example has a deadline."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--steps", type=int, default=5, help="how long each layout of tests/parity trains (make parity: 20)"
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"parity: {config.getoption('steps')} steps of each layout"
