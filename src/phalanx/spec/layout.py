"""How the work is laid over ranks: the parallel degrees and choices, and their arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from phalanx.spec.base import Spec
from phalanx.spec.errors import UserError

ScheduleName = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]
RankOrder = Literal["data_outer", "pipeline_outer"]
PIPELINE_DATA_STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
NOT_IMPLEMENTED = "is described, but does not run yet"
MAX_BF16_SUMS = 8
"""Gradients of more micro-batches ZeRO-1 and 2 add up in fp32. The error of a sum in bf16, relative to it, is 3e-3 at
8 micro-batches, 8e-3 at 64 and 2e-2 at 256."""
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
"""Choices that mean something only with these values of `data_parallel`."""
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
    rank_order: RankOrder = "data_outer"
    """Which ranks are furthest apart: those with different data, which meet once per step (data_outer), so that a
    pipeline's are neighbours; or a pipeline's stages, which send little (pipeline_outer), so that a stage's are, and
    with them its experts."""
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


def assign_parameters_to_servers(sizes: Mapping[str, int], num_servers: int) -> dict[str, int]:
    """Which server owns which parameter: the largest first, each to the server that has least so far."""
    load = [0] * num_servers
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
            raise UserError(f"layout.{field}", value, f"has no meaning with layout.{axis} = 1", fix=fix)
    if layout.schedule_file is not None and layout.schedule != "1f1b":
        problem = f'stands in place of a schedule, and layout.schedule = "{layout.schedule}" names another'
        raise UserError("layout.schedule_file", layout.schedule_file, problem, fix="remove one of them")
    if (layout.schedule == "interleaved") == (layout.virtual_stages == 1):
        problem = f'does not go with layout.schedule = "{layout.schedule}"'
        fix = 'set it to 2 or more with "interleaved", and leave it out with any other'
        raise UserError("layout.virtual_stages", layout.virtual_stages, problem, fix=fix)
    for field in INVALID_IN_PIPELINE if layout.pp > 1 else ():
        value = getattr(layout, field)
        if value != Layout.model_fields[field].default:
            problem = f"has no meaning in a pipeline (layout.pp = {layout.pp})"
            fix = "remove it"
            raise UserError(f"layout.{field}", value, problem, fix=f"{fix}, or set layout.pp = 1")
    for field, strategies in VALID_DATA_STRATEGIES.items():
        value = getattr(layout, field)
        if value != Layout.model_fields[field].default and layout.data_parallel not in strategies:
            raise UserError(
                f"layout.{field}",
                value,
                f'has no meaning with layout.data_parallel = "{layout.data_parallel}"',
                fix=f"remove it, or set layout.data_parallel to {' or '.join(strategies)}",
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
            fix='name a directory on a local disk and set layout.offload = "nvme", or remove both',
        )


def check_supported(layout: Layout) -> None:
    """Raise UserError for a value that training cannot run yet."""
    if layout.pp > 1 and layout.data_parallel not in PIPELINE_DATA_STRATEGIES:
        fix = f"use one of {', '.join(PIPELINE_DATA_STRATEGIES)}, or layout.pp = 1"
        raise UserError(
            "layout.data_parallel",
            layout.data_parallel,
            f"in a pipeline (layout.pp = {layout.pp}) {NOT_IMPLEMENTED}",
            fix=fix,
        )
    for axis in ("tp", "cp", "ep"):
        if getattr(layout, axis) > 1 and layout.data_parallel == "parameter_server":
            fix = f"use one of {', '.join(PIPELINE_DATA_STRATEGIES)}, or layout.{axis} = 1"
            raise UserError(
                "layout.data_parallel", layout.data_parallel, f"with layout.{axis} above 1 {NOT_IMPLEMENTED}", fix=fix
            )
