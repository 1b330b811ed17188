"""Search for a schedule that is better than the published ones, for given times and a memory limit.

The best published schedule is improved by moving single actions (simulated annealing, Science 220:671, 1983)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from phalanx.schedule.list_scheduling import list_schedule
from phalanx.schedule.published import dualpipe_v, one_f_one_b, zb_h1, zb_h2, zb_v
from phalanx.schedule.schedule import Action, ActionKind, Schedule
from phalanx.schedule.simulate import ActionTimes, peak_activations, simulate
from phalanx.spec.errors import UserError

INFEASIBLE = (math.inf, math.inf)
"""Cost of an order that deadlocks or exceeds the memory limit."""


def search_schedule(
    p: int, m: int, times: ActionTimes, limit: Fraction, chunks: int = 2, moves: int = 20_000
) -> Schedule:
    """Return a schedule of split backward passes for p ranks and m micro-batches.

    Its makespan is at most that of every published schedule of such stages within the memory limit. `limit` is the
    maximum number of micro-batches in flight per rank, in units of all of its stages (`peak_activations`). A rank has
    `chunks` stages: 1, or 2 in a V. The sequence of `moves` is deterministic. Raises UserError if the limit is less
    than one micro-batch.
    """
    if limit < 1:
        raise UserError("memory limit", str(limit), "is less than one micro-batch", fix="use at least 1")
    published = [one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m)] if chunks == 1 else [zb_v(p, m)]
    if chunks == 2 and m >= 2 * p:
        published.append(dualpipe_v(p, m))
    candidates = [
        schedule
        for schedule in map(split_backward_passes, published)
        if max(peak_activations(schedule, rank) for rank in range(p)) <= limit
    ]
    stages = {rank: [rank, 2 * p - 1 - rank][:chunks] for rank in range(p)}
    max_in_flight = math.floor(limit * chunks)
    for kinds in ("IFW", "FIW", "IWF"):

        def priority(action: Action, _: int, kinds: str = kinds) -> tuple[int, ...]:
            return kinds.index(action.kind), -action.stage

        candidates.append(list_schedule(stages, m, priority, limits=[max_in_flight] * p, times=times))
    best = min(candidates, key=lambda schedule: simulate(schedule, times).makespan)
    return _anneal(best, times, max_in_flight, moves)


def split_backward_passes(schedule: Schedule) -> Schedule:
    """Return the schedule with every full backward pass as two consecutive halves, without overlap."""
    halves: dict[ActionKind, tuple[ActionKind, ...]] = {"F": ("F",), "B": ("I", "W"), "I": ("I",), "W": ("W",)}
    return Schedule.from_rows(
        [action._replace(kind=kind) for action in schedule.actions(rank) for kind in halves[action.kind]]
        for rank in range(schedule.ranks)
    )


@dataclass(frozen=True)
class _DependencyGraph:
    """The actions of a schedule as indices, for fast timing of thousands of orders."""

    prerequisites: list[list[tuple[int, float]]]
    """Actions that must finish before each action starts, and the minimum delay in between."""
    seconds: list[float]
    in_flight_changes: list[int]
    """1 for an action that allocates activations, -1 for an action that frees them."""


def _anneal(schedule: Schedule, times: ActionTimes, max_in_flight: int, moves: int) -> Schedule:
    """Move one action of one rank at a time; accept worse orders with a probability that falls to 0."""
    rng = random.Random(0)
    all_actions = [action for rank in range(schedule.ranks) for action in schedule.actions(rank)]
    graph = _build_graph(schedule, all_actions, times)
    min_seconds = min(filter(None, graph.seconds), default=1.0)
    indices = iter(range(len(all_actions)))
    orders = [[next(indices) for _ in order] for order in schedule.orders]
    cost = _evaluate_orders(graph, orders)
    best_cost = cost
    best_orders = [*orders]
    for move in range(moves):
        # Cost increases of this size are accepted one time in e.
        temperature = 0.2 * min_seconds * (1 - move / moves) ** 2
        rank = rng.randrange(len(orders))
        old_order = orders[rank]
        orders[rank] = _move_action(orders[rank], rng, 2 * len(orders))
        peak_in_flight = max(accumulate(graph.in_flight_changes[index] for index in orders[rank]))
        new_cost = _evaluate_orders(graph, orders) if peak_in_flight <= max_in_flight else INFEASIBLE
        cost_increase = new_cost[0] - cost[0] + 0.3 * (new_cost[1] - cost[1]) / len(orders)
        if cost_increase <= 0 or rng.random() < math.exp(-cost_increase / (temperature + 1e-12)):
            cost = new_cost
            if cost < best_cost:
                best_cost = cost
                best_orders = [*orders]
        else:
            orders[rank] = old_order
    return Schedule.from_rows([all_actions[index] for index in order] for order in best_orders)


def _build_graph(schedule: Schedule, all_actions: list[Action], times: ActionTimes) -> _DependencyGraph:
    index_of = {action: index for index, action in enumerate(all_actions)}
    rank_of = schedule.rank_of

    def dependency_edges(action: Action) -> Iterator[tuple[int, float]]:
        for alternatives in schedule.dependencies(action):
            (dependency,) = (alternative for alternative in alternatives if alternative in index_of)
            is_same_rank = rank_of[dependency.stage] == rank_of[action.stage]
            yield index_of[dependency], 0.0 if is_same_rank else float(times.transfer)

    return _DependencyGraph(
        [list(dependency_edges(action)) for action in all_actions],
        [float(times.action_time(action)) for action in all_actions],
        [{"F": 1, "W": -1}.get(action.kind, 0) for action in all_actions],
    )


def _move_action(order: list[int], rng: random.Random, max_distance: int) -> list[int]:
    """Return the order with one action at another position, often exchanged with its neighbor."""
    source = rng.randrange(len(order))
    distance = rng.randint(1, max_distance) if rng.random() < 0.5 else 1
    target = min(max(source + rng.choice((-distance, distance)), 0), len(order) - 1)
    remaining = order[:source] + order[source + 1 :]
    return [*remaining[:target], order[source], *remaining[target:]]


def _evaluate_orders(graph: _DependencyGraph, orders: list[list[int]]) -> tuple[float, float]:
    """Return the makespan, and the sum of the ranks' finish times as a tie-breaker.

    Both are infinite for an order that deadlocks."""
    end_times: list[float | None] = [None] * len(graph.seconds)
    next_index = [0] * len(orders)
    clocks = [0.0] * len(orders)
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(orders):
            while next_index[rank] < len(order):
                action = order[next_index[rank]]
                start = clocks[rank]
                for dependency, delay in graph.prerequisites[action]:
                    if (end := end_times[dependency]) is None:
                        break
                    start = max(start, end + delay)
                else:
                    clocks[rank] = end_times[action] = start + graph.seconds[action]
                    next_index[rank] += 1
                    progressed = True
                    continue
                break
    is_deadlocked = any(num_done < len(order) for num_done, order in zip(next_index, orders, strict=True))
    return INFEASIBLE if is_deadlocked else (max(clocks), sum(clocks))
