"""Parallel layout of a run: degrees, options and their constraints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from phalanx.spec.base import LocalPath, Spec
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import plural
from phalanx.spec.pipeline_schedules import SCHEDULES, ScheduleName, quote_names

RankOrder = Literal["data_outer", "pipeline_outer"]
CpMethod = Literal["ring", "ulysses"]
TpAttention = Literal["split", "gathered"]
StrategyName = Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "parameter_server"]
CheckpointingName = Literal["none", "norms", "selective", "full", "offload"]
OffloadName = Literal["none", "cpu", "nvme"]
EMBEDDINGS = ("embedding", "positions")
"""Names of a transformer's modules that read token ids and positions: the last whose gradients are complete."""
PIPELINE_DATA_STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
NOT_IMPLEMENTED = "is not implemented yet with"
MAX_BF16_SUMS = 8
"""Maximum number of micro-batches whose gradients ZeRO-1 and 2 accumulate in bf16; beyond it they use fp32. The
relative error of a bf16 sum is 3e-3 at 8 micro-batches, 8e-3 at 64 and 2e-2 at 256."""
ZERO_STRATEGIES = ("zero1", "zero2")
"""Strategies in which ranks hold all weights, and update rows of them (`parallel.data.zero`)."""
FSDP_STRATEGIES = ("zero3", "hsdp")
"""Strategies in which ranks also shard the weights (`parallel.data.fsdp`)."""
SHARDED_STRATEGIES = (*ZERO_STRATEGIES, *FSDP_STRATEGIES)
VALID_DATA_STRATEGIES = {
    "bucket_mb": ("ddp", *ZERO_STRATEGIES),
    "first_bucket_mb": ("ddp",),
    "gradient_compression": ("ddp",),
    "powersgd_rank": ("ddp",),
    "ddp_static_graph": ("ddp",),
    "ddp_find_unused_parameters": ("ddp",),
    "reshard_after_forward": FSDP_STRATEGIES,
    "fsdp_unit": FSDP_STRATEGIES,
    "fsdp_prefetch": FSDP_STRATEGIES,
    "offload": SHARDED_STRATEGIES,
    "dp_shard": ("hsdp",),
    "num_servers": ("parameter_server",),
    "max_staleness": ("parameter_server",),
}
"""Options that apply only to these values of `data_parallel`."""
REQUIRES_DEGREE = {
    **dict.fromkeys(("rank_order", "schedule", "schedule_file", "virtual_stages"), "pp"),
    **dict.fromkeys(("sequence_parallel", "tp_attention"), "tp"),
    "cp_method": "cp",
}
"""Options that apply only if this degree is above 1."""
INVALID_IN_PIPELINE = (
    "gradient_compression",
    "first_bucket_mb",
    "ddp_static_graph",
    "ddp_find_unused_parameters",
    "reshard_after_forward",
)
"""Options that do not apply in a pipeline: those of DDP, and those of ZeRO-3, which keeps parameters gathered for the
step in a pipeline."""


class Layout(Spec):
    """Parallel degrees and options of a run.

    The data-parallel degree is the number of ranks divided by the product of the other degrees.

    Example:
        >>> layout = phalanx.Layout(data_parallel="zero1", tp=4, pp=2, schedule="zb-h1")
        >>> layout.replace(tp=1).schedule
        'zb-h1'
    """

    data_parallel: StrategyName = "ddp"
    """Data-parallel strategy. ddp: replicated model state. zero1: sharded optimizer state. zero2: also sharded
    gradients. zero3 (FSDP): also sharded parameters. hsdp: zero3 within groups, replicated between them.
    parameter_server: model state on dedicated server ranks."""
    num_servers: int = Field(1, gt=0)
    """Number of servers, which are the first ranks. All other ranks are workers (parameter_server)."""
    max_staleness: int | None = Field(None, ge=0, examples=[2])
    """Maximum number of updates that a worker's weights may lag behind (parameter_server). By default workers wait for
    every update."""
    dp_shard: int | None = Field(None, gt=0, examples=[8])
    """Ranks that share one sharded copy (hsdp). Must divide the data-parallel degree."""
    tp: int = Field(1, gt=0)
    """Tensor-parallel degree."""
    pp: int = Field(1, gt=0)
    """Pipeline stages in sequence."""
    rank_order: RankOrder = "data_outer"
    """Order of the ranks. data_outer: ranks with different data, which communicate once per step, are furthest apart,
    and the ranks of a pipeline are neighbors. pipeline_outer: the stages of a pipeline, which send little, are furthest
    apart, and the ranks of a stage, with its experts, are neighbors."""
    sequence_parallel: bool = True
    """Shard the tokens between pairs of matrix products over tensor-parallel ranks: less memory at equal traffic."""
    tp_attention: TpAttention = "split"
    """Division of attention between tensor-parallel ranks. split: each rank has some heads. gathered: for a number of
    heads that the degree does not divide; queries and keys are gathered, each rank has some columns of the values, and
    there must be one key/value head per head."""
    cp: int = Field(1, gt=0)
    """Context-parallel degree: ranks that share the tokens of every sequence."""
    cp_method: CpMethod = "ring"
    """Context-parallel attention. ring: keys and values circulate. ulysses: ranks exchange tokens for heads, of which
    there must be enough."""
    ep: int = Field(1, gt=0)
    """Expert-parallel degree: ranks with different experts, neighbors first. For all other parameters, the same ranks
    are data-, context- and tensor-parallel."""
    schedule: ScheduleName = "1f1b"
    """Pipeline schedule."""
    schedule_file: LocalPath | None = Field(None, examples=["searched.csv"])
    """A custom schedule in place of `schedule`: a CSV file written by `phalanx pipeline show --out` or PyTorch. It sets
    the number of micro-batches of a step."""
    virtual_stages: int = Field(1, gt=0)
    """Pipeline stages on each rank (interleaved)."""
    split_seq_len: int | None = Field(None, gt=1, examples=[4096])
    """Sequence length for which pipeline stages are balanced; by default `training.seq_len`. Phases with other lengths
    keep the stages."""
    micro_batch_size: int | None = Field(None, gt=0, examples=[4])
    """Sequences per rank in one forward pass. By default the maximum that divides the rank's share of a step and has at
    most 16,384 tokens and 2 GiB of logits: tokens x vocabulary in 16 bits, or fp32 with a loss or network of your own.
    """
    activation_checkpointing: CheckpointingName = "none"
    """Activations recomputed in the backward pass: none; outputs of norms (norms); attention only (selective); full
    blocks (full); full blocks whose inputs are in CPU memory between the passes (offload). "auto" lets the planner
    choose none, norms, selective or full, and the fewest `recomputed_blocks` that fit in memory. Of blocks that are
    compiled to one graph, the compiler recomputes norms."""
    recomputed_blocks: Annotated[int, Field(gt=0)] | tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, examples=[4]
    )
    """Number of blocks on each rank, the first ones, that recompute activations. A list has one number per pipeline
    rank. By default all blocks."""
    auto_checkpointing: bool = False
    """Let the planner choose both, as `activation_checkpointing = "auto"` requests."""
    offload: OffloadName = "none"
    """Location of optimizer state: on the device (none), in CPU memory (cpu), or in files (nvme). Also moved off the
    device: with zero1 and zero2 the trained copy of the parameters (this rank's share), with zero2 gradients, with
    zero3 all parameters and gradients. Needs zero1, zero2, zero3 or hsdp; a single rank can offload too."""
    offload_directory: LocalPath | None = Field(None, examples=["/local/scratch"])
    """Directory on a local disk for the files of `offload = "nvme"`. The files have no names and exist only during the
    run."""
    bucket_mb: float = Field(25.0, gt=0)
    """Size of a gradient bucket in MiB: parameters whose gradients are sent together (ddp, zero1, zero2)."""
    first_bucket_mb: float | None = Field(None, gt=0, examples=[1.0])
    """Size of the first bucket to be sent, in MiB. A small first bucket starts communication early (ddp)."""
    gradient_compression: Literal["none", "bf16", "powersgd"] = "none"
    """Compression of gradients for communication (ddp). none: unchanged. bf16: half the bytes of fp32. powersgd:
    products of low-rank matrices with error feedback (PowerSGD, arXiv 1905.13727); it is not exact, and checkpoints do
    not contain the feedback."""
    powersgd_rank: int = Field(4, gt=0)
    """Rank of PowerSGD's matrices."""
    ddp_static_graph: bool = False
    """Declare to DDP that every step uses the same parameters; not with gradient accumulation."""
    ddp_find_unused_parameters: bool = False
    """Let DDP search for parameters that a step did not use. Without it such parameters stop the run."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after the forward pass and gather them again in the backward pass: less
    memory, 50% more traffic (zero3, hsdp). In a pipeline the parameters stay gathered for the step, because its
    micro-batches overlap."""
    fsdp_unit: Literal["model", "block", "sublayer"] = "block"
    """Unit of one all-gather (zero3, hsdp): the full model, a block, or a block's attention and MLP separately."""
    fsdp_prefetch: int = Field(1, ge=0)
    """Number of all-gathers that are started ahead of the required one (zero3, hsdp)."""

    @property
    def recomputes_full_blocks(self) -> bool:
        """True if the backward pass recomputes full blocks."""
        return self.activation_checkpointing in ("full", "offload")

    @property
    def offloads(self) -> bool:
        """True if state or activations are off the device."""
        return self.offload != "none" or self.activation_checkpointing == "offload"

    @property
    def recomputes_attention(self) -> bool:
        """True if the backward pass recomputes attention, alone or in full blocks."""
        return self.activation_checkpointing not in ("none", "norms")

    def recomputed_on_rank(self, pp_rank: int, num_blocks: int) -> int:
        """Return the number of blocks, the first ones, that a pipeline rank with `num_blocks` blocks recomputes."""
        if self.activation_checkpointing == "none":
            return 0
        limit = self.recomputed_blocks
        if isinstance(limit, tuple):
            limit = limit[pp_rank]
        return num_blocks if limit is None else min(limit, num_blocks)


def compiles_whole_blocks(degree: int, splits_backward: bool, fsdp_unit: str = "block") -> bool:
    """Return whether a block is compiled to one graph, which communication or split backward passes would break.

    `degree` is the number of ranks that communicate inside a block: the product of `tp`, `cp` and `ep`.
    """
    return degree == 1 and not splits_backward and fsdp_unit != "sublayer"


def assign_parameters_to_servers(sizes: Mapping[str, int], num_servers: int) -> dict[str, int]:
    """Map each parameter to its server: largest first, each to the server with the least so far."""
    load = [0] * num_servers
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner


def describe_recomputation(layout: Layout) -> str:
    """Return a text such as "recompute none", or "recompute full in 3 blocks, offload inputs"."""
    offloads = layout.activation_checkpointing == "offload"
    text = f"recompute {'full' if offloads else layout.activation_checkpointing}"
    counts = layout.recomputed_blocks
    if counts is not None:
        counts = (counts,) if isinstance(counts, int) else counts
        blocks = plural(counts[0], "block") if len(counts) == 1 else f"{'/'.join(map(str, counts))} blocks"
        text += f" in {blocks}{' a rank' if layout.pp > 1 else ''}"
    return f"{text}, offload inputs" if offloads else text


def check_inapplicable_options(layout: Layout) -> None:
    """Raise UserError for an option that does not apply to this layout."""
    _check_recomputed_blocks(layout)
    if layout.activation_checkpointing == "norms" and layout.fsdp_unit == "sublayer":
        problem = 'cannot be combined with layout.fsdp_unit = "sublayer", which frees the weights of norms too early'
        fix = 'use layout.fsdp_unit = "block", or "selective"'
        raise UserError("layout.activation_checkpointing", "norms", problem, fix)
    for field, axis in REQUIRES_DEGREE.items():
        value = getattr(layout, field)
        if getattr(layout, axis) == 1 and value != Layout.model_fields[field].default:
            fix = f"remove it, or set layout.{axis} to 2 or more"
            raise UserError(f"layout.{field}", value, f"cannot be combined with layout.{axis} = 1", fix)
    if layout.schedule_file is not None and layout.schedule != "1f1b":
        problem = f'cannot be combined with layout.schedule = "{layout.schedule}", because it replaces the schedule'
        raise UserError("layout.schedule_file", layout.schedule_file, problem, "remove one of the two")
    if SCHEDULES[layout.schedule].has_virtual_stages == (layout.virtual_stages == 1):
        problem = f'cannot be combined with layout.schedule = "{layout.schedule}"'
        names = tuple(name for name, properties in SCHEDULES.items() if properties.has_virtual_stages)
        fix = f"use at least 2 with {quote_names(names)}; remove it with any other schedule"
        raise UserError("layout.virtual_stages", layout.virtual_stages, problem, fix)
    for field in INVALID_IN_PIPELINE if layout.pp > 1 else ():
        value = getattr(layout, field)
        if value != Layout.model_fields[field].default:
            problem = f"cannot be combined with a pipeline (layout.pp = {layout.pp})"
            raise UserError(f"layout.{field}", value, problem, "remove it, or set layout.pp = 1")
    for field, strategies in VALID_DATA_STRATEGIES.items():
        value = getattr(layout, field)
        if value != Layout.model_fields[field].default and layout.data_parallel not in strategies:
            problem = f'cannot be combined with layout.data_parallel = "{layout.data_parallel}"'
            fix = f"remove it, or set layout.data_parallel to {' or '.join(strategies)}"
            raise UserError(f"layout.{field}", value, problem, fix)
    if (layout.offload_directory is None) == (layout.offload == "nvme"):
        relation = "is required" if layout.offload == "nvme" else "cannot be combined"
        problem = f'{relation} with layout.offload = "{layout.offload}"'
        fix = 'use a directory on a local disk with layout.offload = "nvme", or remove both'
        raise UserError("layout.offload_directory", layout.offload_directory, problem, fix)


def _check_recomputed_blocks(layout: Layout) -> None:
    if layout.recomputed_blocks is None:
        return
    problem = ""
    method = layout.activation_checkpointing
    if layout.auto_checkpointing:
        problem = 'cannot be combined with layout.activation_checkpointing = "auto", which chooses it'
    elif method == "none":
        problem = 'cannot be combined with layout.activation_checkpointing = "none"'
    elif layout.recomputes_full_blocks and layout.fsdp_unit == "sublayer":
        problem = (
            f'cannot be combined with layout.fsdp_unit = "sublayer" and layout.activation_checkpointing = "{method}"'
        )
    if problem:
        raise UserError("layout.recomputed_blocks", layout.recomputed_blocks, problem, "remove it")
    if isinstance(layout.recomputed_blocks, tuple) and len(layout.recomputed_blocks) != layout.pp:
        problem = f"is not one number for each of the {layout.pp} pipeline ranks (layout.pp)"
        fix = f"write {layout.pp} numbers, or one number for all ranks"
        raise UserError("layout.recomputed_blocks", list(layout.recomputed_blocks), problem, fix)


def without_inapplicable_options(layout: Layout) -> Layout:
    """Return the layout without the options that its data-parallel strategy, or a pipeline, does not have."""
    fields = [field for field, strategies in VALID_DATA_STRATEGIES.items() if layout.data_parallel not in strategies]
    fields += INVALID_IN_PIPELINE if layout.pp > 1 else ()
    unset = {field: Layout.model_fields[field].default for field in fields}
    if "offload" in unset:
        unset["offload_directory"] = None
    return layout.model_copy(update=unset)


def check_supported(layout: Layout) -> None:
    """Raise UserError for a value that training does not support yet."""
    if layout.pp > 1 and layout.data_parallel not in PIPELINE_DATA_STRATEGIES:
        fix = f"use one of {', '.join(PIPELINE_DATA_STRATEGIES)}, or layout.pp = 1"
        problem = f"{NOT_IMPLEMENTED} a pipeline (layout.pp = {layout.pp})"
        raise UserError("layout.data_parallel", layout.data_parallel, problem, fix)
    for axis in ("tp", "cp", "ep"):
        if getattr(layout, axis) > 1 and layout.data_parallel == "parameter_server":
            fix = f"use one of {', '.join(PIPELINE_DATA_STRATEGIES)}, or layout.{axis} = 1"
            problem = f"{NOT_IMPLEMENTED} layout.{axis} above 1"
            raise UserError("layout.data_parallel", layout.data_parallel, problem, fix)
