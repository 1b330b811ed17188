"""A better order than the published ones, for given times and a limit of memory: the best of these, improved by moving
single actions about (simulated annealing, Science 220:671, 1983)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from phalanx.schedule.list_scheduling import PriorityFunction, list_schedule
from phalanx.schedule.published import dualpipe_v, one_f_one_b, zb_h1, zb_h2, zb_v
from phalanx.schedule.schedule import Action, ActionKind, Schedule
from phalanx.schedule.simulate import ActionTimes, peak_activations, simulate
from phalanx.spec.errors import UserError


def search_schedule(
    p: int, m: int, times: ActionTimes, limit: Fraction, chunks: int = 2, moves: int = 20_000
) -> Schedule:
    """An order of split backward passes whose makespan is at most that of every published one of such stages that holds
    no more than `limit` micro-batches of all of a rank's stages (`peak_activations`).

    `chunks` are the stages of a rank: 1, or 2 laid like a V. `moves` are tried, always the same ones.

    Raises UserError for a limit of less than one micro-batch.
    """
    if limit < 1:
        raise UserError("memory limit", str(limit), "is less than one micro-batch", "allow 1 or more")
    known = [split_backward_passes(schedule) for schedule in _published(p, m, chunks)]
    fitting = [one for one in known if max(peak_activations(one, rank) for rank in range(p)) <= limit]
    stages = {rank: [rank, 2 * p - 1 - rank][:chunks] for rank in range(p)}
    places = [math.floor(limit * chunks)] * p
    fitting += [list_schedule(stages, m, _by(kinds), places, times) for kinds in ("IFW", "FIW", "IWF")]
    best = min(fitting, key=lambda schedule: simulate(schedule, times).makespan)
    return _improved(best, times, places[0], moves)


def split_backward_passes(schedule: Schedule) -> Schedule:
    """The schedule with every whole backward pass as its two halves, one after the other, and nothing overlapped."""
    halves: dict[ActionKind, tuple[ActionKind, ...]] = {"F": ("F",), "B": ("I", "W"), "I": ("I",), "W": ("W",)}
    return Schedule.from_rows(
        [action._replace(kind=kind) for action in schedule.actions(rank) for kind in halves[action.kind]]
        for rank in range(schedule.ranks)
    )


def _by(kinds: str) -> PriorityFunction:
    """These kinds before those, and later stages before earlier ones."""
    return lambda action, _: (kinds.index(action.kind), -action.stage)


def _published(p: int, m: int, chunks: int) -> Iterator[Schedule]:
    if chunks == 1:
        yield from (one_f_one_b(p, m), zb_h1(p, m), zb_h2(p, m))
        return
    yield zb_v(p, m)
    if m >= 2 * p:
        yield dualpipe_v(p, m)


@dataclass(frozen=True)
class _Graph:
    """The actions of a schedule as numbers, so that thousands of orders can be timed."""

    needs: list[list[tuple[int, float]]]
    """What must end before each begins, and how long before."""
    seconds: list[float]
    holds: list[int]
    """1 for an action that begins to hold activations, -1 for one that gives them back."""


def _improved(schedule: Schedule, times: ActionTimes, places: int, moves: int) -> Schedule:
    """Move one action of one rank at a time; worse orders are kept with a probability that falls to none."""
    draw = random.Random(0)
    numbered = [action for rank in range(schedule.ranks) for action in schedule.actions(rank)]
    graph = _graph(schedule, numbered, times)
    count = iter(range(len(numbered)))
    orders = [[next(count) for _ in order] for order in schedule.orders]
    cost = _cost(graph, orders)
    best, best_orders = cost, [*orders]
    unit = min(filter(None, graph.seconds), default=1.0)
    for move in range(moves):
        warmth = 0.2 * unit * (1 - move / moves) ** 2
        rank = draw.randrange(len(orders))
        before, orders[rank] = orders[rank], _moved(orders[rank], draw, 2 * len(orders))
        worse = math.inf
        if _most_held(graph, orders[rank]) <= places:
            tried = _cost(graph, orders)
            worse = _difference(tried, cost, len(orders))
        if worse <= 0 or draw.random() < math.exp(-worse / (warmth + 1e-12)):
            cost = tried
            if cost < best:
                best, best_orders = cost, [*orders]
        else:
            orders[rank] = before
    return Schedule.from_rows([numbered[at] for at in order] for order in best_orders)


def _graph(schedule: Schedule, numbered: list[Action], times: ActionTimes) -> _Graph:
    number = {action: at for at, action in enumerate(numbered)}
    rank_of = schedule.rank_of

    def needs(action: Action) -> Iterator[tuple[int, float]]:
        for needed in schedule.dependencies(action):
            (there,) = (one for one in needed if one in number)
            near = rank_of[there.stage] == rank_of[action.stage]
            yield number[there], 0.0 if near else float(times.transfer)

    return _Graph(
        [list(needs(action)) for action in numbered],
        [float(times.of_action(action)) for action in numbered],
        [{"F": 1, "W": -1}.get(action.kind, 0) for action in numbered],
    )


def _moved(order: list[int], draw: random.Random, reach: int) -> list[int]:
    """The order with one action elsewhere, often its neighbour's place."""
    here = draw.randrange(len(order))
    far = draw.randint(1, reach) if draw.random() < 0.5 else 1
    there = min(max(here + draw.choice((-far, far)), 0), len(order) - 1)
    rest = order[:here] + order[here + 1 :]
    return [*rest[:there], order[here], *rest[there:]]


def _most_held(graph: _Graph, order: list[int]) -> int:
    return max(accumulate(graph.holds[at] for at in order))


def _cost(graph: _Graph, orders: list[list[int]]) -> tuple[float, float]:
    """The makespan, and the sum of the ranks' ends, which tells orders of one makespan apart; infinite for an order in
    which ranks wait for each other for ever."""
    ends: list[float | None] = [None] * len(graph.seconds)
    at, clock = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action, start = order[at[rank]], clock[rank]
                for needed, before in graph.needs[action]:
                    if (end := ends[needed]) is None:
                        break
                    start = max(start, end + before)
                else:
                    clock[rank] = ends[action] = start + graph.seconds[action]
                    at[rank] += 1
                    moved = True
                    continue
                break
    stuck = any(done < len(order) for done, order in zip(at, orders, strict=True))
    return (math.inf, math.inf) if stuck else (max(clock), sum(clock))


def _difference(tried: tuple[float, float], cost: tuple[float, float], ranks: int) -> float:
    return tried[0] - cost[0] + 0.3 * (tried[1] - cost[1]) / ranks
