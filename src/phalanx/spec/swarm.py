"""Description of training over slow links: which node trains what, and how updates are combined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from phalanx.spec.base import Spec
from phalanx.spec.components import named_components
from phalanx.spec.errors import UserError
from phalanx.spec.parts.model import carried_tensors

if TYPE_CHECKING:
    from phalanx.spec.run import RunSpec

Codec = Literal["fp32", "bf16", "int8", "int4"]
"""Encoding of numbers: fp32, 16 bits, or 8 or 4 bits with an fp32 scale for each block."""
Method = Literal["ddp", "fedavg", "diloco", "spes", "spes+"]
CODEC_BLOCK_SIZE = 256
"""Numbers per scale."""
EXPERT_SPLIT_METHODS: tuple[Method, ...] = ("spes", "spes+")
"""Methods in which a node trains some of the experts."""


class OuterOptimizerSpec(Spec):
    """Outer optimizer, applied to the mean update of the nodes (DiLoCo, arXiv 2311.08105)."""

    learning_rate: float = Field(1.0, gt=0)
    """Learning rate for pseudo-gradients; 1 without momentum applies the mean unchanged."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Nesterov momentum."""


class ExpertMergeSpec(Spec):
    """Expert-merging warm-up of SPES (arXiv 2602.11543): each expert moves towards its most similar ones."""

    every: int = Field(0, ge=0)
    """Steps between mergings, a multiple of swarm.every; 0 disables merging."""
    alpha: float = Field(0.05, ge=0, le=1)
    """Initial fraction of the distance by which an expert moves; it decreases linearly."""
    steps: int = Field(10_000, gt=0)
    """Step after which experts are not merged any more."""
    nearest: int = Field(4, gt=0)
    """Number of similar experts that an expert moves towards."""


class BalanceSpec(Spec):
    """Decayed auxiliary loss of SPES (in its authors' code; off in their runs).

    At first, the router of a node may prefer the experts that the node trains.
    """

    local_expert_weight: float = Field(1.0, ge=0, le=1)
    """Initial weight in the balance loss of a token that selected an expert of this node (SPES: 0.7); 1 is off."""
    fraction: float = Field(0.2, gt=0, le=1)
    """Share of the steps in which the weight rises linearly to 1."""

    def ratio(self, step: int, steps: int) -> float:
        """Return the weight in the step after `step` of `steps` steps."""
        return 1 - (1 - self.local_expert_weight) * max(0.0, 1 - step / (self.fraction * steps))


class RoundSpec(Spec):
    """Time limits of a round."""

    quorum: float = Field(0.5, gt=0, le=1)
    """Minimum share of nodes whose updates are required to close a round."""
    timeout_multiplier: float = Field(3.0, ge=0)
    """Delay of closing after the median arrival with a quorum, as a multiple of the arrivals' median deviation."""
    grace_seconds: float = Field(20.0, ge=0)
    """Minimum of this delay after the median arrival, in seconds."""
    lease_seconds: float = Field(60.0, gt=0)
    """Seconds without contact after which a node counts as lost. Its experts are reassigned."""


class SwarmSpec(Spec):
    """Joint training of one model by nodes that slow links join."""

    method: Method = "spes+"
    """Method. fedavg: averaged weights (arXiv 1602.05629). diloco: averaged updates with an outer optimizer (arXiv
    2311.08105). spes: each node trains some experts of a mixture of experts (arXiv 2602.11543), as in its authors'
    code. spes+: as spes, but nodes send compressed changes and receive only the parts they lack. ddp: gradients,
    averaged at every step by a coordinator that runs the optimizer, so that nodes have no optimizer state."""
    nodes: int = Field(2, gt=0)
    """Nodes that must have joined before the first round."""
    every: int = Field(100, gt=0)
    """Local steps of a node between two exchanges (H)."""
    codec: Codec | None = Field(None, examples=["int8"])
    """Encoding of sent numbers. By default int8 for spes+, else fp32. With fp32 nodes send weights, else changes."""
    frozen_expert_codec: Literal["fp32", "bf16", "int8"] = "fp32"
    """Encoding of experts on nodes that do not train them (spes, spes+)."""
    replication: int = Field(1, gt=0)
    """Nodes that train each expert (spes, spes+). Their results are averaged."""
    rotate_every: int = Field(0, ge=0)
    """Rounds after which each node's experts move to the next node (spes, spes+); 0: never."""
    fragments: int = Field(1, gt=0)
    """Fragments of the model that are exchanged in turn, each after `every` steps (Streaming DiLoCo, arXiv 2501.18512).
    """
    delay: int = Field(0, ge=0)
    """Local steps that a node takes during the exchange of its update, before it applies the result."""
    mixing: float | None = Field(None, ge=0, lt=1)
    """Weight of a node's own weights when it applies the result after `delay` steps (Streaming DiLoCo). By default it
    applies the new weights plus its local changes since (CoCoD-SGD, arXiv 1906.12043), if its update was accepted and
    its experts are unchanged; otherwise only the new weights."""
    outer: OuterOptimizerSpec | None = None
    """Outer optimizer. By default the mean is applied unchanged; for diloco, learning rate 0.7 and momentum 0.9."""
    merge: ExpertMergeSpec = ExpertMergeSpec()
    """Merging of experts at the start of training (spes, spes+)."""
    balance: BalanceSpec = BalanceSpec()
    """Reduced balance loss for a node's own experts at the start of training (spes, spes+)."""
    round: RoundSpec = RoundSpec()
    """Time limits of a round."""
    robust: Literal["none", "trimmed"] = "none"
    """Robust aggregation. trimmed: the mean of shared values excludes the maximum and the minimum of every number
    (arXiv 1803.01498), which bounds the effect of a malicious node. Needs at least three nodes."""
    outlier: float = Field(20.0, ge=0)
    """Ratio of the size of an update to the median of the other nodes', from which it is rejected; 0: never."""

    @property
    def effective_codec(self) -> Codec:
        """Effective encoding of sent numbers."""
        return self.codec or ("int8" if self.method == "spes+" else "fp32")

    @property
    def outer_optimizer(self) -> OuterOptimizerSpec:
        """Effective outer optimizer."""
        nesterov = OuterOptimizerSpec(learning_rate=0.7, momentum=0.9)
        return self.outer or (nesterov if self.method == "diloco" else OuterOptimizerSpec())

    @property
    def sends_gradients(self) -> bool:
        """True if nodes send gradients and the coordinator runs the optimizer."""
        return self.method == "ddp"

    @property
    def steps_per_round(self) -> int:
        """Local steps per round; each round exchanges one fragment."""
        return self.every // self.fragments

    @model_validator(mode="after")
    def _check_method_options(self) -> SwarmSpec:
        if self.sends_gradients and self.every != 1:
            problem = "must be 1 for ddp, which exchanges gradients after every step"
            raise UserError("every", self.every, problem, 'set swarm.every = 1, or swarm.method = "fedavg"')
        if self.sends_gradients and self.outer is not None:
            problem = "cannot be combined with ddp, whose coordinator runs the optimizer of the run"
            raise UserError("outer", "set", problem, "remove it, and set the optimizer in [optimizer]")
        if self.every % self.fragments:
            problem = f"does not divide swarm.every ({self.every})"
            raise UserError("fragments", self.fragments, problem, "use a divisor of swarm.every")
        if self.delay >= self.steps_per_round:
            problem = f"must be less than the {self.steps_per_round} steps of a round"
            raise UserError("delay", self.delay, problem, f"use at most {self.steps_per_round - 1}")
        if self.mixing is not None and self.delay == 0:
            problem = "cannot be combined with swarm.delay = 0, because nodes do not train during the exchange"
            raise UserError("mixing", self.mixing, problem, "set swarm.delay to at least 1, or remove swarm.mixing")
        if self.merge.every % self.every:
            problem = f"is not a multiple of swarm.every ({self.every}), after which experts are exchanged"
            raise UserError("merge.every", self.merge.every, problem, f"use a multiple of {self.every}")
        splits_experts = self.method in EXPERT_SPLIT_METHODS
        for field, is_set in {
            "replication": self.replication > 1,
            "rotate_every": self.rotate_every > 0,
            "frozen_expert_codec": self.frozen_expert_codec != "fp32",
            "merge.every": self.merge.every > 0,
            "balance.local_expert_weight": self.balance.local_expert_weight < 1,
        }.items():
            if not splits_experts and is_set:
                problem = f"cannot be combined with {self.method}, whose nodes train all experts"
                raise UserError(field, "set", problem, 'remove it, or set method = "spes+"')
        return self


def check_swarm_run(run: RunSpec, swarm: SwarmSpec) -> None:
    """Raise UserError for fields of a run that swarm nodes do not support."""
    moe = run.model.moe
    training = run.training
    layout = run.layout
    for field in ("in_memory_checkpoint_every", "max_rollbacks"):
        if getattr(run.recovery, field):
            problem = "is not supported in a swarm, whose nodes resume from the coordinator's last round"
            raise UserError(f"recovery.{field}", getattr(run.recovery, field), problem, f"set recovery.{field} = 0")
    if moe is None and swarm.method in EXPERT_SPLIT_METHODS:
        problem = "distributes experts over nodes, but the model has no experts"
        raise UserError("swarm.method", swarm.method, problem, 'set model.moe, or swarm.method = "diloco"')
    if moe is not None and moe.bias and swarm.method in EXPERT_SPLIT_METHODS:
        problem = "is not supported for experts that are distributed over nodes"
        raise UserError("model.moe.bias", True, problem, 'set it to false, or swarm.method = "diloco"')
    if moe is not None and moe.has_choice_bias:
        field = "bias_update_rate" if moe.bias_update_rate else "choice_bias"
        problem = "is not supported in a swarm, because nodes do not exchange the router's biases"
        raise UserError(f"model.moe.{field}", getattr(moe, field), problem, "remove it")
    if carried_tensors(run.model):
        problem = "is not supported in a swarm, because nodes do not exchange its tensors"
        field = "model.indexer" if run.model.indexer else "model.mixer.indexer"
        raise UserError(field, None, problem, "remove it")
    if swarm.sends_gradients and run.optimizer.name != "adamw":
        problem = 'is not supported with swarm.method = "ddp", whose coordinator runs AdamW'
        fix = 'set optimizer.name = "adamw", or swarm.method = "fedavg"'
        raise UserError("optimizer.name", run.optimizer.name, problem, fix)
    if swarm.sends_gradients and training.batch_scaling != "keep":
        problem = 'is not supported with swarm.method = "ddp", whose coordinator runs the optimizer for all nodes'
        fix = 'set training.batch_scaling = "keep", and set the learning rates for the batch of all nodes'
        raise UserError("training.batch_scaling", training.batch_scaling, problem, fix)
    if swarm.method in EXPERT_SPLIT_METHODS and layout.ep != 1 and layout.data_parallel != "ddp":
        problem = f"cannot be combined with layout.ep = {layout.ep} in a swarm, in which ranks may train no expert"
        fix = 'set layout.data_parallel = "ddp", or layout.ep = 1'
        raise UserError("layout.data_parallel", layout.data_parallel, problem, fix)
    if layout.data_parallel == "parameter_server":
        problem = "is not supported inside a node of a swarm"
        raise UserError("layout.data_parallel", layout.data_parallel, problem, "use ddp or a ZeRO stage")
    if not training.has_decided_steps:
        problem = "is not supported in a swarm, whose rounds require a fixed number of steps"
        raise UserError(*training.length_field, problem, "set training.steps instead")
    for field, component in named_components(run):
        raise UserError(field, component.class_path, "is not supported in a swarm", f"remove {field}")
    if training.auto_precision:
        problem = "may select a different precision on each node"
        raise UserError("training.precision", "auto", problem, 'use "bf16" or "fp32"')
    if training.precision == "fp8":
        raise UserError("training.precision", "fp8", "is not supported in a swarm yet", 'use "bf16" or "fp32"')
    if training.steps % swarm.steps_per_round:
        problem = f"is not a multiple of the {swarm.steps_per_round} steps of a round"
        fix = f"use {-(-training.steps // swarm.steps_per_round) * swarm.steps_per_round}"
        raise UserError("training.steps", training.steps, problem, fix)
    if run.data.streaming:
        problem = "is not supported in a swarm, because every node would read the same text"
        raise UserError("data.streaming", True, problem, "set data.streaming = false")
    if run.evaluation.stop_after:
        problem = "is not supported in a swarm, whose nodes do not evaluate between rounds"
        raise UserError("evaluation.stop_after", run.evaluation.stop_after, problem, "set evaluation.stop_after = 0")
    if run.data.source:
        names = [source.name for source in run.data.source]
        raise UserError("data.source", names, "is not supported in a swarm yet", "use data.train")
