"""How the work is laid over ranks: the parallel degrees and choices, and their arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from pydantic import Field

from phalanx.spec.base import Spec, divisors
from phalanx.spec.errors import UserError

ScheduleName = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]
RankOrder = Literal["data", "pipeline"]
PIPELINE_DATA_STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
NOT_IMPLEMENTED = "is described, but does not run yet"
SHARDED_STRATEGIES = ("zero1", "zero2", "zero3", "hsdp")
VALID_DATA_STRATEGIES = {
    "bucket_mb": ("ddp", "zero1", "zero2"),
    "first_bucket_mb": ("ddp",),
    "gradient_compression": ("ddp",),
    "powersgd_rank": ("ddp",),
    "ddp_static_graph": ("ddp",),
    "ddp_find_unused_parameters": ("ddp",),
    "reshard_after_forward": ("zero3", "hsdp"),
    "fsdp_unit": ("zero3", "hsdp"),
    "fsdp_prefetch": ("zero3", "hsdp"),
    "offload": SHARDED_STRATEGIES,
    "dp_shard": ("hsdp",),
    "num_servers": ("parameter_server",),
    "max_staleness": ("parameter_server",),
}
"""Choices that mean something only with these values of `data`."""
REQUIRES_DEGREE = {
    **dict.fromkeys(("rank_order", "schedule", "schedule_file", "virtual_stages"), "pp"),
    **dict.fromkeys(("sequence_parallel", "tp_attention"), "tp"),
    "cp_method": "cp",
}
"""Choices that mean something only where this degree is above 1."""
INVALID_IN_PIPELINE = (
    "gradient_compression",
    "first_bucket_mb",
    "ddp_static_graph",
    "ddp_find_unused_parameters",
    "reshard_after_forward",
)
"""Choices of DDP, which a pipeline does not use, and of ZeRO-3, which in one keeps parameters gathered for the step."""


class Layout(Spec):
    """The parallel degrees and choices of a run.

    The data-parallel degree is what the other degrees leave of the ranks.
    """

    data_parallel: Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "parameter_server"] = "ddp"
    """How data-parallel ranks share model state: replicated (ddp); optimizer state sharded (zero1), and gradients
    (zero2), and parameters (zero3 = FSDP); zero3 within groups and replicated between them (hsdp); or owned by ranks
    that only serve them (parameter_server)."""
    num_servers: int = Field(1, gt=0)
    """Ranks that are servers, the first of all; the others are workers (parameter_server)."""
    max_staleness: int | None = Field(None, ge=0, examples=[2])
    """Updates that a worker's weights may lack (parameter_server). By default workers wait for every update."""
    dp_shard: int | None = Field(None, gt=0, examples=[8])
    """Ranks that share one sharded copy (hsdp). Must divide the data-parallel degree."""
    tp: int = Field(1, gt=0)
    """Tensor-parallel degree."""
    pp: int = Field(1, gt=0)
    """Pipeline stages in sequence."""
    rank_order: RankOrder = "data"
    """Which ranks are furthest apart: those with different data, which meet once per step (data), so that a pipeline's
    are neighbours; or a pipeline's stages, which send little (pipeline), so that a stage's are, and with them its
    experts."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks share the tokens between pairs of products: less memory, as much traffic."""
    tp_attention: Literal["split", "gathered"] = "split"
    """How tensor-parallel ranks share attention: each has some heads; or, for heads that they cannot divide, queries
    and keys are gathered and each has some columns of the values, which needs as many key/value heads as heads."""
    cp: int = Field(1, gt=0)
    """Context-parallel degree: ranks that share the tokens of every sequence."""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """How context-parallel ranks attend to each other's tokens: keys and values go round (ring), or ranks exchange
    tokens for heads (ulysses), of which there must be enough."""
    ep: int = Field(1, gt=0)
    """Expert-parallel degree: ranks with different experts. They are data-, context- and tensor-parallel ranks to the
    rest of the model, neighbours first."""
    schedule: ScheduleName = "1f1b"
    """Pipeline schedule."""
    schedule_file: str | None = Field(None, examples=["searched.csv"])
    """A schedule of one's own in place of `schedule`: a CSV file that `phalanx pipeline show --out`, or PyTorch, wrote.
    A step has as many micro-batches as it has."""
    virtual_stages: int = Field(1, gt=0)
    """Pipeline stages on each rank (interleaved)."""
    micro_batch_size: int | None = Field(None, gt=0, examples=[4])
    """Sequences per rank in one forward pass. By default the largest that divides the rank's share of a step and
    holds at most 16,384 tokens and 2 GiB of logits (fp32, tokens x vocabulary)."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none; attention only (selective); whole blocks (full)."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer state rests, with zero1 and zero2 beside it the numbers that it trains (this rank's share of the
    parameters, once more), with zero2 gradients, with zero3 all parameters and gradients: on the device, in CPU memory,
    or the state in files. Needs zero1, zero2, zero3 or hsdp; a single rank offloads too."""
    offload_directory: str | None = Field(None, examples=["/local/scratch"])
    """Where the files of `offload = "nvme"` lie: a local disk. They are unnamed and vanish with the run."""
    bucket_mb: float = Field(25.0, gt=0)
    """Parameters whose gradients are sent at once, in MiB (ddp, zero1, zero2)."""
    first_bucket_mb: float | None = Field(None, gt=0, examples=[1.0])
    """The first bucket to be sent, in MiB: a small one starts early (ddp)."""
    gradient_compression: Literal["none", "bf16", "powersgd"] = "none"
    """Gradients on the wire (ddp): as they are; in half of fp32's bytes; or as products of thin matrices with error
    feedback (PowerSGD, arXiv 1905.13727), which is not exact, and whose feedback a checkpoint does not keep."""
    powersgd_rank: int = Field(4, gt=0)
    """Rank of PowerSGD's matrices."""
    ddp_static_graph: bool = False
    """Tell DDP that every step uses the same parameters; not with accumulation."""
    ddp_find_unused_parameters: bool = False
    """Let DDP look for parameters that a step did not use, which otherwise stop it."""
    reshard_after_forward: bool = True
    """Give a block's gathered parameters back after the forward pass and gather them again in the backward pass: less
    memory, half as much traffic more (zero3, hsdp). In a pipeline they stay for the step: its micro-batches overlap."""
    fsdp_unit: Literal["model", "block", "sublayer"] = "block"
    """What is gathered at once (zero3, hsdp): the whole model, a block, or a block's attention and MLP each."""
    fsdp_prefetch: int = Field(1, ge=0)
    """Gathers that run ahead of the one that is needed (zero3, hsdp)."""


@dataclass(frozen=True)
class ParallelDims:
    """The size of every mesh axis; their product is the world size. Tensor-parallel ranks, which meet in every layer,
    sit next to each other; data-parallel ranks, which meet once per step, or pipelines, may be far apart."""

    dp_replicate: int
    """Copies of the model (its shards together count as one)."""
    dp_shard: int
    """Ranks that share one sharded copy."""
    pp: int
    """Ranks that a batch passes one after another."""
    cp: int
    """Ranks that share one sequence."""
    tp: int
    """Ranks that share one matrix product."""
    servers: int = 0
    """Ranks that own parameters and compute nothing; they come first."""
    ep: int = 1
    """Of the ranks of a stage, those that have different experts; no axis of its own."""
    pipeline_outermost: bool = False
    """Whether a pipeline's stages are furthest apart, and not data-parallel ranks."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Outermost first."""
        return ("pp", "dp_replicate", "dp_shard", "cp", "tp") if self.pipeline_outermost else AXES

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on every axis; a server is at none, but is given one."""
        found, outside = {}, rank - self.servers
        for axis in reversed(self.axes):
            outside, found[axis] = divmod(outside, getattr(self, axis))
        return found

    def expert_rank(self, rank: int) -> int:
        """Which of `ep` runs of a layer's experts a rank has."""
        within, place = 0, self.coordinates(rank)
        for axis in STAGE_AXES:
            within = within * getattr(self, axis) + place[axis]
        return within % self.ep

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    def with_cp_as_data_parallel(self, sharded: bool) -> ParallelDims:
        """The same, with context parallelism as what it is to whoever keeps or sums what is trained: more ranks with
        the same model and other data; they share one copy where copies are `sharded`."""
        replicate, shard = (1, self.cp) if sharded else (self.cp, 1)
        return replace(self, cp=1, dp_replicate=self.dp_replicate * replicate, dp_shard=self.dp_shard * shard)

    @property
    def world_size(self) -> int:
        """All ranks of the run."""
        return self.servers + self.pp * self.dp_size * self.cp * self.tp


def parallel_dims(layout: Layout, world_size: int) -> ParallelDims:
    """The mesh axes of `layout` on `world_size` ranks.

    Raises UserError if the ranks cannot be divided so, or for a choice that means nothing in this layout.
    """
    check_inapplicable_options(layout)
    servers = layout.num_servers if layout.data_parallel == "parameter_server" else 0
    if servers and servers >= world_size:
        raise UserError(
            "layout.num_servers",
            servers,
            f"leaves no worker of the {world_size} ranks of the run",
            f"start more ranks, or lower it to {world_size - 1}" if world_size > 1 else "start more ranks",
        )
    model_ranks = layout.pp * layout.cp * layout.tp
    if (world_size - servers) % model_ranks:
        above_one = " x ".join(axis for axis in ("pp", "cp", "tp") if getattr(layout, axis) > 1)
        raise UserError(
            f"layout.{above_one}",
            model_ranks,
            f"does not divide the ranks that compute ({world_size - servers})",
            f"use a multiple of {model_ranks} ranks, or lower a degree",
        )
    dp = (world_size - servers) // model_ranks
    if layout.data_parallel == "hsdp":
        allowed = ", ".join(map(str, divisors(dp)))
        if layout.dp_shard is None:
            raise UserError(
                "layout.dp_shard", None, 'is needed with layout.data_parallel = "hsdp"', f"use one of {allowed}"
            )
        if dp % layout.dp_shard:
            problem = f"does not divide the {dp} data-parallel ranks"
            raise UserError("layout.dp_shard", layout.dp_shard, problem, f"use one of {allowed}")
        if layout.dp_shard == 1 and layout.offload != "none":
            fix = f'use another of {allowed}, or layout.data_parallel = "zero1"'
            raise UserError("layout.dp_shard", 1, "shards nothing, and only what is sharded is offloaded", fix)
    share_experts = dp * layout.cp * layout.tp
    copies = dp // (layout.dp_shard or 1) if layout.data_parallel == "hsdp" else 1
    if share_experts // copies % layout.ep:
        allowed = ", ".join(map(str, divisors(share_experts // copies)))
        problem = f"does not divide the {share_experts // copies} ranks that share a copy of a stage's experts"
        raise UserError("layout.ep", layout.ep, problem, f"use one of {allowed}")
    shard = {"ddp": 1, "parameter_server": 1, "hsdp": layout.dp_shard or 1}.get(layout.data_parallel, dp)
    outside = layout.rank_order == "pipeline"
    return ParallelDims(dp // shard, shard, layout.pp, layout.cp, layout.tp, servers, layout.ep, outside)


AXES = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
"""By default from outside to inside (`Degrees.axes`)."""
STAGE_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Of the ranks of a stage."""
MODEL_PARALLEL_AXES = ("pp", "tp", "cp", "ep")
"""Degrees of ranks that share a model or a sequence."""


def uses_model_parallelism(layout: Layout) -> bool:
    """Whether ranks share a model or a sequence."""
    return any(getattr(layout, axis) > 1 for axis in MODEL_PARALLEL_AXES)


def process_groups(sizes: ParallelDims, *axes: str) -> list[tuple[int, ...]]:
    """The ranks of every group over these axes: those that differ in nothing else. Servers are in none."""
    shape = [getattr(sizes, axis) for axis in sizes.axes]
    found: dict[tuple[int, ...], list[int]] = {}
    for index, place in enumerate(product(*map(range, shape))):
        others = tuple(at for axis, at in zip(sizes.axes, place, strict=True) if axis not in axes)
        found.setdefault(others, []).append(sizes.servers + index)
    return [tuple(ranks) for ranks in found.values()]


def pipeline_stage_groups(sizes: ParallelDims) -> list[tuple[int, ...]]:
    """The ranks at every place of the pipeline."""
    return process_groups(sizes, *STAGE_AXES)


def expert_parallel_groups(sizes: ParallelDims) -> list[tuple[int, ...]]:
    """The ranks of every group that have different experts: neighbours among those of a stage."""
    if sizes.ep == 1:
        return []
    return [
        ranks[first : first + sizes.ep]
        for ranks in pipeline_stage_groups(sizes)
        for first in range(0, len(ranks), sizes.ep)
    ]


def assign_parameters_to_servers(sizes: Mapping[str, int], servers: int) -> dict[str, int]:
    """Which server owns which parameter: the largest first, each to the server that has least so far."""
    load = [0] * servers
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner


def check_inapplicable_options(layout: Layout) -> None:
    """Raise UserError for a choice that means nothing in this layout."""
    for field, axis in REQUIRES_DEGREE.items():
        value = getattr(layout, field)
        if getattr(layout, axis) == 1 and value != Layout.model_fields[field].default:
            fix = f"remove it, or set layout.{axis} to 2 or more"
            raise UserError(f"layout.{field}", value, f"has no meaning with layout.{axis} = 1", fix)
    if layout.schedule_file is not None and layout.schedule != "1f1b":
        problem = f'stands in place of a schedule, and layout.schedule = "{layout.schedule}" names another'
        raise UserError("layout.schedule_file", layout.schedule_file, problem, "remove one of them")
    if (layout.schedule == "interleaved") == (layout.virtual_stages == 1):
        problem = f'does not go with layout.schedule = "{layout.schedule}"'
        fix = 'set it to 2 or more with "interleaved", and leave it out with any other'
        raise UserError("layout.virtual_stages", layout.virtual_stages, problem, fix)
    for field in INVALID_IN_PIPELINE if layout.pp > 1 else ():
        value = getattr(layout, field)
        if value != Layout.model_fields[field].default:
            problem, fix = f"has no meaning in a pipeline (layout.pp = {layout.pp})", "remove it"
            raise UserError(f"layout.{field}", value, problem, f"{fix}, or set layout.pp = 1")
    for field, data in VALID_DATA_STRATEGIES.items():
        value = getattr(layout, field)
        if value != Layout.model_fields[field].default and layout.data_parallel not in data:
            raise UserError(
                f"layout.{field}",
                value,
                f'has no meaning with layout.data_parallel = "{layout.data_parallel}"',
                f"remove it, or set layout.data_parallel to {' or '.join(data)}",
            )
    if (layout.offload_directory is None) == (layout.offload == "nvme"):
        problem = (
            'is needed with layout.offload = "nvme"'
            if layout.offload == "nvme"
            else f'has no meaning with layout.offload = "{layout.offload}"'
        )
        raise UserError(
            "layout.offload_directory",
            layout.offload_directory,
            problem,
            'name a directory on a local disk and set layout.offload = "nvme", or remove both',
        )


def check_supported(layout: Layout) -> None:
    """Raise UserError for a value that training cannot run yet."""
    if layout.pp > 1 and layout.data_parallel not in PIPELINE_DATA_STRATEGIES:
        fix = f"use one of {', '.join(PIPELINE_DATA_STRATEGIES)}, or layout.pp = 1"
        raise UserError(
            "layout.data_parallel",
            layout.data_parallel,
            f"in a pipeline (layout.pp = {layout.pp}) {NOT_IMPLEMENTED}",
            fix,
        )
    for axis in ("tp", "cp", "ep"):
        if getattr(layout, axis) > 1 and layout.data_parallel == "parameter_server":
            fix = f"use one of {', '.join(PIPELINE_DATA_STRATEGIES)}, or layout.{axis} = 1"
            raise UserError(
                "layout.data_parallel", layout.data_parallel, f"with layout.{axis} above 1 {NOT_IMPLEMENTED}", fix
            )
