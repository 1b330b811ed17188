"""Tests share two cores with the pool's ranks: this process computes with one thread, and no example has a deadline."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


THOROUGH_STEPS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    wanted = f"how long each layout of tests/parity trains; from {THOROUGH_STEPS} on, with what is marked thorough, too"
    parser.addoption("--steps", type=int, default=5, help=f"{wanted} (make parity: {THOROUGH_STEPS})")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is `thorough` is for `make parity`."""
    if config.getoption("steps") < THOROUGH_STEPS:
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config: pytest.Config) -> str:
    return f"parity: {config.getoption('steps')} steps of each layout"
