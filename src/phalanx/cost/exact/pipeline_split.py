"""Where a pipeline cuts the model: what each part costs, and the cut in which the slowest stage is fastest."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from phalanx.cost.exact.parameter_shapes import num_elements, parameter_shapes
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.errors import UserError
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import RunSpec


def layers_per_stage(run: RunSpec) -> list[range]:
    """The layers of every stage of a run's pipeline.

    Raises UserError if there are more stages than layers.
    """
    stages = representative_schedule(run.layout).stages
    try:
        return contiguous_ranges(_balanced_counts(run.model, run.training.seq_len, stages))
    except UserError as error:
        problem = f"makes {stages} stages, which {error.problem}"
        raise UserError("layout.pp", run.layout.pp, problem, fix=error.fix) from None


def layers_per_rank(run: RunSpec) -> list[list[int]]:
    """The layers of each rank of a run's pipeline, on all of its stages.

    Raises UserError if there are more stages than layers.
    """
    rank_layers: list[list[int]] = [[] for _ in range(run.layout.pp)]
    rank_of = representative_schedule(run.layout).rank_of
    for stage, layers in enumerate(layers_per_stage(run)):
        rank_layers[rank_of[stage]] += layers
    return rank_layers


@lru_cache  # the planner asks for the same cuts many times
def _balanced_counts(spec: ModelSpec, seq_len: int, stages: int) -> tuple[int, ...]:
    return tuple(balance_stages(layer_flops(spec, seq_len), stages))


def contiguous_ranges(counts: Sequence[int]) -> list[range]:
    """The layers of every stage, from how many each has."""
    return [range(start, end) for start, end in pairwise([0, *accumulate(counts)])]


@lru_cache  # likewise
def layer_flops(spec: ModelSpec, seq_len: int, causal: bool = True) -> tuple[float, ...]:
    """FLOPs to train on one token, of the embedding, of each block, and of the last norm with the head: their sum is
    `training_flops_per_token` and, for the rows of the embedding that are read and whose gradients are added, 2 D."""
    attention_flops = 12 * spec.num_heads * spec.head_dim * seq_len * (0.5 if causal else 1.0)
    blocks = [attention_flops] * spec.num_layers
    for name, shape in parameter_shapes(spec).items():
        owner, _, rest = name.partition(".")
        if owner == "blocks" and len(shape) >= 2:
            layer, _, tensor = rest.partition(".")
            active_fraction = spec.moe.top_k / spec.moe.num_experts if spec.moe and ".experts." in f".{tensor}" else 1.0
            blocks[int(layer)] += 6 * num_elements(shape) * active_fraction
    return 2.0 * spec.hidden_size, *blocks, 6.0 * spec.vocab_size * spec.hidden_size


def stage_costs(costs: Sequence[float], layers: Sequence[int]) -> list[float]:
    """What each stage costs, of so many blocks: the first has the embedding, the last the head."""
    totals = [sum(costs[1 + layer] for layer in stage_layers) for stage_layers in contiguous_ranges(layers)]
    totals[0] += costs[0]
    totals[-1] += costs[-1]
    return totals


def balance_stages(costs: Sequence[float], stages: int) -> list[int]:
    """How many blocks each stage has, where `costs` are those of the embedding, of each block and of the head: each has
    one at least, the costliest stage costs as little as can be, and the rest are as even as this leaves them.

    Raises UserError if there are more stages than blocks.
    """
    layers = len(costs) - 2
    if stages > layers:
        raise UserError(
            "stages",
            stages,
            f"are too many for a model of {layers} layers; each needs one at least",
            fix=f"use at most {layers} in all (ranks x stages of each: two with zb-v, dualpipe-v and searched "
            f"schedules), "
            "or a deeper model",
        )
    embedding_cost, *blocks, head_cost = costs
    blocks[0] += embedding_cost
    blocks[-1] += head_cost
    prefix_costs = [0.0, *accumulate(blocks)]
    limit = _min_stage_cost(prefix_costs, stages)
    # reach[end]: the cut of the first `end` blocks into the stages so far whose squares add up to least, and its ends.
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
    """The least that the costliest of so many stages can cost, of blocks whose costs add up to `prefix_costs`; a little
    more, for sums that are rounded."""
    num_blocks = len(prefix_costs) - 1

    def fits(limit: float) -> bool:
        """Whether no stage costs more, each having as many blocks as it can."""
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
