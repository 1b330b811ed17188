"""Which ranks communicate in a run, against the groups that a placement spreads its bytes over."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from phalanx.cost.exact.traffic import traffic_by_group
from phalanx.spec.communication_groups import communication_groups
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import DENSE, MOE, measure_steady_step, small_run

Groups = dict[tuple[str, tuple[int, ...]], float]
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"layout.tp": 4}),
    (DENSE, {"layout.pp": 2, "layout.data_parallel": "zero1"}),
    (DENSE, {"layout.tp": 2, "layout.cp": 2, "layout.data_parallel": "zero3"}),
    (DENSE, {"layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    (MOE, {"layout.ep": 2, "layout.tp": 2, "layout.data_parallel": "zero1"}),
    (MOE, {"layout.ep": 2, "layout.data_parallel": "hsdp", "layout.dp_shard": 2}),
    (MOE, {"layout.ep": 2, "layout.cp": 2, "layout.cp_method": "ulysses"}),
]


def predict_bytes_by_group(run: RunSpec, world_size: int) -> Groups:
    """Bytes that a member sends, by operation and group."""
    sizes, found = parallel_dims(run.layout, world_size), defaultdict[tuple[str, tuple[int, ...]], float](float)
    for place, rows in enumerate(traffic_by_group(run, world_size).values()):
        for row in (row for row in rows if row.operation != "send"):
            for group in communication_groups(run, sizes, row.group_kind):
                if group[0] // (sizes.cp * sizes.tp) % sizes.pp == place:
                    found[row.operation, group] += row.bytes
    return found


@pytest.mark.parametrize(("model", "changes"), LAYOUTS, ids=str)
def test_communicating_groups_match_recorded_collectives(
    model: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """To 1 %, but for some hundred bytes of sums and norms. What experts exchange is the mean of a group's members,
    since they are not balanced in the first steps."""
    numbers = {"training.precision": "bf16", "layout.micro_batch_size": 1, "model": {**model, "num_layers": 4}}
    run = small_run(Path(json.__file__).parent, tmp_path, {**numbers, **changes})
    measured: Groups = defaultdict(float)
    for of_rank in rank_pool(4).run(measure_steady_step, run):
        for row in of_rank["collectives"]:
            group = tuple(sorted(row["group"]))
            measured[row["operation"], group] += row["sent_bytes"] / len(group)
    expected = predict_bytes_by_group(run, 4)
    for key in {*expected, *measured}:
        if key[0] not in ("send", "recv"):
            assert measured[key] == pytest.approx(expected[key], rel=0.01, abs=500), key
