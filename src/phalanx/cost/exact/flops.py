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
from phalanx.spec.degrees import parallel_dims
from phalanx.spec.model import ModelSpec
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
def forward_flops(spec: ModelSpec, sequence: int, causal: bool = True) -> ForwardFlops:
    """FLOPs of the forward pass on one token.

    2 per matrix-product parameter (Kaplan et al., arXiv 2001.08361, section 2.1), and attention's two products with the
    other tokens, 4 L H head_dim T (PaLM, arXiv 2204.02311, appendix B). PaLM counts every pair of tokens; `causal`
    counts the lower triangle only, half of them.
    """
    attention = sum(
        num_elements(s) for name, s in parameter_shapes(spec).items() if ".attention." in name and len(s) > 1
    )
    projections, head = 2.0 * attention, 2.0 * spec.vocab_size * spec.hidden_size
    core = 4 * spec.num_layers * spec.num_heads * spec.head_dim * sequence * (0.5 if causal else 1.0)
    return ForwardFlops(projections, core, 2 * count_parameters(spec).matmul - projections - head, head)


def forward_flops_per_token(spec: ModelSpec, sequence: int, causal: bool = True) -> float:
    """FLOPs of the forward pass on one token: a third of training's."""
    parts = forward_flops(spec, sequence, causal)
    return parts.blocks + parts.head


def training_flops_per_token(spec: ModelSpec, sequence: int, causal: bool = True) -> float:
    """FLOPs to train on one token: forward, and twice as many backward (Kaplan et al.), nothing computed twice."""
    return 3 * forward_flops_per_token(spec, sequence, causal)


def recomputed_flops_per_token(
    spec: ModelSpec,
    sequence: int,
    recompute: ActivationCheckpointing,
    *,
    flash: bool = True,
    sharded: bool = False,
    causal: bool = True,
) -> float:
    """FLOPs that the backward pass does once more on one token: what the planner's times have too (`cost.block`).

    Of attention's core alone (arXiv 2205.05198, section 5) none where `flash` kernels keep no scores; of operations'
    only products, which trainers on FSDP do again (`sharded`). What kernels do again inside themselves, such as flash
    attention's scores, is nowhere counted.
    """
    parts = forward_flops(spec, sequence, causal)
    return {
        ActivationCheckpointing.NONE: 0.0,
        ActivationCheckpointing.SELECTIVE: 0.0 if flash else parts.core,
        ActivationCheckpointing.OPERATIONS: SELECTIVE_MATMUL_FRACTION * (parts.projections + parts.mlp)
        if sharded
        else 0.0,
        ActivationCheckpointing.FULL: parts.blocks,
        ActivationCheckpointing.ATTENTION: parts.projections + parts.core,
    }[recompute]


def rank_flops(run: RunSpec, world_size: int, rank: int) -> float:
    """FLOPs of a rank's forward and backward passes in one update, of its shares of tensors and attention, with what it
    computes again; experts balanced."""
    sizes, cut, spec, layout = parallel_dims(run.layout, world_size), plan_batch(run, world_size), run.model, run.layout
    if rank < sizes.servers:
        return 0.0
    at = sizes.coordinates(rank)
    each, more = divmod(cut.global_batch_size, cut.dp_size)
    rows = each + (at["dp_replicate"] * sizes.dp_shard + at["dp_shard"] < more)
    tokens = rows * run.training.seq_len / sizes.cp
    held = rank_tensors(run, world_size, at["tp"])[at["pp"]]
    layers = layers_per_rank(run)[at["pp"]] if sizes.pp > 1 else range(spec.num_layers)
    products, of_attention = 0.0, 0.0
    for name, shape in held.all.items():
        if name.startswith("blocks.") and len(shape) > 1:
            flops = (
                2
                * tokens_through_parameter(name, run, tokens)
                * num_elements(shape[1:] if ".experts." in name else shape)
            )
            products, of_attention = products + flops, of_attention + flops * (".attention." in name)
    causal = not run.data.mask_documents  # of masked documents kernels compute every pair of tokens
    heads = -(-spec.num_heads // sizes.tp)
    core = 4 * heads * spec.head_dim * run.training.seq_len * (0.5 if causal else 1.0) * tokens * len(layers)
    again = {"none": 0.0, "selective": of_attention + core, "full": products + core}[layout.activation_checkpointing]
    head = lm_head_shape(run, held, at["pp"])
    return 3 * (products + core) + again + (6 * tokens * num_elements(head) if head else 0)


def tokens_through_parameter(name: str, run: RunSpec, tokens: float) -> float:
    """Of a rank's tokens those that a tensor multiplies; of stacked experts the rows that all of them are given,
    balanced."""
    layout, moe = run.layout, run.model.moe
    here = tokens / layout.tp if layout.sequence_parallel else tokens
    if moe is not None and ".experts." in name:
        return (here if layout.ep > 1 else tokens) * moe.top_k * min(1.0, moe.capacity_factor or 1.0)
    return here if ".router." in name else tokens


def lm_head_shape(run: RunSpec, held: RankTensors, place: int) -> Shape | None:
    """Of what the ranks at this place of the pipeline compute logits with, which may be the embedding; None where they
    do not."""
    if run.layout.pp > 1 and representative_schedule(run.layout).end_ranks[1] != place:
        return None
    return held.tied_embedding_copy or held.dense.get("head.weight") or held.dense["embedding.weight"]


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops: float, ranks: int) -> float:
    """Model FLOPs utilization (PaLM, arXiv 2204.02311, section 4.1): useful FLOP/s over all ranks' peak.

    `tokens_per_second` is that of the whole run, `peak_flops` one rank's peak in FLOP/s. Recomputation is not
    useful work and does not count. With it in `flops_per_token` the same is HFU, hardware FLOPs utilization.
    """
    return tokens_per_second * flops_per_token / (peak_flops * ranks)
