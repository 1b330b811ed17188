"""Collectives that real runs record, compared with the groups and bytes that a placement assumes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from phalanx.cost.exact.traffic import traffic_by_group
from phalanx.spec.communication_groups import communication_groups
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.resolved_run import ResolvedRun
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
    """Return the bytes that a member sends, by operation and group."""
    sizes = parallel_dims(run.layout, world_size)
    bytes_by_group: Groups = defaultdict(float)
    for stage, rows in enumerate(traffic_by_group(ResolvedRun(run, world_size)).values()):
        for row in (row for row in rows if row.operation != "send"):
            for group in communication_groups(run, sizes, row.group_kind):
                if group[0] // (sizes.cp * sizes.tp) % sizes.pp == stage:
                    bytes_by_group[row.operation, group] += row.bytes
    return bytes_by_group


@pytest.mark.parametrize(("model", "changes"), LAYOUTS, ids=str)
def test_communicating_groups_match_recorded_collectives(
    model: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Bytes agree to 1 %; 500 bytes are allowed for loss sums and gradient norms. Expert traffic is averaged over the
    members of a group, because experts are not balanced in the first steps."""
    settings = {"training.precision": "bf16", "layout.micro_batch_size": 1, "model": {**model, "num_layers": 4}}
    run = small_run(Path(json.__file__).parent, tmp_path, {**settings, **changes})
    measured: Groups = defaultdict(float)
    for rank_record in rank_pool(4).run(measure_steady_step, run):
        for row in rank_record["collectives"]:
            group = tuple(sorted(row["group"]))
            measured[row["operation"], group] += row["sent_bytes"] / len(group)
    expected = predict_bytes_by_group(run, 4)
    for key in {*expected, *measured}:
        if key[0] not in ("send", "recv"):
            assert measured[key] == pytest.approx(expected[key], rel=0.01, abs=500), key
