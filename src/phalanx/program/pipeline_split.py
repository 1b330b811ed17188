"""Split of a model into pipeline stages, which minimizes the cost of the most expensive stage."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from phalanx.schedule.registry import representative_schedule
from phalanx.spec.errors import UserError
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks
from phalanx.spec.parts.flops import backward_product_flops, core_flops, product_flops
from phalanx.spec.parts.model import is_head_trained
from phalanx.spec.pipeline_schedules import V_SCHEDULES
from phalanx.spec.run import RunSpec


def layers_per_stage(run: RunSpec) -> list[range]:
    """Return the layers of every stage of a run's pipeline; the last has those for multi-token prediction.

    Raises:
        UserError: If there are more stages than layers.
    """
    stages = representative_schedule(run.layout).stages
    try:
        seq_len = run.layout.split_seq_len or run.training.seq_len
        *ranges, last = contiguous_ranges(_balanced_counts(run.model, seq_len, stages))
        return [*ranges, range(last.start, run.model.num_blocks)]
    except UserError as error:
        problem = f"results in {stages} stages, which {error.problem}"
        raise UserError("layout.pp", run.layout.pp, problem, fix=error.fix) from None


def layers_per_rank(run: RunSpec) -> list[list[int]]:
    """Return the layers of each pipeline rank, on all of its stages.

    Raises:
        UserError: If there are more stages than layers.
    """
    rank_layers: list[list[int]] = [[] for _ in range(run.layout.pp)]
    rank_of = representative_schedule(run.layout).rank_of
    for stage, layers in enumerate(layers_per_stage(run)):
        rank_layers[rank_of[stage]] += layers
    return rank_layers


def recomputed_layers(run: RunSpec) -> set[int]:
    """Return the layers that recompute activations."""
    return {
        layer
        for pp_rank, layers in enumerate(layers_per_rank(run))
        for layer in layers[: run.layout.recomputed_on_rank(pp_rank, len(layers))]
    }


@lru_cache  # the planner requests the same splits many times
def _balanced_counts(spec: ModelSpec, seq_len: int, stages: int) -> tuple[int, ...]:
    return tuple(balance_stages(layer_flops(spec, seq_len), stages))


def contiguous_ranges(counts: Sequence[int]) -> list[range]:
    """Return the layers of every stage, from the number of layers of each."""
    return [range(start, end) for start, end in pairwise([0, *accumulate(counts)])]


@lru_cache  # also requested many times
def block_flops(spec: ModelSpec, seq_len: int, causal: bool = True) -> tuple[float, ...]:
    """Return the FLOPs to train each block on one token, those for multi-token prediction included."""
    return tuple(
        sum(
            product_flops(branch.part)
            + backward_product_flops(branch.part)
            + 3 * core_flops(branch.part, seq_len, causal)
            for branch in block
        )
        for block in blocks(spec)
    )


@lru_cache
def layer_flops(spec: ModelSpec, seq_len: int, causal: bool = True) -> tuple[float, ...]:
    """Return the FLOPs to train the embedding, each block, and the head with multi-token prediction on one token.

    Their sum is `training_flops_per_token` plus 2 D for the embedding rows that are read and receive gradients.

    Args:
        seq_len: Tokens of a sequence.
        causal: Count half of the attention pairs.
    """
    costs = block_flops(spec, seq_len, causal)
    head_flops = 2.0 * (2 + is_head_trained(spec)) * spec.vocab_size * spec.hidden_size * spec.num_logits
    head = head_flops + sum(costs[spec.num_layers :])
    return 2.0 * spec.hidden_size, *costs[: spec.num_layers], head


def stage_costs(costs: Sequence[float], layers: Sequence[int]) -> list[float]:
    """Return the cost of each stage, from its number of blocks.

    The first stage also has the embedding, and the last what follows the last block.
    """
    totals = [sum(costs[1 + layer] for layer in stage_layers) for stage_layers in contiguous_ranges(layers)]
    totals[0] += costs[0]
    totals[-1] += costs[-1]
    return totals


def balance_stages(costs: Sequence[float], stages: int) -> list[int]:
    """Return the number of blocks of each stage that minimizes the cost of the most expensive stage.

    `costs` are those of the embedding, of each block and of the head. Each stage has at least one block, and the other
    stages are as even as possible.

    Raises:
        UserError: If there are more stages than blocks.
    """
    layers = len(costs) - 2
    if stages > layers:
        problem = f"are too many for a model of {layers} layers: each stage needs at least one"
        fix = (
            f"use at most {layers} stages (pipeline ranks x stages per rank, which is two for "
            f"{', '.join(V_SCHEDULES)} and searched schedules), or a deeper model"
        )
        raise UserError("stages", stages, problem, fix)
    embedding_cost, *blocks, head_cost = costs
    blocks[0] += embedding_cost
    blocks[-1] += head_cost
    prefix_costs = [0.0, *accumulate(blocks)]
    limit = _min_stage_cost(prefix_costs, stages)
    # reach[end]: the split of the first `end` blocks into stages with the minimum sum of squared costs, and its ends.
    reach: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stages_left in reversed(range(stages)):
        next_reach: dict[int, tuple[float, list[int]]] = {}
        for start, (squares, ends) in reach.items():
            for end in range(start + 1, layers - stages_left + 1):
                cost = prefix_costs[end] - prefix_costs[start]
                if cost > limit:
                    break
                if squares + cost**2 < next_reach.get(end, (inf, []))[0]:
                    next_reach[end] = squares + cost**2, [*ends, end]
        reach = next_reach
    return [end - start for start, end in pairwise([0, *reach[layers][1]])]


def _min_stage_cost(prefix_costs: Sequence[float], stages: int) -> float:
    """Return the minimum cost of the most expensive stage, with a margin for rounding.

    `prefix_costs` are the cumulative costs of the blocks.
    """
    num_blocks = len(prefix_costs) - 1

    def fits(limit: float) -> bool:
        """Return whether greedily filled stages cost at most `limit` each."""
        end = 0
        for _ in range(stages):
            end = bisect_right(prefix_costs, prefix_costs[end] + limit) - 1
        return end == num_blocks

    sums = {
        prefix_costs[end] - prefix_costs[start]
        for start in range(num_blocks)
        for end in range(start + 1, num_blocks + 1)
    }
    limits = sorted(size * (1 + 1e-12) for size in sums)
    return limits[bisect_left(limits, True, key=fits)]
