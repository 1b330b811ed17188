"""Published rules of thumb for choosing a layout: when each applies, and what it requires.

The rules are quoted, not endorsed: `plan.advice.compare_rules` compares each with the planner. GiB is 2**30 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Literal

from phalanx.cost.formulas.activation_checkpointing import optimal_num_checkpoints
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
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.spec.formatting import format_gib
from phalanx.spec.layout import SHARDED_STRATEGIES

Kind = Literal["size", "bottleneck", "schedule", "placement"]
BILLION = 10**9


@dataclass(frozen=True, kw_only=True)
class RunSituation:
    """Facts of a run that rules depend on.

    They describe a full copy of the model on one device, with one sequence per pass and no recomputation, and the
    available devices and sequences.
    """

    parameters: int
    """Parameters of the model, including all experts."""
    layers: int
    experts: bool
    sequences: int
    """Sequences of a step."""
    ranks: int
    domain: int
    """Devices that fast links connect."""
    memory_bytes: float
    """Memory of a device."""
    state: Mapping[str, float]
    """Bytes of a copy: parameters, gradients, optimizer."""
    activation_bytes: float
    """Activations of one sequence, including logits."""
    recomputed_bytes: float
    """Activations of one sequence, including logits, if blocks are recomputed."""
    layer_bytes: float
    """State and activations of the largest block."""
    fits_one_device: bool
    """True if the planner predicts that a copy fits one device, with recomputation if necessary."""
    fits_with_zb_h2: bool = False
    """True if the fastest 1F1B pipeline leaves memory for ZB-H2's activations, almost twice as many."""

    @property
    def state_bytes(self) -> float:
        """State bytes of a copy."""
        return sum(self.state.values())

    @property
    def step_activation_bytes(self) -> float:
        """Activations of all sequences of a step."""
        return self.sequences * self.activation_bytes

    @property
    def largest(self) -> str:
        """Largest part of a copy."""
        parts = {**self.state, "activations": self.activation_bytes}
        return max(parts, key=lambda part: parts[part])


Requirement = str | tuple[str, ...]
"""Allowed names of a field; or the range of a degree, such as "1", "at least 2" or "at most the domain" of fast links.
"""


@dataclass(frozen=True)
class RuleOfThumb:
    """One rule of thumb."""

    kind: Kind
    name: str
    recommendation: str
    requirements: Mapping[str, Requirement]
    """Requirements on the planner's layouts, by field or product of fields such as "tp x cp"."""
    source: str
    applies: Callable[[RunSituation], bool]
    evidence: Callable[[RunSituation], str]
    """Returns why the rule applies, where it does."""
    unplanned_part: str = ""
    """Parts of the rule about options that the planner does not have, and the reason."""

    def is_satisfied_by(self, candidate: CandidateLayout, domain: int) -> bool:
        """Return whether a layout satisfies the rule, with `domain` devices in the domain of fast links."""
        return all(
            getattr(candidate, field) in requirement
            if isinstance(requirement, tuple)
            else is_in_range(prod(getattr(candidate, axis) for axis in field.split(" x ")), requirement, domain)
            for field, requirement in self.requirements.items()
        )

    @property
    def requirements_text(self) -> str:
        """Requirements of the rule as text."""
        texts = {
            field: requirement if isinstance(requirement, str) else " or ".join(requirement)
            for field, requirement in self.requirements.items()
        }
        return ", ".join(f"{field} {text}" for field, text in texts.items())


def is_in_range(degree: int, text: str, domain: int) -> bool:
    """Return whether a degree meets a requirement such as "at least 2"; fast links connect `domain` devices."""
    bound = domain if text.endswith("the domain") else int(text.split()[-1])
    lower, upper = (bound, inf) if text.startswith("at least") else (1 if text.startswith("at most") else bound, bound)
    return lower <= degree <= upper


TWO = "at least 2"
DATA_ONLY = {"tp": "1", "pp": "1", "cp": "1", "ep": "1"}
THREE_D = {"dp": TWO, "tp": TWO, "pp": TWO}
ZERO3_PIPELINE_NOTE = (
    "the planner has no ZeRO-3 in pipelines, where it stores and sends at least as much as ZeRO-1. It offloads only "
    "layouts that do not fit otherwise, because offload only saves memory"
)


def _size_rule(
    name: str,
    recommendation: str,
    requirements: Mapping[str, Requirement],
    source: str,
    *,
    billions: tuple[float, float],
    unplanned_part: str = "",
) -> RuleOfThumb:
    """Return a rule for models of a half-open range of billions of parameters, to which no guide assigns the bounds."""
    return RuleOfThumb(
        "size",
        name,
        recommendation,
        requirements,
        no_paper(source),
        applies=lambda s: billions[0] <= s.parameters / BILLION < billions[1],
        evidence=lambda s: f"the model has {s.parameters / 1e9:.3g}B parameters",
        unplanned_part=unplanned_part,
    )


SIZE_RULES = (
    _size_rule(
        "fewer than 1B parameters",
        "data parallelism (DDP)",
        {"data_parallel": ("ddp",), **DATA_ONLY},
        DDP,
        billions=(0, 1),
    ),
    _size_rule(
        "1B to 10B parameters",
        "data parallelism with ZeRO-2",
        {"data_parallel": ("zero2",), **DATA_ONLY},
        ZERO,
        billions=(1, 10),
    ),
    _size_rule(
        "10B to 100B parameters",
        "3D: data, tensor and pipeline parallelism",
        THREE_D,
        MEGATRON_ON_CLUSTERS,
        billions=(10, 100),
    ),
    _size_rule(
        "100B parameters or more",
        "3D with ZeRO-3 and offload to CPU or NVMe",
        THREE_D,
        OFFLOAD_TO_FILES,
        billions=(100, inf),
        unplanned_part=ZERO3_PIPELINE_NOTE,
    ),
)
RULES = (
    *SIZE_RULES,
    RuleOfThumb(
        "bottleneck",
        "activation memory",
        "data parallelism",
        {"dp": TWO},
        no_paper(DDP),
        applies=lambda s: s.ranks > 1 and s.state_bytes <= s.memory_bytes < s.state_bytes + s.step_activation_bytes,
        evidence=lambda s: (
            f"a step's {s.sequences} sequences have {format_gib(s.step_activation_bytes)} of activations, "
            f"but a device has {format_gib(s.memory_bytes)}"
        ),
    ),
    RuleOfThumb(
        "bottleneck",
        "parameter memory",
        "pipeline parallelism",
        {"pp": TWO},
        GPIPE,
        applies=lambda s: s.state_bytes > s.memory_bytes,
        evidence=lambda s: f"a copy's state takes {format_gib(s.state_bytes)} of {format_gib(s.memory_bytes)}",
    ),
    RuleOfThumb(
        "bottleneck",
        "a single layer too big",
        "add tensor parallelism",
        {"tp": TWO},
        MEGATRON,
        applies=lambda s: s.layer_bytes > s.memory_bytes,
        evidence=lambda s: f"one block takes {format_gib(s.layer_bytes)} of {format_gib(s.memory_bytes)}",
    ),
    RuleOfThumb(
        "bottleneck",
        "compute inside layers",
        "tensor parallelism on fast links",
        {"tp": TWO},
        SERVERS,
        applies=lambda s: s.domain > 1 and s.ranks > s.sequences,
        evidence=lambda s: f"{s.ranks} devices are more than the {s.sequences} sequences of a step",
    ),
    RuleOfThumb(
        "bottleneck",
        "more capacity at the same compute",
        "experts, and expert parallelism",
        {"ep": TWO},
        EXPERTS,
        applies=lambda s: s.experts and s.ranks > 1,
        evidence=lambda _: "the model has experts",
    ),
    RuleOfThumb(
        "bottleneck",
        "a large dataset",
        "data parallelism",
        {"dp": TWO},
        SCALE_OUT,
        applies=lambda s: 1 < s.ranks <= s.sequences,
        evidence=lambda s: f"a step has {s.sequences} sequences",
    ),
    RuleOfThumb(
        "bottleneck",
        "optimizer state",
        "ZeRO or FSDP",
        {"data_parallel": SHARDED_STRATEGIES},
        ZERO,
        applies=lambda s: s.ranks > 1 and s.largest == "optimizer",
        evidence=lambda s: f"optimizer state is the largest part of a copy, {format_gib(s.state['optimizer'])}",
    ),
    RuleOfThumb(
        "bottleneck",
        "state that ranks can share",
        "ZeRO and recomputation before model parallelism",
        {"data_parallel": SHARDED_STRATEGIES, "tp": "1", "pp": "1"},
        f"{ZERO}; {CHECKPOINTING}",
        applies=lambda s: (
            not s.fits_one_device and s.ranks > 1 and s.state_bytes / s.ranks + s.recomputed_bytes <= s.memory_bytes
        ),
        evidence=lambda s: (
            f"a copy does not fit one device, but its state sharded over {s.ranks} does: "
            f"{format_gib(s.state_bytes / s.ranks)}"
        ),
    ),
    RuleOfThumb(
        "bottleneck",
        "activations of a sequence",
        "recompute",
        {"activation_checkpointing": ("norms", "selective", "full", "offload")},
        f"{CHECKPOINTING}; {SEQUENCE_PARALLELISM}",
        applies=lambda s: s.largest == "activations",
        evidence=lambda s: (
            f"activations of one sequence are the largest part, {format_gib(s.activation_bytes)} "
            f"(sqrt(L): {optimal_num_checkpoints(s.layers)} checkpoints of {s.layers} layers; "
            "Phalanx saves every block's input)"
        ),
    ),
    RuleOfThumb(
        "bottleneck",
        "long context",
        "sequence parallelism, with tensor parallelism",
        {"tp": TWO},
        SEQUENCE_PARALLELISM,
        applies=lambda s: s.largest == "activations" and s.ranks > 1,
        evidence=lambda s: f"activations of one sequence are the largest part, {format_gib(s.activation_bytes)}",
    ),
    RuleOfThumb(
        "schedule",
        "a copy fits one device",
        "no pipeline; DP or ZeRO",
        {"pp": "1"},
        SCALE_OUT,
        applies=lambda s: s.fits_one_device,
        evidence=lambda _: "a copy fits one device",
    ),
    RuleOfThumb(
        "schedule",
        "it does not fit, memory to spare",
        "ZB-H2",
        {"pp": TWO, "schedule": ("zb-h2",)},
        ZERO_BUBBLE,
        applies=lambda s: s.fits_with_zb_h2 and not s.fits_one_device,
        evidence=lambda _: "a copy does not fit; the fastest 1F1B pipeline leaves memory for ZB-H2",
    ),
    RuleOfThumb(
        "schedule",
        "it does not fit, memory tight",
        "ZB-H1 or 1F1B",
        {"pp": TWO, "schedule": ("zb-h1", "1f1b")},
        ZERO_BUBBLE,
        applies=lambda s: s.ranks > 1 and not s.fits_with_zb_h2 and not s.fits_one_device,
        evidence=lambda _: "a copy does not fit, and the fastest 1F1B pipeline leaves too little memory for ZB-H2",
    ),
    RuleOfThumb(
        "schedule",
        "the smallest structure that fits",
        "DDP, where it fits",
        {"data_parallel": ("ddp",), **DATA_ONLY},
        SCALE_OUT,
        applies=lambda s: s.fits_one_device,
        evidence=lambda _: "a copy fits one device",
    ),
    RuleOfThumb(
        "placement",
        "tensor parallelism",
        "inside the domain of fast links",
        {"tp": "at most the domain"},
        SERVERS,
        applies=lambda s: s.ranks > 1,
        evidence=lambda s: f"{s.ranks} devices",
    ),
    RuleOfThumb(
        "placement",
        "pipeline",
        "between nodes",
        {"pp": TWO, "tp x cp": "at least the domain"},
        SERVERS,
        applies=lambda s: s.ranks > s.domain and not s.fits_one_device,
        evidence=lambda s: f"a copy does not fit, and {s.ranks} devices form several domains of {s.domain}",
    ),
    RuleOfThumb(
        "placement",
        "data parallelism",
        "outermost, one exchange in a step",
        {},
        MEGATRON_ON_CLUSTERS,
        applies=lambda s: s.ranks > 1,
        evidence=lambda _: (
            "the default of layout.rank_order; with pipelines outermost, the ranks of a node send to other nodes "
            "together"
        ),
    ),
    RuleOfThumb(
        "placement",
        "expert parallelism",
        "inside the domain of fast links",
        {"ep x tp": "at most the domain"},
        MEGATRON_MOE,
        applies=lambda s: s.experts and s.ranks > 1,
        evidence=lambda _: "the model has experts",
    ),
)
