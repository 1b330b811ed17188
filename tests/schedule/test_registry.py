from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cost.estimate.pipeline_schedules import SCHEDULE_ESTIMATES
from phalanx.schedule.published import PUBLISHED
from phalanx.schedule.registry import build_schedule
from phalanx.spec.errors import UserError
from phalanx.spec.files import json_schema
from phalanx.spec.pipeline_schedules import SCHEDULES


def test_every_schedule_has_a_rule_and_a_name_in_the_schema() -> None:
    schema = json.loads(Path(json_schema.__file__).with_name("run.schema.json").read_text())
    assert list(PUBLISHED) == list(SCHEDULES)
    assert schema["definitions"]["Layout"]["properties"]["schedule"]["enum"] == list(SCHEDULES)
    assert set(SCHEDULE_ESTIMATES) <= set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_properties_are_those_of_the_built_schedule(name: str) -> None:
    properties = SCHEDULES[name]
    schedule = build_schedule(name, 4, 8, v=3)
    assert schedule.stages == 4 * (3 if properties.has_virtual_stages else 2 if properties.is_v_shaped else 1)
    first, last = schedule.end_ranks
    assert (first == last) == properties.is_v_shaped


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_of_uneven_micro_batches_can_be_built_for_any_number(name: str) -> None:
    def can_be_built(micro_batches: int) -> bool:
        try:
            return bool(build_schedule(name, 4, micro_batches).orders)
        except UserError:
            return False

    assert all(map(can_be_built, range(1, 10))) == SCHEDULES[name].supports_uneven_micro_batches
