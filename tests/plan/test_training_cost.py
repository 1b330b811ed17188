"""The cost of a whole training: Llama 3's failures, and the agreement of its parts."""

import pytest

from phalanx.cli.views.plan_notes import format_training
from phalanx.cost.formulas.reliability import daly_interval_seconds, young_interval_seconds
from phalanx.plan.search.evaluate import evaluate_layout, parse_layout
from phalanx.plan.search.search import search_layouts
from phalanx.plan.training_cost import configured_goodput, estimate_training_cost
from phalanx.spec.errors import UserError
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.planned_runs import make_run


def test_training_cost_uses_llama3_failure_rate_by_default():
    """Llama 3 had a failure every 3.09 hours on 16,384 devices (arXiv 2407.21783)."""
    run = make_run("llama3-405b", sequence=8192, sequences=2048, cluster={"nodes": 2048})
    best = evaluate_layout(ResolvedRun(run, 16384), parse_layout("data_parallel=zero1,tp=8,pp=16"))
    cost = estimate_training_cost(ResolvedRun(run, 16384), best, 15.6e12)
    assert cost.mtbf_seconds / 3600 == pytest.approx(3.0931, abs=1e-3)
    assert cost.write_seconds == pytest.approx(cost.checkpoint_bytes / 2048e9)
    assert cost.days == pytest.approx(15.6e12 / best.tokens_per_second / 86400 / cost.goodput)
    assert 0.9 < cost.goodput < 0.95  # "higher than 90 %" (section 3.3.4)
    assert cost.rent is None
    assert cost.device_kwh == pytest.approx(0.7 * 16384 * 24 * cost.days)
    assert cost.checkpoint_bytes == pytest.approx(12 * 405.9e9, rel=0.001)


@pytest.mark.parametrize(
    ("cluster", "host_watts", "pue"),
    [
        ({}, 575, 1.56),  # DGX H100: 10.2 kW for a node, of which eight GPUs draw 5.6
        ({"host_watts_per_device": 250, "pue": 1.1}, 250, 1.1),
        ({"preset": "a100", "pue": 1}, 412.5, 1),  # DGX A100: 6.5 kW
        ({"preset": "l40s"}, 350 * 575 / 700, 1.56),  # no published node: the share of a DGX H100
    ],
)
def test_energy_has_cards_host_and_facility(cluster: dict[str, object], host_watts: float, pue: float) -> None:
    run = make_run(cluster={**cluster, "network_bytes_per_second": 25e9})
    (best,) = search_layouts(ResolvedRun(run, 8), keep=1).layouts
    cost = estimate_training_cost(ResolvedRun(run, 8), best)
    assert cost.device_kwh is not None
    assert cost.host_kwh == pytest.approx(cost.device_kwh * host_watts / (run.cluster.watts_per_device or 0))
    assert cost.facility_kwh == pytest.approx(pue * (cost.device_kwh + cost.host_kwh))
    (text,) = (line for line in format_training(run, cost) if "kWh" in line)
    assert text.startswith(f"energy at rated power, an upper limit: cards {cost.device_kwh:,.0f} kWh, ")
    assert text.endswith(f"facility {cost.facility_kwh:,.0f} kWh (PUE {pue:g})")


def test_training_cost_refuses_failures_faster_than_restarts() -> None:
    run = make_run(cluster={"failures_per_device_hour": 3600, "restart_seconds": 600})
    (best,) = search_layouts(ResolvedRun(run, 8), keep=1).layouts
    with pytest.raises(
        UserError, match=r"stops the run every 0.12 s, so that it never gets past a restart of 10.0 min"
    ):
        estimate_training_cost(ResolvedRun(run, 8), best)


def test_training_cost_follows_checkpoint_time_failures_and_prices():
    cluster = {
        "storage_bytes_per_second": 10e9,
        "price_per_device_hour": 2.0,
        "price_per_kwh": 0.1,
        "restart_seconds": 300,
    }
    run = make_run(cluster={**cluster, "failures_per_device_hour": 1e-3})
    (best,) = search_layouts(ResolvedRun(run, 8), keep=1).layouts
    cost = estimate_training_cost(ResolvedRun(run, 8), best)
    assert cost.tokens == run.training.steps * run.training.tokens_per_step
    assert cost.write_seconds == pytest.approx(12 * 8.03e9 / 10e9, rel=0.001)
    mtbf = cost.mtbf_seconds
    assert cost.young_interval_seconds == young_interval_seconds(cost.write_seconds, mtbf)
    assert cost.daly_interval_seconds == daly_interval_seconds(cost.write_seconds, mtbf)
    assert 0.9 < cost.goodput < 1
    assert cost.days == pytest.approx(cost.tokens / best.tokens_per_second / 86400 / cost.goodput)
    assert cost.rent == pytest.approx(2.0 * 8 * 24 * cost.days)
    assert cost.electricity == pytest.approx(0.1 * (cost.facility_kwh or 0))
    unreliable_run = make_run(cluster={**cluster, "failures_per_device_hour": 1e-1})
    unreliable_cost = estimate_training_cost(ResolvedRun(unreliable_run, 8), best)
    assert unreliable_cost.goodput < cost.goodput


def test_configured_goodput_never_exceeds_optimal_interval_goodput():
    """Goodput is equal at the optimal interval, and lower at shorter and longer ones."""
    cluster = {"storage_bytes_per_second": 1e9, "failures_per_device_hour": 0.05, "restart_seconds": 300}
    run = make_run(cluster=cluster)
    (option,) = search_layouts(ResolvedRun(run, 8), keep=1).layouts
    best = estimate_training_cost(ResolvedRun(run, 8), option)

    def goodput_at(every: int) -> float:
        checkpoint = run.checkpoint.model_copy(update={"every": every})
        goodput = configured_goodput(ResolvedRun(run.model_copy(update={"checkpoint": checkpoint}), 8), option)
        assert goodput is not None
        return goodput

    steps = round(best.interval_seconds / option.step_seconds)
    assert goodput_at(steps) == pytest.approx(best.goodput, rel=1e-3)
    assert max(goodput_at(max(1, steps // 4)), goodput_at(4 * steps)) < goodput_at(steps)


def test_configured_goodput_is_none_without_write_speed_or_interval():
    run = make_run()
    (option,) = search_layouts(ResolvedRun(run, 8), keep=1).layouts
    assert configured_goodput(ResolvedRun(run, 8), option) is None
    stored = make_run(cluster={"storage_bytes_per_second": 1e9})
    without_checkpoints = stored.model_copy(update={"checkpoint": stored.checkpoint.model_copy(update={"every": 0})})
    assert configured_goodput(ResolvedRun(without_checkpoints, 8), option) is None
