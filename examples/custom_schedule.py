"""Write a pipeline schedule of your own, check it, simulate it, and save it for a run.

The schedule is eager 1F1B (arXiv 2211.05322): like 1F1B with more forward passes in flight, which hide the transfers.

    python examples/custom_schedule.py
    phalanx train run.toml --nproc 4 --set layout.pp=4 --set layout.schedule_file=eager.csv
"""

from pathlib import Path

from phalanx.schedule.registry import build_schedule
from phalanx.schedule.schedule import Action, Schedule, to_csv
from phalanx.schedule.simulate import ActionTimes, in_flight_by_step, simulate
from phalanx.schedule.validate import check_schedule


def eager_1f1b(stages: int, micro_batches: int) -> Schedule:
    """Run up to 2 (stages - rank) - 1 forward passes ahead of the first backward pass."""
    orders = []
    for rank in range(stages):
        ahead = min(micro_batches, 2 * (stages - rank) - 1)
        order = [Action(rank, "F", micro) for micro in range(ahead)]
        for micro in range(micro_batches):
            order.append(Action(rank, "B", micro))
            if ahead + micro < micro_batches:
                order.append(Action(rank, "F", ahead + micro))
        orders.append(order)
    return Schedule.from_rows(orders)


times = ActionTimes(forward=1.0, input_grad=1.0, weight_grad=1.0, transfer=0.5)
schedules = {"1F1B": build_schedule("1f1b", 4, 8), "eager 1F1B": eager_1f1b(4, 8)}
for name, schedule in schedules.items():
    check_schedule(schedule)  # raises UserError with the first violations
    timeline, in_flight = simulate(schedule, times), max(in_flight_by_step(schedule, 0))
    print(f"{name}: {timeline.makespan:.1f} s, bubble {timeline.bubble:.1%}, {in_flight} micro-batches on rank 0")
Path("eager.csv").write_text(to_csv(schedules["eager 1F1B"]))
