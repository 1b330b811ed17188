"""Messages between the ranks of a pipeline: posted receives, and the time at which sends are complete."""

from __future__ import annotations

from functools import lru_cache

from phalanx.schedule.schedule import Action, Schedule, actions

MAX_POSTED_RECEIVES = 2
"""Number of receives on a link that a rank posts ahead of their use."""


def count_message_buffers(schedule: Schedule, rank: int) -> int:
    """Return the number of messages of a rank in memory: posted receives on each link to the rank, and one send."""
    return sum(
        min(count, MAX_POSTED_RECEIVES if rank == receiver else 1)
        for (sender, receiver), count in schedule.links.items()
        if rank in (sender, receiver)
    )


@lru_cache(maxsize=16)
def count_delivered_before(schedule: Schedule, rank: int) -> dict[Action, int]:
    """Count the messages of `rank` that the sender received before it sent each message to `rank`.

    When `rank` receives a message, it knows that this number of its own messages has arrived. Gloo does not report when
    a send is complete."""
    delivered: dict[Action, int] = {}
    for sender in range(schedule.ranks):
        if sender == rank:
            continue
        sent = [message for message, receiver in schedule.messages(rank) if receiver == sender]
        position = {message: index for index, message in enumerate(sent)}
        num_received = 0
        for step in schedule.orders[sender]:
            needed = [schedule.input_message(action) for action in actions(step)]
            num_received = max([num_received, *(position[message] + 1 for message in needed if message in position)])
            outputs = [schedule.output_message(action) for action in actions(step)]
            delivered |= {
                output: num_received for output in outputs if output is not None and schedule.receiver(output) == rank
            }
    return delivered
