"""Tests that only `make test-all` runs: tests/thorough.tsv lists them, with
the tests that stand for them in `make test`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.covering import covering_subset

FILE = Path(__file__).parents[1] / "thorough.tsv"
RANK_PARAMETERS = ("world_size", "ranks", "n", "nproc")


@dataclass(frozen=True)
class Rule:
    """A test, or a file or folder of tests."""

    tests: str
    """Start of the ids, below tests/."""
    stands_for_them: str
    """The id of a test of `make test`; "covering": a subset in which each value of each parameter occurs; "only":
    the tests whose ids in brackets start with one of the words after it, separated by " | "."""

    @property
    def kept(self) -> list[str]:
        """Starts of the ids that "only" keeps."""
        kind, _, ids = self.stands_for_them.partition(" ")
        return ids.split(" | ") if kind == "only" else []

    @property
    def keeps_some(self) -> bool:
        """Whether tests of the rule itself stand for the others."""
        return self.stands_for_them == "covering" or bool(self.kept)


def read_rules() -> list[Rule]:
    """Read tests/thorough.tsv."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    return [Rule(*line.split("\t")) for line in lines]


def thorough_items(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that `make test` leaves out."""
    thorough: set[pytest.Item] = set()
    # "covering" chooses among the tests that the other rules leave.
    for rule in sorted(read_rules(), key=lambda rule: rule.stands_for_them == "covering"):
        matching = [item for item in items if item_id(item).startswith(rule.tests) and item not in thorough]
        if rule.stands_for_them == "covering" and matching:
            features = [list(item_features(item)) for item in matching]
            chosen = covering_subset(features, [2 + item_ranks(item) for item in matching])
            thorough |= {item for index, item in enumerate(matching) if index not in chosen}
        elif rule.kept:
            beginnings = tuple(f"[{start}" for start in rule.kept)
            thorough |= {item for item in matching if not item_id(item).removeprefix(rule.tests).startswith(beginnings)}
        else:
            thorough |= set(matching)
    return thorough


def item_id(item: pytest.Item) -> str:
    """Return a test's id below tests/."""
    return item.nodeid.removeprefix("tests/")


def item_features(item: pytest.Item) -> Iterator[Hashable]:
    """Yield the test and each value of its parameters; values in tables one by one."""
    yield getattr(item, "originalname", item.name)
    for name, value in _parameters(item).items():
        yield from _features(name, value)


def _features(name: str, value: Any) -> Iterator[Hashable]:
    if is_dataclass(value) and not isinstance(value, type):
        value = {key: field_value for key, field_value in asdict(value).items() if key != "name"}
    if isinstance(value, Mapping):
        for key, field_value in value.items():
            yield from _features(f"{name}.{key}", field_value)
    else:
        yield name, repr(value)


def item_ranks(item: pytest.Item) -> int:
    """Return the number of processes of a test, if its parameters contain it."""
    parameters = _parameters(item)
    counts = [parameters[name] for name in RANK_PARAMETERS if isinstance(parameters.get(name), int)]
    return counts[0] if counts else getattr(parameters.get("case"), "ranks", 1)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec is not None else {}
