"""Pipeline schedules by the names in run files and commands, with the properties that checks and exporters need.

A new schedule is a row here and a rule in `schedule/published.py`. The planner searches it if
`cost/estimate/pipeline_schedules.py` has its bubble and its micro-batches in flight.
`python -m phalanx.spec.files.json_schema` writes its name to the schema of run files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias


@dataclass(frozen=True, kw_only=True)
class ScheduleProperties:
    """Properties of a schedule for any number of ranks and micro-batches."""

    has_virtual_stages: bool = False
    """True if `layout.virtual_stages` sets the stages of a rank."""
    is_v_shaped: bool = False
    """True if each rank has two stages, and the first rank both ends of the model."""
    supports_uneven_micro_batches: bool = True
    """True if replicas may have different numbers of micro-batches."""
    torch_name: str | None = None
    """Name in torch.distributed.pipelining.schedules.get_schedule_class; None if PyTorch has no such schedule."""


SCHEDULES: dict[str, ScheduleProperties] = {
    "naive": ScheduleProperties(),
    "gpipe": ScheduleProperties(torch_name="GPipe"),
    "1f1b": ScheduleProperties(torch_name="1F1B"),
    "interleaved": ScheduleProperties(
        has_virtual_stages=True, supports_uneven_micro_batches=False, torch_name="Interleaved1F1B"
    ),
    "zb-h1": ScheduleProperties(),
    "zb-h2": ScheduleProperties(),
    "zb-v": ScheduleProperties(is_v_shaped=True, torch_name="ZBVZeroBubble"),
    "dualpipe-v": ScheduleProperties(is_v_shaped=True, supports_uneven_micro_batches=False, torch_name="DualPipeV"),
}
V_SCHEDULES = tuple(name for name, properties in SCHEDULES.items() if properties.is_v_shaped)

# Run files accept the names of the table; mypy, which reads no tables, takes any text.
if TYPE_CHECKING:
    ScheduleName: TypeAlias = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]


def quote_names(names: tuple[str, ...]) -> str:
    """Return names for a message: '"zb-v" or "dualpipe-v"'."""
    return " or ".join(f'"{name}"' for name in names)
