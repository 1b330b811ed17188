"""Published rules of thumb for choosing a layout, as data: when each applies, and which layouts obey it.

They are quoted, not endorsed: `plan.advise` holds each against the planner. GiB is 2**30 bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from phalanx.cost.formulas.activation_checkpointing import optimal_num_checkpoints
from phalanx.plan.search.candidates import CandidateLayout
from phalanx.spec.formatting import format_gib
from phalanx.spec.layout import SHARDED_STRATEGIES

SIZES = "pos2001/ml-training-architecture, decision guide"
PIPELINES, HYBRIDS = "jesamkim part 3, decision guide", "jesamkim part 4, decision guide"
MEMORY, RECOMPUTE = "Jae's Tech Blog part 06", "Jae's Tech Blog part 13"
STAGES, ORDER, LONG = "Jae's Tech Blog part 14", "Jae's Tech Blog part 20", "Jae's Tech Blog part 10"
NOTES = "notes on a network engineer's book, week 3"
Kind = Literal["size", "bottleneck", "schedule", "placement"]


@dataclass(frozen=True)
class RunSituation:
    """What rules look at: a whole copy of the model on one device, with one sequence in a pass and nothing computed
    again, and what there is to share it."""

    parameters: int
    """Of the model, all experts counted."""
    layers: int
    experts: bool
    sequences: int
    """Of a step."""
    ranks: int
    domain: int
    """Devices that fast links join."""
    memory_bytes: float
    """Of a device."""
    state: Mapping[str, float]
    """Bytes of a copy: parameters, gradients, optimizer."""
    activation_bytes: float
    """Of one sequence, logits among them."""
    recomputed_bytes: float
    """The same, where whole blocks are computed again."""
    layer_bytes: float
    """State and activations of the largest block."""
    alone: bool
    """Whether the planner says that a copy fits one device, recomputed if need be."""
    spare: bool = False
    """Whether the fastest 1F1B pipeline leaves memory for ZB-H2's activations, nearly twice as many."""

    @property
    def state_bytes(self) -> float:
        """Of a copy."""
        return sum(self.state.values())

    @property
    def largest(self) -> str:
        """The part of a copy that takes most."""
        parts = {**self.state, "activations": self.activation_bytes}
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True)
class DegreeRange:
    """What a rule asks of a degree, or of a product of them."""

    least: int | Literal["domain"] = 1
    most: int | Literal["domain"] | None = None

    def holds(self, value: int, domain: int) -> bool:
        """Whether a value obeys it, with so many devices in the domain of fast links."""
        least = domain if self.least == "domain" else self.least
        most = domain if self.most == "domain" else self.most
        return value >= least and (most is None or value <= most)

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.least)
        if self.most is not None:
            return f"at most {'the ' if self.most == 'domain' else ''}{self.most}"
        return f"at least {'the ' if self.least == 'domain' else ''}{self.least}"


Requirements = Mapping[str, DegreeRange | tuple[str, ...]]
"""A partial layout: of a field, or of a product such as "tp x cp", the degree or the names that are asked for."""


@dataclass(frozen=True)
class RuleOfThumb:
    """One rule of thumb."""

    kind: Kind
    name: str
    says: str
    wants: Requirements
    """What it asks of the planner's layouts."""
    applies: Callable[[RunSituation], str]
    """Why it applies; empty where it does not."""
    source: str
    beyond: str = ""
    """What it says besides, which the planner does not choose among, and why not."""

    def is_satisfied_by(self, candidate: CandidateLayout, domain: int) -> bool:
        """Whether a layout does what the rule asks."""
        return all(_holds(candidate, field, wanted, domain) for field, wanted in self.wants.items())

    @property
    def partial(self) -> str:
        """What it asks, as text."""
        said = {field: " or ".join(w) if isinstance(w, tuple) else str(w) for field, w in self.wants.items()}
        return ", ".join(f"{field} {text}" for field, text in said.items())


def _holds(candidate: CandidateLayout, field: str, wanted: DegreeRange | tuple[str, ...], domain: int) -> bool:
    if isinstance(wanted, tuple):
        return getattr(candidate, field) in wanted
    return wanted.holds(prod(getattr(candidate, axis) for axis in field.split(" x ")), domain)


ONE, SOME, INSIDE = DegreeRange(1, 1), DegreeRange(2), DegreeRange(1, "domain")
DATA_ONLY: Requirements = {"tp": ONE, "pp": ONE, "cp": ONE, "ep": ONE}
THREE_D: Requirements = {"dp": SOME, "tp": SOME, "pp": SOME}
BILLION = 10**9


def _size(least: int, below: int | None) -> Callable[[RunSituation], str]:
    """For models of `least` parameters or more, and fewer than `below`: the guide leaves open who is at a boundary."""

    def applies(s: RunSituation) -> str:
        inside = s.parameters >= least and (below is None or s.parameters < below)
        return f"the model has {s.parameters / 1e9:.3g}B parameters" if inside else ""

    return applies


def _activations(s: RunSituation) -> str:
    whole = s.sequences * s.activation_bytes
    if s.ranks == 1 or not s.state_bytes <= s.memory_bytes < s.state_bytes + whole:
        return ""
    return f"a step's {s.sequences} sequences leave {format_gib(whole)} of activations, and a device has {_of(s)}"


def _parameters(s: RunSituation) -> str:
    return f"a copy's state takes {format_gib(s.state_bytes)} of {_of(s)}" if s.state_bytes > s.memory_bytes else ""


def _layer(s: RunSituation) -> str:
    return f"one block takes {format_gib(s.layer_bytes)} of {_of(s)}" if s.layer_bytes > s.memory_bytes else ""


def _few_sequences(s: RunSituation) -> str:
    few = s.domain > 1 and s.ranks > s.sequences
    return f"{s.ranks} devices are more than the {s.sequences} sequences of a step" if few else ""


def _experts(s: RunSituation) -> str:
    return "the model has experts" if s.experts and s.ranks > 1 else ""


def _many_sequences(s: RunSituation) -> str:
    return f"a step has {s.sequences} sequences" if 1 < s.ranks <= s.sequences else ""


def _optimizer(s: RunSituation) -> str:
    most = s.ranks > 1 and s.largest == "optimizer"
    return f"optimizer state takes most of a copy, {format_gib(s.state['optimizer'])}" if most else ""


def _shardable(s: RunSituation) -> str:
    share = s.state_bytes / s.ranks
    fits = not s.alone and s.ranks > 1 and share + s.recomputed_bytes <= s.memory_bytes
    return (
        f"a copy does not fit one device, and its state shared by {s.ranks} does: {format_gib(share)}" if fits else ""
    )


def _recompute(s: RunSituation) -> str:
    said = f"activations of one sequence take most, {format_gib(s.activation_bytes)}"
    rule = (
        f"sqrt(L): {optimal_num_checkpoints(s.layers)} checkpoints of {s.layers} layers; "
        "Phalanx keeps every block's input"
    )
    return f"{said} ({rule})" if s.largest == "activations" else ""


def _long(s: RunSituation) -> str:
    most = s.largest == "activations" and s.ranks > 1
    return f"activations of one sequence take most, {format_gib(s.activation_bytes)}" if most else ""


def _fits(s: RunSituation) -> str:
    return "a copy fits one device" if s.alone else ""


def _spare(s: RunSituation) -> str:
    return "a copy does not fit; the fastest 1F1B pipeline leaves memory for ZB-H2" if s.spare and not s.alone else ""


def _tight(s: RunSituation) -> str:
    tight = s.ranks > 1 and not s.spare and not s.alone
    return "a copy does not fit, and no memory is left for ZB-H2 beside the fastest 1F1B pipeline" if tight else ""


def _many(s: RunSituation) -> str:
    return f"{s.ranks} devices" if s.ranks > 1 else ""


def _outermost(s: RunSituation) -> str:
    said = "the default of layout.rank_order; with pipelines there the ranks of a node send to others together"
    return said if s.ranks > 1 else ""


def _several(s: RunSituation) -> str:
    between = s.ranks > s.domain and not s.alone
    return f"a copy does not fit, and {s.ranks} devices are several domains of {s.domain}" if between else ""


def _of(s: RunSituation) -> str:
    return format_gib(s.memory_bytes)


NOT_CHOSEN = (
    "ZeRO-3 in a pipeline is not among the planner's layouts: it keeps and sends what ZeRO-1 does or more. Offload "
    "is, of what does not fit without: it only saves memory"
)
BY_SIZE = (
    RuleOfThumb(
        "size",
        "fewer than 1B parameters",
        "data parallelism (DDP)",
        {"data_parallel": ("ddp",), **DATA_ONLY},
        _size(0, BILLION),
        SIZES,
    ),
    RuleOfThumb(
        "size",
        "1B to 10B parameters",
        "data parallelism with ZeRO-2",
        {"data_parallel": ("zero2",), **DATA_ONLY},
        _size(BILLION, 10 * BILLION),
        SIZES,
    ),
    RuleOfThumb(
        "size",
        "10B to 100B parameters",
        "3D: data, tensor and pipeline parallelism",
        THREE_D,
        _size(10 * BILLION, 100 * BILLION),
        SIZES,
    ),
    RuleOfThumb(
        "size",
        "100B parameters or more",
        "3D with ZeRO-3 and offload to CPU or NVMe",
        THREE_D,
        _size(100 * BILLION, None),
        SIZES,
        NOT_CHOSEN,
    ),
)
"""Half-open: a model of exactly 1B, 10B or 100B parameters belongs to the larger class."""
BY_BOTTLENECK = (
    RuleOfThumb("bottleneck", "activation memory", "data parallelism", {"dp": SOME}, _activations, HYBRIDS),
    RuleOfThumb("bottleneck", "parameter memory", "pipeline parallelism", {"pp": SOME}, _parameters, HYBRIDS),
    RuleOfThumb("bottleneck", "a single layer too big", "add tensor parallelism", {"tp": SOME}, _layer, HYBRIDS),
    RuleOfThumb(
        "bottleneck", "compute inside layers", "tensor parallelism on fast links", {"tp": SOME}, _few_sequences, HYBRIDS
    ),
    RuleOfThumb(
        "bottleneck",
        "more capacity at the same compute",
        "experts, and expert parallelism",
        {"ep": SOME},
        _experts,
        HYBRIDS,
    ),
    RuleOfThumb("bottleneck", "a large dataset", "data parallelism", {"dp": SOME}, _many_sequences, NOTES),
    RuleOfThumb(
        "bottleneck",
        "optimizer state",
        "ZeRO or FSDP",
        {"data_parallel": SHARDED_STRATEGIES},
        _optimizer,
        f"{NOTES}; {STAGES}",
    ),
    RuleOfThumb(
        "bottleneck",
        "state that ranks can share",
        "ZeRO and recomputation before model parallelism",
        {"data_parallel": SHARDED_STRATEGIES, "tp": ONE, "pp": ONE},
        _shardable,
        f"{MEMORY}; {ORDER}",
    ),
    RuleOfThumb(
        "bottleneck",
        "activations of a sequence",
        "recompute",
        {"recompute": ("selective", "full")},
        _recompute,
        f"{MEMORY}; {RECOMPUTE}",
    ),
    RuleOfThumb(
        "bottleneck", "long context", "sequence parallelism, with tensor parallelism", {"tp": SOME}, _long, LONG
    ),
)
BY_SCHEDULE = (
    RuleOfThumb("schedule", "a copy fits one device", "no pipeline; DP or ZeRO", {"pp": ONE}, _fits, PIPELINES),
    RuleOfThumb(
        "schedule", "it does not fit, memory to spare", "ZB-H2", {"pp": SOME, "schedule": ("zb-h2",)}, _spare, PIPELINES
    ),
    RuleOfThumb(
        "schedule",
        "it does not fit, memory tight",
        "ZB-H1 or 1F1B",
        {"pp": SOME, "schedule": ("zb-h1", "1f1b")},
        _tight,
        PIPELINES,
    ),
    RuleOfThumb(
        "schedule",
        "the smallest structure that fits",
        "DDP, where it fits",
        {"data_parallel": ("ddp",), **DATA_ONLY},
        _fits,
        ORDER,
    ),
)
BY_PLACEMENT = (
    RuleOfThumb(
        "placement",
        "tensor parallelism",
        "inside the domain of fast links",
        {"tp": INSIDE},
        _many,
        f"{HYBRIDS}; {NOTES}",
    ),
    RuleOfThumb(
        "placement", "pipeline", "between nodes", {"pp": SOME, "tp x cp": DegreeRange("domain")}, _several, HYBRIDS
    ),
    RuleOfThumb("placement", "data parallelism", "outermost, one exchange in a step", {}, _outermost, HYBRIDS),
    RuleOfThumb(
        "placement", "expert parallelism", "inside the domain of fast links", {"ep x tp": INSIDE}, _experts, NOTES
    ),
)
RULES = (*BY_SIZE, *BY_BOTTLENECK, *BY_SCHEDULE, *BY_PLACEMENT)
