"""A whole training: Llama 3's failures, and that parts agree with each other."""

import pytest

from phalanx.cli.views.plan_notes import format_training
from phalanx.cost.formulas.reliability import daly_interval_seconds, young_interval_seconds
from phalanx.plan.search.evaluate import evaluate_layout, parse_layout
from phalanx.plan.search.search import search_layouts
from phalanx.plan.training_cost import configured_goodput, estimate_training_cost
from tests.helpers.planned_runs import make_run


def test_training_cost_uses_llama3_failure_rate_by_default():
    """One in 3.09 hours on 16,384 devices (arXiv 2407.21783)."""
    described = make_run("llama3-405b", sequence=8192, sequences=2048, cluster={"nodes": 2048})
    best = evaluate_layout(described, 16384, parse_layout("data_parallel=zero1,tp=8,pp=16"))
    found = estimate_training_cost(described, 16384, best, 15.6e12)
    assert found.mtbf_seconds / 3600 == pytest.approx(3.0931, abs=1e-3)
    assert (found.goodput, found.interval_seconds, found.rent) == (None, None, None)
    assert found.days == pytest.approx(15.6e12 / best.tokens_per_second / 86400)
    assert found.device_kwh == pytest.approx(0.7 * 16384 * 24 * found.days)
    assert found.checkpoint_bytes == pytest.approx(12 * 405.9e9, rel=0.001)


@pytest.mark.parametrize(
    ("cluster", "host_watts", "pue"),
    [
        ({}, 575, 1.56),  # DGX H100: 10.2 kW for a node, of which eight cards draw 5.6
        ({"host_watts_per_device": 250, "pue": 1.1}, 250, 1.1),
        ({"preset": "a100", "pue": 1}, 412.5, 1),  # DGX A100: 6.5 kW
        ({"preset": "l40s"}, 350 * 575 / 700, 1.56),  # no published node: the share of a DGX H100
    ],
)
def test_energy_has_cards_host_and_facility(cluster: dict[str, object], host_watts: float, pue: float) -> None:
    described = make_run(cluster={**cluster, "network_bytes_per_second": 25e9})
    (best,) = search_layouts(described, 8, keep=1).layouts
    found = estimate_training_cost(described, 8, best)
    assert found.device_kwh is not None
    assert found.host_kwh == pytest.approx(found.device_kwh * host_watts / (described.cluster.watts_per_device or 0))
    assert found.facility_kwh == pytest.approx(pue * (found.device_kwh + found.host_kwh))
    (text,) = (line for line in format_training(described, found) if "kWh" in line)
    assert text.startswith(f"energy at rated power, an upper limit: cards {found.device_kwh:,.0f} kWh, ")
    assert text.endswith(f"facility {found.facility_kwh:,.0f} kWh (PUE {pue:g})")


def test_training_cost_follows_checkpoint_time_failures_and_prices():
    cluster = {
        "storage_bytes_per_second": 10e9,
        "price_per_device_hour": 2.0,
        "price_per_kwh": 0.1,
        "restart_seconds": 300,
    }
    described = make_run(cluster={**cluster, "failures_per_device_hour": 1e-3})
    (best,) = search_layouts(described, 8, keep=1).layouts
    found = estimate_training_cost(described, 8, best)
    assert found.tokens == described.training.steps * described.training.tokens_per_step
    assert found.write_seconds == pytest.approx(12 * 8.03e9 / 10e9, rel=0.001)
    mtbf = found.mtbf_seconds
    assert found.young_interval_seconds == young_interval_seconds(found.write_seconds or 0, mtbf)
    assert found.daly_interval_seconds == daly_interval_seconds(found.write_seconds or 0, mtbf)
    assert found.goodput is not None
    assert 0.9 < found.goodput < 1
    assert found.days == pytest.approx(found.tokens / best.tokens_per_second / 86400 / found.goodput)
    assert found.rent == pytest.approx(2.0 * 8 * 24 * found.days)
    assert found.electricity == pytest.approx(0.1 * (found.facility_kwh or 0))
    often = make_run(cluster={**cluster, "failures_per_device_hour": 1e-1})
    worse = estimate_training_cost(often, 8, best)
    assert worse.goodput is not None
    assert worse.goodput < found.goodput


def test_configured_goodput_never_exceeds_optimal_interval_goodput():
    """It keeps as much where it is the best, and less where it is shorter or longer."""
    cluster = {"storage_bytes_per_second": 1e9, "failures_per_device_hour": 0.05, "restart_seconds": 300}
    described = make_run(cluster=cluster)
    (option,) = search_layouts(described, 8, keep=1).layouts
    best = estimate_training_cost(described, 8, option)
    assert best.goodput is not None
    assert best.interval_seconds is not None

    def kept(every: int) -> float:
        checkpoint = described.checkpoint.model_copy(update={"every": every})
        found = configured_goodput(described.model_copy(update={"checkpoint": checkpoint}), 8, option)
        assert found is not None
        return found

    steps = round(best.interval_seconds / option.step_seconds)
    assert kept(steps) == pytest.approx(best.goodput, rel=1e-3)
    assert max(kept(max(1, steps // 4)), kept(4 * steps)) < kept(steps)


def test_configured_goodput_is_none_without_write_speed_or_interval():
    described = make_run()
    (option,) = search_layouts(described, 8, keep=1).layouts
    assert configured_goodput(described, 8, option) is None
    stored = make_run(cluster={"storage_bytes_per_second": 1e9})
    never = stored.model_copy(update={"checkpoint": stored.checkpoint.model_copy(update={"every": 0})})
    assert configured_goodput(never, 8, option) is None
