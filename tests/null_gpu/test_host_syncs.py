"""A step waits for its device only where docs/results/benchmarks/host-syncs.md says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from phalanx.spec.files.write import to_toml
from tests.helpers.small_runs import small_run
from tests.null_gpu.layouts import BF16, PIPELINES, SINGLE_AXES
from tests.null_gpu.rank import HOST_SYNCS_FILE
from tests.null_gpu.ranks import describe_failures, run_ranks

TABLE = Path(__file__).parents[2] / "docs/results/benchmarks/host-syncs.md"
CLOCK = "device_clock.py:resolve"
"""This line waits at most once per step, and not at all if the device has passed the recorded events."""
STEPS = 13
"""DDP waits for its timers in the first eleven steps; the last step but one is counted."""


def read_table() -> dict[str, tuple[int, Counter[str]]]:
    """Return the total number of waits of each layout, and its waits by place without those of CLOCK."""
    rows = [line.strip("| \n").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    table = {}
    for layout, _, total, cell in rows:
        counts = (entry.rpartition(" ") for entry in cell.split(", "))
        table[layout] = int(total), Counter({entry: int(count) for entry, _, count in counts})
    return table


EXPECTED = read_table()


@pytest.mark.parametrize("layout", EXPECTED)
def test_step_waits_for_device_as_in_table(layout: str, documents: Path, tmp_path: Path) -> None:
    world_size, changes = {**SINGLE_AXES, **PIPELINES}[layout]
    run = small_run(documents, tmp_path, {**BF16, "training.steps": STEPS, **changes})
    file, counts_file = tmp_path / "run.toml", tmp_path / "host_syncs.json"
    file.write_text(to_toml(run))
    variables = {HOST_SYNCS_FILE: str(counts_file)}
    results = run_ranks("tests.null_gpu.rank", ["phalanx.train", str(file)], world_size, tmp_path, variables)
    assert all(result.exit_code == 0 for result in results), describe_failures(results)
    counts: Counter[str] = Counter()
    for place, count in json.loads(counts_file.read_text()).items():
        counts[place.rpartition("/")[2]] += count
    total, expected = EXPECTED[layout]
    assert counts.pop(CLOCK, 0) <= 1
    assert counts == expected
    assert total == expected.total() + 1
