"""Published rules of thumb for choosing a layout, as data: their conditions, and their requirements.

The rules are quoted, not endorsed: `plan.advice.compare_rules` compares each with the planner. GiB is 2**30 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

from phalanx.plan.advice.papers import (
    CHECKPOINTING,
    DDP,
    EXPERTS,
    GPIPE,
    MEGATRON,
    MEGATRON_MOE,
    MEGATRON_ON_CLUSTERS,
    OFFLOAD_TO_FILES,
    SCALE_OUT,
    SEQUENCE_PARALLELISM,
    SERVERS,
    ZERO,
    ZERO_BUBBLE,
    no_paper,
)
from phalanx.plan.advice.rule_conditions import (
    AT_LEAST_TWO,
    BILLION,
    DATA_ONLY,
    ONE,
    THREE_D,
    WITHIN_DOMAIN,
    DegreeRange,
    Requirements,
    RunSituation,
    activations_are_largest,
    activations_are_largest_on_many_ranks,
    activations_exceed_device,
    block_exceeds_device,
    copy_fits_device,
    copy_spans_fast_link_domains,
    data_parallel_is_outer,
    has_experts,
    has_fewer_sequences_than_ranks,
    has_many_ranks,
    has_memory_for_zb_h2,
    has_parameters_between,
    has_sequences_for_all_ranks,
    lacks_memory_for_zb_h2,
    optimizer_state_is_largest,
    sharded_state_fits,
    state_exceeds_device,
)
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.spec.layout import SHARDED_STRATEGIES

Kind = Literal["size", "bottleneck", "schedule", "placement"]


@dataclass(frozen=True, kw_only=True)
class RuleOfThumb:
    """One rule of thumb."""

    kind: Kind
    name: str
    recommendation: str
    requirements: Requirements
    """Requirements on the planner's layouts."""
    applies: Callable[[RunSituation], str]
    """Return the evidence that the rule applies, or ""."""
    source: str
    unplanned_part: str = ""
    """Parts of the rule about options that the planner does not have, and the reason."""

    def is_satisfied_by(self, candidate: CandidateLayout, domain: int) -> bool:
        """Return whether a layout satisfies the rule."""
        return all(
            _meets_requirement(candidate, field, requirement, domain=domain)
            for field, requirement in self.requirements.items()
        )

    @property
    def requirements_text(self) -> str:
        """Requirements of the rule as text."""
        texts = {field: " or ".join(w) if isinstance(w, tuple) else str(w) for field, w in self.requirements.items()}
        return ", ".join(f"{field} {text}" for field, text in texts.items())


def _meets_requirement(
    candidate: CandidateLayout, field: str, requirement: DegreeRange | tuple[str, ...], domain: int
) -> bool:
    if isinstance(requirement, tuple):
        return getattr(candidate, field) in requirement
    return requirement.contains(prod(getattr(candidate, axis) for axis in field.split(" x ")), domain)


ZERO3_PIPELINE_NOTE = (
    "the planner has no ZeRO-3 in pipelines, where it stores and sends at least as much as ZeRO-1. It offloads only "
    "layouts that do not fit otherwise, because offload only saves memory"
)
SIZE_RULES = (
    RuleOfThumb(
        kind="size",
        name="fewer than 1B parameters",
        recommendation="data parallelism (DDP)",
        requirements={"data_parallel": ("ddp",), **DATA_ONLY},
        applies=has_parameters_between(0, BILLION),
        source=no_paper(DDP),
    ),
    RuleOfThumb(
        kind="size",
        name="1B to 10B parameters",
        recommendation="data parallelism with ZeRO-2",
        requirements={"data_parallel": ("zero2",), **DATA_ONLY},
        applies=has_parameters_between(BILLION, 10 * BILLION),
        source=no_paper(ZERO),
    ),
    RuleOfThumb(
        kind="size",
        name="10B to 100B parameters",
        recommendation="3D: data, tensor and pipeline parallelism",
        requirements=THREE_D,
        applies=has_parameters_between(10 * BILLION, 100 * BILLION),
        source=no_paper(MEGATRON_ON_CLUSTERS),
    ),
    RuleOfThumb(
        kind="size",
        name="100B parameters or more",
        recommendation="3D with ZeRO-3 and offload to CPU or NVMe",
        requirements=THREE_D,
        applies=has_parameters_between(100 * BILLION, None),
        source=no_paper(OFFLOAD_TO_FILES),
        unplanned_part=ZERO3_PIPELINE_NOTE,
    ),
)
"""Rules by size. Classes are half-open: exactly 1B, 10B or 100B parameters are in the larger class."""
BOTTLENECK_RULES = (
    RuleOfThumb(
        kind="bottleneck",
        name="activation memory",
        recommendation="data parallelism",
        requirements={"dp": AT_LEAST_TWO},
        applies=activations_exceed_device,
        source=no_paper(DDP),
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="parameter memory",
        recommendation="pipeline parallelism",
        requirements={"pp": AT_LEAST_TWO},
        applies=state_exceeds_device,
        source=GPIPE,
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="a single layer too big",
        recommendation="add tensor parallelism",
        requirements={"tp": AT_LEAST_TWO},
        applies=block_exceeds_device,
        source=MEGATRON,
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="compute inside layers",
        recommendation="tensor parallelism on fast links",
        requirements={"tp": AT_LEAST_TWO},
        applies=has_fewer_sequences_than_ranks,
        source=SERVERS,
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="more capacity at the same compute",
        recommendation="experts, and expert parallelism",
        requirements={"ep": AT_LEAST_TWO},
        applies=has_experts,
        source=EXPERTS,
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="a large dataset",
        recommendation="data parallelism",
        requirements={"dp": AT_LEAST_TWO},
        applies=has_sequences_for_all_ranks,
        source=SCALE_OUT,
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="optimizer state",
        recommendation="ZeRO or FSDP",
        requirements={"data_parallel": SHARDED_STRATEGIES},
        applies=optimizer_state_is_largest,
        source=ZERO,
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="state that ranks can share",
        recommendation="ZeRO and recomputation before model parallelism",
        requirements={"data_parallel": SHARDED_STRATEGIES, "tp": ONE, "pp": ONE},
        applies=sharded_state_fits,
        source=f"{ZERO}; {CHECKPOINTING}",
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="activations of a sequence",
        recommendation="recompute",
        requirements={"activation_checkpointing": ("norms", "selective", "full", "offload")},
        applies=activations_are_largest,
        source=f"{CHECKPOINTING}; {SEQUENCE_PARALLELISM}",
    ),
    RuleOfThumb(
        kind="bottleneck",
        name="long context",
        recommendation="sequence parallelism, with tensor parallelism",
        requirements={"tp": AT_LEAST_TWO},
        applies=activations_are_largest_on_many_ranks,
        source=SEQUENCE_PARALLELISM,
    ),
)
SCHEDULE_RULES = (
    RuleOfThumb(
        kind="schedule",
        name="a copy fits one device",
        recommendation="no pipeline; DP or ZeRO",
        requirements={"pp": ONE},
        applies=copy_fits_device,
        source=SCALE_OUT,
    ),
    RuleOfThumb(
        kind="schedule",
        name="it does not fit, memory to spare",
        recommendation="ZB-H2",
        requirements={"pp": AT_LEAST_TWO, "schedule": ("zb-h2",)},
        applies=has_memory_for_zb_h2,
        source=ZERO_BUBBLE,
    ),
    RuleOfThumb(
        kind="schedule",
        name="it does not fit, memory tight",
        recommendation="ZB-H1 or 1F1B",
        requirements={"pp": AT_LEAST_TWO, "schedule": ("zb-h1", "1f1b")},
        applies=lacks_memory_for_zb_h2,
        source=ZERO_BUBBLE,
    ),
    RuleOfThumb(
        kind="schedule",
        name="the smallest structure that fits",
        recommendation="DDP, where it fits",
        requirements={"data_parallel": ("ddp",), **DATA_ONLY},
        applies=copy_fits_device,
        source=SCALE_OUT,
    ),
)
PLACEMENT_RULES = (
    RuleOfThumb(
        kind="placement",
        name="tensor parallelism",
        recommendation="inside the domain of fast links",
        requirements={"tp": WITHIN_DOMAIN},
        applies=has_many_ranks,
        source=SERVERS,
    ),
    RuleOfThumb(
        kind="placement",
        name="pipeline",
        recommendation="between nodes",
        requirements={"pp": AT_LEAST_TWO, "tp x cp": DegreeRange("domain")},
        applies=copy_spans_fast_link_domains,
        source=SERVERS,
    ),
    RuleOfThumb(
        kind="placement",
        name="data parallelism",
        recommendation="outermost, one exchange in a step",
        requirements={},
        applies=data_parallel_is_outer,
        source=MEGATRON_ON_CLUSTERS,
    ),
    RuleOfThumb(
        kind="placement",
        name="expert parallelism",
        recommendation="inside the domain of fast links",
        requirements={"ep x tp": WITHIN_DOMAIN},
        applies=has_experts,
        source=MEGATRON_MOE,
    ),
)
RULES = (*SIZE_RULES, *BOTTLENECK_RULES, *SCHEDULE_RULES, *PLACEMENT_RULES)
