"""Conditions of rules of thumb: each returns the evidence that it is true for a run, or ""."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.cost.formulas.activation_checkpointing import optimal_num_checkpoints
from phalanx.spec.formatting import format_gib


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
    def largest(self) -> str:
        """Largest part of a copy."""
        parts = {**self.state, "activations": self.activation_bytes}
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True)
class DegreeRange:
    """Range of a degree, or of a product of degrees, that a rule requires."""

    lower_bound: int | Literal["domain"] = 1
    upper_bound: int | Literal["domain"] | None = None

    def contains(self, value: int, domain: int) -> bool:
        """Return whether `value` is in the range, with `domain` devices in the domain of fast links."""
        min_degree = domain if self.lower_bound == "domain" else self.lower_bound
        max_degree = domain if self.upper_bound == "domain" else self.upper_bound
        return value >= min_degree and (max_degree is None or value <= max_degree)

    def __str__(self) -> str:
        if self.lower_bound == self.upper_bound:
            return str(self.lower_bound)
        if self.upper_bound is not None:
            return f"at most {'the ' if self.upper_bound == 'domain' else ''}{self.upper_bound}"
        return f"at least {'the ' if self.lower_bound == 'domain' else ''}{self.lower_bound}"


Requirements = Mapping[str, DegreeRange | tuple[str, ...]]
"""Partial layout: required degrees or names, by field or product of fields such as "tp x cp"."""


ONE = DegreeRange(1, 1)
AT_LEAST_TWO = DegreeRange(2)
WITHIN_DOMAIN = DegreeRange(1, "domain")


DATA_ONLY: Requirements = {"tp": ONE, "pp": ONE, "cp": ONE, "ep": ONE}


THREE_D: Requirements = {"dp": AT_LEAST_TWO, "tp": AT_LEAST_TWO, "pp": AT_LEAST_TWO}


BILLION = 10**9


def has_parameters_between(at_least: int, below: int | None) -> Callable[[RunSituation], str]:
    """Return the condition that the model has at least `at_least` and fewer than `below` parameters.

    The guide does not assign the boundaries to a class.
    """

    def applies(s: RunSituation) -> str:
        is_between = s.parameters >= at_least and (below is None or s.parameters < below)
        return f"the model has {s.parameters / 1e9:.3g}B parameters" if is_between else ""

    return applies


def activations_exceed_device(s: RunSituation) -> str:
    """Return the evidence that the state fits a device but not with a step's activations, or ""."""
    step_activations = s.sequences * s.activation_bytes
    if s.ranks == 1 or not s.state_bytes <= s.memory_bytes < s.state_bytes + step_activations:
        return ""
    activations = f"a step's {s.sequences} sequences have {format_gib(step_activations)} of activations"
    return f"{activations}, but a device has {device_memory(s)}"


def state_exceeds_device(s: RunSituation) -> str:
    """Return the evidence that the state of a copy exceeds a device's memory, or ""."""
    return (
        f"a copy's state takes {format_gib(s.state_bytes)} of {device_memory(s)}"
        if s.state_bytes > s.memory_bytes
        else ""
    )


def block_exceeds_device(s: RunSituation) -> str:
    """Return the evidence that one block exceeds a device's memory, or ""."""
    return (
        f"one block takes {format_gib(s.layer_bytes)} of {device_memory(s)}" if s.layer_bytes > s.memory_bytes else ""
    )


def has_fewer_sequences_than_ranks(s: RunSituation) -> str:
    """Return the evidence that a step has fewer sequences than ranks, or ""."""
    few = s.domain > 1 and s.ranks > s.sequences
    return f"{s.ranks} devices are more than the {s.sequences} sequences of a step" if few else ""


def has_experts(s: RunSituation) -> str:
    """Return the evidence that the model has experts, or ""."""
    return "the model has experts" if s.experts and s.ranks > 1 else ""


def has_sequences_for_all_ranks(s: RunSituation) -> str:
    """Return the evidence that a step has sequences for all ranks, or ""."""
    return f"a step has {s.sequences} sequences" if 1 < s.ranks <= s.sequences else ""


def optimizer_state_is_largest(s: RunSituation) -> str:
    """Return the evidence that optimizer state is the largest part of a copy, or ""."""
    is_largest = s.ranks > 1 and s.largest == "optimizer"
    return f"optimizer state is the largest part of a copy, {format_gib(s.state['optimizer'])}" if is_largest else ""


def sharded_state_fits(s: RunSituation) -> str:
    """Return the evidence that the sharded state of a copy fits, but not a full copy, or ""."""
    share = s.state_bytes / s.ranks
    fits = not s.fits_one_device and s.ranks > 1 and share + s.recomputed_bytes <= s.memory_bytes
    return (
        f"a copy does not fit one device, but its state sharded over {s.ranks} does: {format_gib(share)}"
        if fits
        else ""
    )


def activations_are_largest(s: RunSituation) -> str:
    """Return the evidence that activations are the largest part of a copy, or ""."""
    evidence = f"activations of one sequence are the largest part, {format_gib(s.activation_bytes)}"
    rule = (
        f"sqrt(L): {optimal_num_checkpoints(s.layers)} checkpoints of {s.layers} layers; "
        "Phalanx saves every block's input"
    )
    return f"{evidence} ({rule})" if s.largest == "activations" else ""


def activations_are_largest_on_many_ranks(s: RunSituation) -> str:
    """Return the evidence that activations are the largest part of a copy on several ranks, or ""."""
    is_largest = s.largest == "activations" and s.ranks > 1
    return f"activations of one sequence are the largest part, {format_gib(s.activation_bytes)}" if is_largest else ""


def copy_fits_device(s: RunSituation) -> str:
    """Return the evidence that a copy fits one device, or ""."""
    return "a copy fits one device" if s.fits_one_device else ""


def has_memory_for_zb_h2(s: RunSituation) -> str:
    """Return the evidence that a pipeline with ZB-H2 fits, or ""."""
    return (
        "a copy does not fit; the fastest 1F1B pipeline leaves memory for ZB-H2"
        if s.fits_with_zb_h2 and not s.fits_one_device
        else ""
    )


def lacks_memory_for_zb_h2(s: RunSituation) -> str:
    """Return the evidence that a pipeline with ZB-H2 does not fit, or ""."""
    tight = s.ranks > 1 and not s.fits_with_zb_h2 and not s.fits_one_device
    return "a copy does not fit, and the fastest 1F1B pipeline leaves too little memory for ZB-H2" if tight else ""


def has_many_ranks(s: RunSituation) -> str:
    """Return the evidence that there are several ranks, or ""."""
    return f"{s.ranks} devices" if s.ranks > 1 else ""


def data_parallel_is_outer(s: RunSituation) -> str:
    """Return the evidence that data parallelism is outermost by default, or ""."""
    evidence = (
        "the default of layout.rank_order; with pipelines outermost, the ranks of a node send to other nodes together"
    )
    return evidence if s.ranks > 1 else ""


def copy_spans_fast_link_domains(s: RunSituation) -> str:
    """Return the evidence that a copy needs several domains of fast links, or ""."""
    between = s.ranks > s.domain and not s.fits_one_device
    return f"a copy does not fit, and {s.ranks} devices form several domains of {s.domain}" if between else ""


def device_memory(s: RunSituation) -> str:
    """Return the memory of a device as text."""
    return format_gib(s.memory_bytes)
