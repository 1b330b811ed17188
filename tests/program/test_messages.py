from __future__ import annotations

import pytest

from phalanx.program.messages import count_delivered_before, count_message_buffers
from phalanx.schedule.published import PUBLISHED
from phalanx.schedule.registry import build_schedule
from phalanx.schedule.schedule import Action, actions
from phalanx.schedule.simulate import ActionTimes, simulate


def test_message_buffers_are_two_posted_receives_and_one_send_per_link() -> None:
    schedule = build_schedule("1f1b", 4, 8)
    assert [count_message_buffers(schedule, rank) for rank in range(4)] == [3, 6, 6, 3]
    assert count_message_buffers(build_schedule("1f1b", 2, 1), 0) == 2


def test_delivered_before_counts_earlier_messages_of_1f1b() -> None:
    schedule = build_schedule("1f1b", 2, 4)
    # Rank 0: F0 F1 B0 F2 B1 F3 B2 B3. Its F2 comes after the gradient of micro-batch 0, its F3 after that of 1.
    assert count_delivered_before(schedule, 1) == {
        Action(0, "F", micro): count for micro, count in enumerate((0, 0, 1, 2))
    }
    # Rank 1: F0 B0 F1 B1 ...: the gradient of a micro-batch comes after its activation.
    assert count_delivered_before(schedule, 0) == {Action(1, "B", micro): micro + 1 for micro in range(4)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_delivered_before_counts_only_messages_arrived_in_simulation(name: str) -> None:
    """In a simulation, the messages that another one confirms have arrived before the step that sends it begins."""
    schedule = build_schedule(name, 4, 8)
    step_start: dict[Action, float] = {}
    sent_at: dict[Action, float] = {}
    for spans in simulate(schedule, ActionTimes(transfer=0.5)).spans:
        for span in spans:
            for action in actions(span.step):
                output = schedule.output_message(action)
                if output is not None:
                    step_start[output], sent_at[output] = float(span.start), float(span.end)
    num_confirmed = 0
    for rank in range(4):
        sent = [message for message, _ in schedule.messages(rank)]
        for message, count in count_delivered_before(schedule, rank).items():
            confirmed = [other for other in sent if schedule.receiver(other) == schedule.rank_of[message.stage]][:count]
            assert all(sent_at[other] + 0.5 <= step_start[message] for other in confirmed), message
            num_confirmed += count
    assert num_confirmed > 0
