"""The published pipeline schedules, each from its rule.

p is the number of ranks (stages, unless ranks have several stages), m the number of micro-batches."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from phalanx.schedule.list_scheduling import list_schedule
from phalanx.schedule.schedule import Action, ActionKind, OverlappedPair, Schedule, ScheduleStep, actions
from phalanx.schedule.simulate import ActionTimes, Span, Timeline
from phalanx.spec.errors import UserError
from phalanx.spec.pipeline_schedules import ScheduleName


def naive(p: int, m: int) -> Schedule:
    """Return the schedule that sends one micro-batch after another through all stages and back."""
    return Schedule.from_rows([[Action(s, kind, i) for i in range(m) for kind in ("F", "B")] for s in range(p)])


def gpipe(p: int, m: int) -> Schedule:
    """Return all forward passes, then all backward passes, the last first (arXiv 1811.06965)."""
    return Schedule.from_rows(
        [*(Action(s, "F", i) for i in range(m)), *(Action(s, "B", i) for i in reversed(range(m)))] for s in range(p)
    )


def one_f_one_b(p: int, m: int) -> Schedule:
    """Return the 1F1B schedule: warm-up forward passes, then a forward and a backward pass in turn.

    The warm-up has one forward pass per later stage, so at most p micro-batches are in flight (arXiv 1806.03377; the
    non-interleaved schedule of 2104.04473, section 2.2.1)."""
    return Schedule.from_rows(
        _alternate_passes(_list_stage_actions(s, "F", m), _list_stage_actions(s, "B", m), p - 1 - s) for s in range(p)
    )


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """Return 1F1B over v stages per rank, with p micro-batches at a time through each.

    Stage s is on rank s mod p (arXiv 2104.04473, section 2.2.2). Raises UserError if p does not divide m.
    """
    if m % p:
        fix = f"use a multiple of {p} with interleaved"
        raise UserError("micro-batches", m, f"is not a multiple of the {p} ranks", fix=fix)
    chunk_micro_pairs = [(chunk, start + i) for start in range(0, m, p) for chunk in range(v) for i in range(p)]

    def order(rank: int) -> Iterator[ScheduleStep]:
        forward = [Action(chunk * p + rank, "F", micro) for chunk, micro in chunk_micro_pairs]
        backward = [Action((v - 1 - chunk) * p + rank, "B", micro) for chunk, micro in chunk_micro_pairs]
        return _alternate_passes(forward, backward, (v - 1) * p + 2 * (p - 1 - rank) if v > 1 else p - 1 - rank)

    return Schedule.from_rows(map(order, range(p)))


def zb_h1(p: int, m: int) -> Schedule:
    """Return ZB-H1: 1F1B with deferred weight halves (arXiv 2401.10241, section 2.2).

    Stage s runs the weight half of micro-batch i - s after the input half of i. Input halves thus do not wait for
    weight halves. At most p micro-batches are in flight on every rank."""

    def order(s: int) -> Iterator[ScheduleStep]:
        forward = deque(_list_stage_actions(s, "F", m))
        yield from (forward.popleft() for _ in range(min(p - s, m)))
        for i in range(m):
            yield Action(s, "I", i)
            if i >= s:
                yield Action(s, "W", i - s)
            if forward:
                yield forward.popleft()
        yield from (Action(s, "W", i) for i in range(max(m - s, 0), m))

    return Schedule.from_rows(map(order, range(p)))


def zb_h2(p: int, m: int) -> Schedule:
    """Return ZB-H2: input halves before forward passes before weight halves.

    Up to 2p - 1 micro-batches are in flight. From m = 2p - 1 on no rank idles between its first and its last action, if
    all three kinds take equal time (arXiv 2401.10241, section 2.3)."""
    return list_schedule(
        {s: [s] for s in range(p)},
        m,
        lambda action, _: ("IFW".index(action.kind),),
        limits=[2 * p - 1] * p,
        times=ActionTimes(),
    )


def zb_v(p: int, m: int) -> Schedule:
    """Return ZB-V: two stages per rank, s and 2p - 1 - s, in a V (arXiv 2401.10241, section 6).

    The last stage is on the rank of the first, so backward passes start there at once. Every rank has the activation
    memory of the first rank of 1F1B."""

    def order(rank: int) -> Iterator[ScheduleStep]:
        down = rank
        up = 2 * p - 1 - rank
        forward = {stage: deque(_list_stage_actions(stage, "F", num_micros)) for stage in (down, up)}
        input_grads = {stage: deque(_list_stage_actions(stage, "I", num_micros)) for stage in (down, up)}
        weight_grads: dict[int, deque[Action]] = {down: deque(), up: deque()}

        def split_backward(stage: int) -> Iterator[ScheduleStep]:
            yield (input_half := input_grads[stage].popleft())
            yield input_half._replace(kind="W")

        yield from (forward[down].popleft() for _ in range(2 * (p - rank) - 1))
        for _ in range(rank):
            yield forward[up].popleft()
            yield forward[down].popleft()
        for _ in range(p - rank):
            yield forward[up].popleft()
            yield from split_backward(up)
        while forward[up]:
            if forward[down]:
                yield forward[down].popleft()
            yield from split_backward(down)
            yield forward[up].popleft()
            yield from split_backward(up)
        # Weight halves are deferred, input halves continue.
        for _ in range(rank):
            for stage in (down, up):
                weight_grads[stage].append(input_grads[stage][0]._replace(kind="W"))
                yield input_grads[stage].popleft()
        while input_grads[down]:
            weight_grads[down].append(input_grads[down][0]._replace(kind="W"))
            yield input_grads[down].popleft()
            yield weight_grads[down].popleft()
        yield from (*weight_grads[up], *weight_grads[down])

    # Written for at least 2p - 1 micro-batches; with fewer, the missing ones are left out.
    num_micros = max(m, 2 * p - 1)
    return Schedule.from_rows(
        (step for step in order(rank) if isinstance(step, Action) and step.micro < m) for rank in range(p)
    )


def dualpipe_v(p: int, m: int) -> Schedule:
    """Return DualPipe-V: the stages of `zb_v` with overlapped forward and backward passes.

    Forward passes of one direction overlap with backward passes of the other, so that each hides the communication of
    the other's experts (github.com/deepseek-ai/DualPipe, dualpipev.py).

    Raises UserError for fewer micro-batches than stages."""
    if m < 2 * p:
        fix = f"use at least {2 * p} with dualpipe-v"
        raise UserError("micro-batches", m, f"is less than the {2 * p} stages", fix=fix)

    def order(rank: int) -> Iterator[ScheduleStep]:
        down = rank
        up = 2 * p - 1 - rank
        num_later_ranks = p - 1 - rank
        counts = defaultdict[tuple[int, str], int](int)
        deferred_weight_grads: deque[Action] = deque()

        def next_action(stage: int, kind: ActionKind) -> Action:
            direction = (stage, "F" if kind == "F" else "B")
            counts[direction] += 1
            return Action(stage, kind, counts[direction] - 1)

        def input_half(stage: int) -> Action:
            deferred_weight_grads.append((action := next_action(stage, "I"))._replace(kind="W"))
            return action

        def pop_weight_grad() -> Iterator[ScheduleStep]:
            if deferred_weight_grads:
                yield deferred_weight_grads.popleft()

        yield from (next_action(down, "F") for _ in range(2 * num_later_ranks))
        yield from (next_action(stage, "F") for _ in range(rank + 1) for stage in (down, up))
        for _ in range(num_later_ranks):
            yield input_half(up)
            yield from pop_weight_grad()
            yield next_action(up, "F")
        for i in range(m - 2 * p + rank + 1):
            pair = OverlappedPair(next_action(down, "F"), next_action(up, "B"))
            # Without overlap, the last rank is faster.
            yield from actions(pair) if i == 0 and rank == p - 1 else [pair]
            yield OverlappedPair(next_action(up, "F"), next_action(down, "B"))
        for _ in range(num_later_ranks):
            yield next_action(up, "B")
            yield OverlappedPair(next_action(up, "F"), next_action(down, "B"))
        # From half of the rest on weight halves are deferred, on even ranks starting with the stage below.
        remaining_stages = [stage for _ in range(rank + 1) for stage in (up, down)]
        num_full_backwards = (rank + 1) // 2 * 2 + (1 - rank % 2)
        yield from (
            next_action(stage, "B") if index < num_full_backwards else input_half(stage)
            for index, stage in enumerate(remaining_stages)
        )
        for _ in range(num_later_ranks):
            yield from pop_weight_grad()
            yield input_half(down)
        while deferred_weight_grads:
            yield from pop_weight_grad()

    return Schedule.from_rows(map(order, range(p)))


PUBLISHED: dict[ScheduleName, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
"""Rules by the names in run files and commands, of p ranks, m micro-batches and, with virtual stages, v."""


def _list_stage_actions(stage: int, kind: ActionKind, m: int) -> list[Action]:
    return [Action(stage, kind, i) for i in range(m)]


def _alternate_passes(forward: list[Action], backward: list[Action], num_ahead: int) -> Iterator[ScheduleStep]:
    """Yield `num_ahead` forward passes, then a forward and a backward pass in turn, then the rest."""
    num_ahead = min(num_ahead, len(forward))
    yield from forward[:num_ahead]
    for next_forward, next_backward in zip(forward[num_ahead:], backward, strict=False):
        yield next_forward
        yield next_backward
    yield from backward[len(forward) - num_ahead :]


def book_overlap(p: int, m: int) -> Timeline:
    """Return a lockstep timeline in which a stage may run a forward and a backward pass in one tick.

    The second pass is free, and the last stage runs both passes of the same micro-batch. With p = m = 4 the share of
    active stages is 25, 50, 75, 100, 75, 75, 100, 75, 50, 25 %, as in a book on networks for AI. On stage s (from 0)
    micro-batch i runs forward in tick s + i and backward in tick 2p - 2 - s + i. 1F1B is the closest real schedule
    (`one_f_one_b`)."""

    def step_at(s: int, tick: int) -> ScheduleStep | None:
        forward_micro = tick - s
        backward_micro = tick - (2 * p - 2 - s)
        forward = Action(s, "F", forward_micro) if 0 <= forward_micro < m else None
        backward = Action(s, "B", backward_micro) if 0 <= backward_micro < m else None
        return OverlappedPair(forward, backward) if forward and backward else forward or backward

    ticks = range(2 * p + m - 2)
    return Timeline(
        tuple(tuple(Span(step, t, t + 1) for t in ticks if (step := step_at(s, t)) is not None) for s in range(p))
    )


def active_fraction_per_tick(timeline: Timeline) -> list[float]:
    """Return the share of active ranks in each tick."""
    ticks = range(int(timeline.makespan))
    spans_by_rank = timeline.spans
    return [
        sum(any(start <= t < end for _, start, end in spans) for spans in spans_by_rank) / len(spans_by_rank)
        for t in ticks
    ]
