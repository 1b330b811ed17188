"""Training over slow links, described: who trains what, and how nodes put together what they learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from phalanx.spec.base import Spec, require

if TYPE_CHECKING:
    from phalanx.spec.run import RunSpec

Codec = Literal["fp32", "bf16", "int8", "int4"]
"""How numbers are written: whole, in 16 bits, or in 8 or 4 with a scale (fp32) for each block of them."""
Method = Literal["ddp", "fedavg", "diloco", "spes", "spes+"]
CODEC_BLOCK_SIZE = 256
"""Numbers that share a scale."""
EXPERT_SPLIT_METHODS: tuple[Method, ...] = ("spes", "spes+")
"""Methods in which a node trains some of the experts."""


class OuterOptimizerSpec(Spec):
    """The outer optimizer: what becomes of the mean of what nodes learned (DiLoCo, arXiv 2311.08105)."""

    learning_rate: float = Field(1.0, gt=0)
    """Of pseudo-gradients; 1 without momentum takes the mean as it is."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Nesterov's."""


class ExpertMergeSpec(Spec):
    """The expert-merging warm-up of SPES (arXiv 2602.11543): each expert moves towards those most like it."""

    every: int = Field(0, ge=0)
    """Steps between two mergings, a multiple of swarm.every; 0 merges never."""
    alpha: float = Field(0.05, ge=0, le=1)
    """How much of the way it moves at first; less and less, in a line."""
    steps: int = Field(10_000, gt=0)
    """After which it moves no more."""
    nearest: int = Field(4, gt=0)
    """Experts that it moves towards."""


class BalanceSpec(Spec):
    """The decayed auxiliary loss of SPES (its authors' code; off in their runs): at first a node's router may use the
    experts more that the node trains."""

    local_expert_weight: float = Field(1.0, ge=0, le=1)
    """What a token that chose one of these counts for in the balance loss at first (theirs: 0.7); 1 is off."""
    fraction: float = Field(0.2, gt=0, le=1)
    """The part of the steps in which that rises to 1, in a line."""

    def ratio(self, step: int, steps: int) -> float:
        """What it counts for in the step after `step` of so many."""
        return 1 - (1 - self.local_expert_weight) * max(0.0, 1 - step / (self.fraction * steps))


class RoundSpec(Spec):
    """How long a round waits for nodes."""

    quorum: float = Field(0.5, gt=0, le=1)
    """The part of the nodes without whose updates it is not closed."""
    timeout_multiplier: float = Field(3.0, ge=0)
    """With a quorum it closes at the median of when updates come, and so many times their median deviation later,"""
    grace_seconds: float = Field(20.0, ge=0)
    """or this, whichever is more."""
    lease_seconds: float = Field(60.0, gt=0)
    """A node that is not heard of for so long is taken for gone: its experts are given to others."""


class SwarmSpec(Spec):
    """How nodes that slow links join learn one model together."""

    method: Method = "spes+"
    """fedavg: weights, averaged (arXiv 1602.05629). diloco: with an outer optimizer (arXiv 2311.08105). spes: of a
    mixture of experts each node trains some (arXiv 2602.11543), as its authors' code does it. spes+: the same, but
    nodes tell what changed, in few bits, and receive only what they do not have. ddp: gradients, averaged at every step
    by a coordinator that steps the run's optimizer, which nodes so do not hold."""
    nodes: int = Field(2, gt=0)
    """So many must have joined before the first round."""
    every: int = Field(100, gt=0)
    """Steps that a node learns by itself between two exchanges (H)."""
    codec: Codec | None = Field(None, examples=["int8"])
    """How numbers are sent; by default int8 for spes+, else fp32. In fp32 they are weights, else what changed."""
    frozen_expert_codec: Literal["fp32", "bf16", "int8"] = "fp32"
    """How experts rest on nodes that do not train them (spes, spes+)."""
    replication: int = Field(1, gt=0)
    """Nodes that train each expert (spes, spes+); what they make of it is averaged."""
    rotate_every: int = Field(0, ge=0)
    """Rounds after which each node's experts go to the next node (spes, spes+); 0: never."""
    fragments: int = Field(1, gt=0)
    """Parts of the model that are exchanged in turn, each after `every` steps (Streaming DiLoCo, arXiv 2501.18512)."""
    delay: int = Field(0, ge=0)
    """Steps that a node learns on while its update is under way, before it takes what came of it."""
    mixing: float | None = Field(None, ge=0, lt=1)
    """How much of its own weights is in those that it goes on with then (Streaming DiLoCo). By default it
    goes on with the new ones, and what it learned meanwhile added (CoCoD-SGD, arXiv 1906.12043), if its word counted
    and it trains the same experts again; else with the new ones alone."""
    outer: OuterOptimizerSpec | None = None
    """By default the mean is taken as it is; of diloco learning rate 0.7, momentum 0.9."""
    merge: ExpertMergeSpec = ExpertMergeSpec()
    """Drawing experts together at first (spes, spes+)."""
    balance: BalanceSpec = BalanceSpec()
    """Sparing a node's own experts the balance loss at first (spes, spes+)."""
    round: RoundSpec = RoundSpec()
    """How long it waits for nodes."""
    robust: Literal["none", "trimmed"] = "none"
    """trimmed: the mean of what nodes share leaves out the largest and the smallest of every number (arXiv 1803.01498),
    which bounds what a node that lies can do; of three nodes and more."""
    outlier: float = Field(20.0, ge=0)
    """An update so many times as large as those of the other nodes are in the median is refused; 0: none."""

    @property
    def effective_codec(self) -> Codec:
        """How numbers are sent."""
        return self.codec or ("int8" if self.method == "spes+" else "fp32")

    @property
    def outer_optimizer(self) -> OuterOptimizerSpec:
        """The one that there is."""
        nesterov = OuterOptimizerSpec(learning_rate=0.7, momentum=0.9)
        return self.outer or (nesterov if self.method == "diloco" else OuterOptimizerSpec())

    @property
    def sends_gradients(self) -> bool:
        """Whether nodes tell gradients, and the coordinator steps."""
        return self.method == "ddp"

    @property
    def steps_per_round(self) -> int:
        """Of a round: in each a fragment is exchanged."""
        return self.every // self.fragments

    @model_validator(mode="after")
    def _check(self) -> SwarmSpec:
        require(
            not self.sends_gradients or self.every == 1,
            "every",
            self.every,
            problem="is not 1: ddp exchanges gradients after every step",
            fix='set it to 1, or method = "fedavg"',
        )
        require(
            not self.sends_gradients or self.outer is None,
            "outer",
            "set",
            problem="has no meaning for ddp, whose coordinator steps the run's own optimizer",
            fix="remove it; see [optimizer]",
        )
        require(
            self.every % self.fragments == 0,
            "fragments",
            self.fragments,
            problem=f"does not divide every ({self.every})",
            fix="exchange each fragment after as many steps",
        )
        require(
            self.delay < self.steps_per_round,
            "delay",
            self.delay,
            problem=f"is not less than the {self.steps_per_round} steps of a round",
            fix="lower it: an update is taken before the next is told",
        )
        require(
            self.mixing is None or self.delay > 0,
            "mixing",
            self.mixing,
            problem="has no meaning without delay: nothing is learned meanwhile",
            fix="set delay, or remove it",
        )
        require(
            self.merge.every % self.every == 0,
            "merge.every",
            self.merge.every,
            problem=f"is no multiple of every ({self.every}), at which experts come together",
            fix=f"use {self.every}",
        )
        splits_experts = self.method in EXPERT_SPLIT_METHODS
        for field, is_set in {
            "replication": self.replication > 1,
            "rotate_every": self.rotate_every > 0,
            "frozen_expert_codec": self.frozen_expert_codec != "fp32",
            "merge.every": self.merge.every > 0,
            "balance.local_expert_weight": self.balance.local_expert_weight < 1,
        }.items():
            require(
                splits_experts or not is_set,
                field,
                "set",
                problem=f"has no meaning for {self.method}, whose nodes train all experts",
                fix='remove it, or set method = "spes+"',
            )
        return self


def check_swarm_run(run: RunSpec, swarm: SwarmSpec) -> None:
    """Raise UserError for fields of a run that the nodes of a swarm cannot have."""
    _check_learning(run, swarm)
    _check_layout_and_data(run, swarm)


def _check_learning(run: RunSpec, swarm: SwarmSpec) -> None:
    """Check recovery, experts, optimizer and batch."""
    moe = run.model.moe
    for field in ("in_memory_checkpoint_every", "max_rollbacks"):
        require(
            not getattr(run.recovery, field),
            f"recovery.{field}",
            getattr(run.recovery, field),
            problem="is not for the nodes of a swarm, whose coordinator has the last round",
            fix="set it to 0",
        )
    require(
        moe is not None or swarm.method not in EXPERT_SPLIT_METHODS,
        "swarm.method",
        swarm.method,
        problem="shares out experts, and the model has none",
        fix='set model.moe, or swarm.method = "diloco"',
    )
    require(
        moe is None or not moe.bias_update_rate,
        "model.moe.bias_update_rate",
        moe and moe.bias_update_rate,
        problem="moves biases by what a node's own tokens chose, and a swarm exchanges weights only",
        fix="set it to 0",
    )
    scaling = run.training.batch_scaling
    require(
        not swarm.sends_gradients or run.optimizer.name == "adamw",
        "optimizer.name",
        run.optimizer.name,
        problem="is not AdamW, whose moments the coordinator of ddp keeps",
        fix='use adamw, or swarm.method = "fedavg"',
    )
    require(
        not swarm.sends_gradients or scaling == "keep",
        "training.batch_scaling",
        scaling,
        problem="follows the ranks of a node, and the coordinator of ddp steps for all nodes",
        fix="set learning rates instead",
    )


def _check_layout_and_data(run: RunSpec, swarm: SwarmSpec) -> None:
    """Check the layout inside a node, the number of steps, and the data."""
    require(
        swarm.method not in EXPERT_SPLIT_METHODS or run.layout.ep == 1 or run.layout.data_parallel == "ddp",
        "layout.data_parallel",
        run.layout.data_parallel,
        problem="splits what expert-parallel ranks train, of which some may train no expert in a swarm",
        fix='set layout.data_parallel = "ddp", or layout.ep = 1',
    )
    require(
        run.layout.data_parallel != "parameter_server",
        "layout.data_parallel",
        run.layout.data_parallel,
        problem="is no layout for inside a node of a swarm",
        fix="use ddp or a ZeRO stage",
    )
    require(
        run.training.has_decided_steps,
        "training.seconds",
        run.training.seconds,
        problem="gives no number of steps, and a swarm divides them into rounds",
        fix="set training.steps in its place",
    )
    require(
        not run.training.auto_precision,
        "training.precision",
        "auto",
        problem="may be another on each node",
        fix='use "bf16" or "fp32"',
    )
    require(
        run.training.steps % swarm.steps_per_round == 0,
        "training.steps",
        run.training.steps,
        problem=f"is no multiple of the {swarm.steps_per_round} steps of a round",
        fix=f"use {-(-run.training.steps // swarm.steps_per_round) * swarm.steps_per_round}",
    )
    require(
        not run.data.streaming,
        "data.streaming",
        True,
        problem="gives every node the same text",
        fix="prepare the text first",
    )
