"""Cost of a full training run: failures, checkpoints, energy and money."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.exact.model_state import model_state_bytes, optimizer_kind
from phalanx.cost.exact.parameters import count_parameters
from phalanx.cost.formulas.energy import energy_cost, energy_kwh, rental_cost
from phalanx.cost.formulas.reliability import (
    LLAMA3,
    NODE_STORAGE_BYTES_PER_SECOND,
    daly_interval_seconds,
    days_to,
    goodput,
    mtbf_seconds,
    optimal_interval_seconds,
    reliability,
    young_interval_seconds,
)
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.plan.tables.machine_columns import host_watts
from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.errors import UserError
from phalanx.spec.formatting import format_duration
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Cost of a full training run with one layout; None if the cluster lacks the required power or price."""

    tokens: float
    days: float
    """Duration, including failures."""
    mtbf_seconds: float
    checkpoint_bytes: int
    """Bytes of parameters and optimizer state; gradients are not saved."""
    write_seconds: float
    interval_seconds: float
    """Seconds of work between two checkpoints, with the maximum goodput."""
    interval_steps: int
    """The same in predicted steps, at least one."""
    young_interval_seconds: float
    daly_interval_seconds: float
    """Optimal interval by the published approximations of first and of higher order."""
    goodput: float
    """Fraction of wall-clock time spent on work that is never lost."""
    device_hours: float
    device_kwh: float | None
    """Energy of the devices at their rated power. This and the following two are upper limits of what a run draws."""
    host_kwh: float | None
    """Energy of the rest of their nodes."""
    facility_kwh: float | None
    """Energy of the data center: that of devices and nodes, multiplied by `cluster.pue`."""
    electricity: float | None
    """Price of `facility_kwh`."""
    rent: float | None


def estimate_training_cost(
    resolved: ResolvedRun, evaluated: EvaluatedLayout, tokens: float | None = None
) -> TrainingCost:
    """Return the cost of training on `tokens`.

    By default, the tokens are those of the run.
    """
    run = resolved.run
    cluster = run.cluster
    world_size = resolved.world_size
    if tokens is None and run.training.seconds is not None:
        tokens = run.training.seconds * evaluated.tokens_per_second
    tokens = tokens or run.training.steps * run.training.tokens_per_step
    rate = failure_rate(run)
    checkpoint_bytes = _checkpoint_bytes(run)
    storage_speed = cluster.storage_bytes_per_second or NODE_STORAGE_BYTES_PER_SECOND * cluster.nodes
    write_seconds = checkpoint_bytes / storage_speed
    availability = reliability(rate, world_size, write_seconds, cluster.restart_seconds)
    mtbf = availability.mtbf_seconds
    if not availability.goodput:
        problem = f"stops the run every {format_duration(mtbf)}, so that it never gets past a restart of "
        problem += format_duration(cluster.restart_seconds)
        fix = "decrease it (with --mtbf, give more time), or cluster.restart_seconds"
        raise UserError("cluster.failures_per_device_hour", rate, problem, fix)
    days = days_to(tokens, evaluated.tokens_per_second, availability.goodput)
    hours = 24 * days
    return TrainingCost(
        tokens=tokens,
        days=days,
        mtbf_seconds=mtbf,
        checkpoint_bytes=checkpoint_bytes,
        write_seconds=write_seconds,
        interval_seconds=availability.interval_seconds,
        interval_steps=max(1, round(availability.interval_seconds / evaluated.step_seconds)),
        young_interval_seconds=young_interval_seconds(write_seconds, mtbf),
        daly_interval_seconds=daly_interval_seconds(write_seconds, mtbf),
        goodput=availability.goodput,
        **_estimate_energy(cluster, world_size, hours),
        device_hours=world_size * hours,
        rent=rental_cost(world_size, hours, cluster.price_per_device_hour) if cluster.price_per_device_hour else None,
    )


def _estimate_energy(cluster: ClusterSpec, world_size: int, hours: float) -> dict[str, float | None]:
    """Return the energy of devices, nodes and data center, and its price: None without the power of a device."""
    device_watts = cluster.watts_per_device
    node_watts = host_watts(cluster)
    if device_watts is None or node_watts is None:
        return dict.fromkeys(("device_kwh", "host_kwh", "facility_kwh", "electricity"))
    total_watts = device_watts + node_watts
    price = cluster.price_per_kwh
    return {
        "device_kwh": energy_kwh(device_watts, world_size, hours),
        "host_kwh": energy_kwh(node_watts, world_size, hours),
        "facility_kwh": energy_kwh(total_watts, world_size, hours, cluster.pue),
        "electricity": energy_cost(total_watts, world_size, hours, price_per_kwh=price, pue=cluster.pue)
        if price
        else None,
    }


def configured_goodput(resolved: ResolvedRun, evaluated: EvaluatedLayout) -> float | None:
    """Return the goodput with the run's own checkpoint interval.

    The result is None if the run writes no checkpoints on the way, or if the storage speed is unknown.
    """
    run = resolved.run
    checkpoint_interval = run.checkpoint.every
    storage_speed = run.cluster.storage_bytes_per_second
    if not checkpoint_interval or storage_speed is None:
        return None
    write_seconds = _checkpoint_bytes(run) / storage_speed
    mtbf = mtbf_seconds(failure_rate(run), resolved.world_size)
    interval_seconds = (
        optimal_interval_seconds(write_seconds, mtbf)
        if checkpoint_interval == "auto"
        else checkpoint_interval * evaluated.step_seconds
    )
    return goodput(interval_seconds, write_seconds, mtbf, run.cluster.restart_seconds)


def failure_rate(run: RunSpec) -> float:
    """Return the failures per hour and device: those of the run file, or else those that Llama 3 reported."""
    return run.cluster.failures_per_device_hour or LLAMA3.per_device_hour


def _checkpoint_bytes(run: RunSpec) -> int:
    """Return the bytes of a checkpoint: of parameters and optimizer state."""
    state = model_state_bytes(count_parameters(run.model), optimizer_kind(run.optimizer), run.training.precision)
    return state.parameters + state.optimizer
