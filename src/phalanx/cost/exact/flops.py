"""How many floating-point operations a token costs, and what share of the hardware's peak a run reaches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phalanx.cost.exact.parameter_shapes import Shape, num_elements, parameter_shapes
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.exact.pipeline_split import layers_per_rank
from phalanx.cost.exact.rank_tensors import RankTensors, rank_tensors
from phalanx.cost.kinds import ActivationCheckpointing
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.batch import plan_batch
from phalanx.spec.model import ModelSpec
from phalanx.spec.parallel_dims import parallel_dims
from phalanx.spec.run import RunSpec

SELECTIVE_MATMUL_FRACTION = 0.35
"""Of the FLOPs of a block's linear products, those of every second one, which torchtitan's selective recomputation does
again: the keys', the output's and one of the MLP's (0.37 in Llama 3 8B, less where keys have fewer heads)."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of the forward pass on one token, by what they compute."""

    projections: float
    """Attention's: queries, keys, values and output."""
    core: float
    """Attention's two products of tokens with each other."""
    mlp: float
    """MLPs, the experts that a token uses, and routers."""
    head: float

    @property
    def blocks(self) -> float:
        """All but the head."""
        return self.projections + self.core + self.mlp


@lru_cache
def forward_flops(spec: ModelSpec, seq_len: int, causal: bool = True) -> ForwardFlops:
    """FLOPs of the forward pass on one token.

    2 per matrix-product parameter (Kaplan et al., arXiv 2001.08361, section 2.1), and attention's two products with the
    other tokens, 4 L H head_dim T (PaLM, arXiv 2204.02311, appendix B). PaLM counts every pair of tokens; `causal`
    counts the lower triangle only, half of them.
    """
    attention_parameters = sum(
        num_elements(shape)
        for name, shape in parameter_shapes(spec).items()
        if ".attention." in name and len(shape) > 1
    )
    projections = 2.0 * attention_parameters
    head = 2.0 * spec.vocab_size * spec.hidden_size
    core_flops = 4 * spec.num_layers * spec.num_heads * spec.head_dim * seq_len * (0.5 if causal else 1.0)
    return ForwardFlops(projections, core_flops, 2 * count_parameters(spec).matmul - projections - head, head=head)


def forward_flops_per_token(spec: ModelSpec, seq_len: int, causal: bool = True) -> float:
    """FLOPs of the forward pass on one token: a third of training's."""
    flops = forward_flops(spec, seq_len, causal)
    return flops.blocks + flops.head


def training_flops_per_token(spec: ModelSpec, seq_len: int, causal: bool = True) -> float:
    """FLOPs to train on one token: forward, and twice as many backward (Kaplan et al.), nothing computed twice."""
    return 3 * forward_flops_per_token(spec, seq_len, causal)


def recomputed_flops_per_token(
    spec: ModelSpec,
    seq_len: int,
    recompute: ActivationCheckpointing,
    *,
    flash: bool = True,
    sharded: bool = False,
    causal: bool = True,
) -> float:
    """FLOPs that the backward pass does once more on one token: what the planner's times have too (`block_time`).

    Of attention's core alone (arXiv 2205.05198, section 5) none where `flash` kernels keep no scores; of operations'
    only products, which trainers on FSDP do again (`sharded`). What kernels do again inside themselves, such as flash
    attention's scores, is nowhere counted.
    """
    flops = forward_flops(spec, seq_len, causal)
    return {
        ActivationCheckpointing.NONE: 0.0,
        ActivationCheckpointing.SELECTIVE: 0.0 if flash else flops.core,
        ActivationCheckpointing.OPERATIONS: SELECTIVE_MATMUL_FRACTION * (flops.projections + flops.mlp)
        if sharded
        else 0.0,
        ActivationCheckpointing.FULL: flops.blocks,
        ActivationCheckpointing.ATTENTION: flops.projections + flops.core,
    }[recompute]


def rank_flops(run: RunSpec, world_size: int, rank: int) -> float:
    """FLOPs of a rank's forward and backward passes in one update, of its shares of tensors and attention, with what it
    computes again; experts balanced.

    Masked documents count as on a CPU, whose kernels compute every pair of tokens; flash attention on CUDA skips pairs
    of different documents. MFU and HFU do not use this count: by convention they have a sequence's dense causal pairs
    (`training_flops_per_token`).
    """
    dims = parallel_dims(run.layout, world_size)
    batch_plan = plan_batch(run, world_size)
    spec = run.model
    layout = run.layout
    if rank < dims.servers:
        return 0.0
    coordinates = dims.coordinates(rank)
    rows_per_rank, remainder = divmod(batch_plan.global_batch_size, batch_plan.dp_size)
    rows = rows_per_rank + (coordinates["dp_replicate"] * dims.dp_shard + coordinates["dp_shard"] < remainder)
    tokens = rows * run.training.seq_len / dims.cp
    tensors = rank_tensors(run, world_size, coordinates["tp"])[coordinates["pp"]]
    layers = layers_per_rank(run)[coordinates["pp"]] if dims.pp > 1 else range(spec.num_layers)
    product_flops = 0.0
    attention_flops = 0.0
    for name, shape in tensors.all.items():
        if name.startswith("blocks.") and len(shape) > 1:
            flops = (
                2
                * tokens_through_parameter(name, run, tokens)
                * num_elements(shape[1:] if ".experts." in name else shape)
            )
            product_flops, attention_flops = product_flops + flops, attention_flops + flops * (".attention." in name)
    causal = not run.data.mask_documents
    heads = -(-spec.num_heads // dims.tp)
    core_flops = 4 * heads * spec.head_dim * run.training.seq_len * (0.5 if causal else 1.0) * tokens * len(layers)
    recomputed_flops = {"none": 0.0, "selective": attention_flops + core_flops, "full": product_flops + core_flops}[
        layout.activation_checkpointing
    ]
    head_shape = lm_head_shape(run, tensors, coordinates["pp"])
    return (
        3 * (product_flops + core_flops)
        + recomputed_flops
        + (6 * tokens * num_elements(head_shape) if head_shape else 0)
    )


def tokens_through_parameter(name: str, run: RunSpec, tokens: float) -> float:
    """Of a rank's tokens those that a tensor multiplies; of stacked experts the rows that all of them are given,
    balanced."""
    layout = run.layout
    moe = run.model.moe
    local_tokens = tokens / layout.tp if layout.sequence_parallel else tokens
    if moe is not None and ".experts." in name:
        return (local_tokens if layout.ep > 1 else tokens) * moe.top_k * min(1.0, moe.capacity_factor or 1.0)
    return local_tokens if ".router." in name else tokens


def lm_head_shape(run: RunSpec, tensors: RankTensors, pp_rank: int) -> Shape | None:
    """Of what the ranks at this place of the pipeline compute logits with, which may be the embedding; None where they
    do not."""
    if run.layout.pp > 1 and representative_schedule(run.layout).end_ranks[1] != pp_rank:
        return None
    return tensors.tied_embedding_copy or tensors.dense.get("head.weight") or tensors.dense["embedding.weight"]


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops: float, ranks: int) -> float:
    """Model FLOPs utilization (PaLM, arXiv 2204.02311, section 4.1): useful FLOP/s over all ranks' peak.

    `tokens_per_second` is that of the whole run, `peak_flops` one rank's peak in FLOP/s. Recomputation is not
    useful work and does not count. With it in `flops_per_token` the same is HFU, hardware FLOPs utilization.
    """
    return tokens_per_second * flops_per_token / (peak_flops * ranks)
