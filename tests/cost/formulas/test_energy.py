import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.formulas.energy import energy_cost, energy_kwh, rental_cost
from phalanx.spec.errors import UserError


def test_energy_kwh_and_cost_match_worked_example_of_50_000_devices():
    assert energy_kwh(350, 50_000, 1) == 17_500  # 17.5 MW
    assert energy_kwh(350, 50_000, 1440) == 25_200_000
    assert energy_cost(350, 50_000, 1440, 0.10) == 2_520_000
    assert energy_cost(350, 50_000, 1440, 0.10) / 100 == 25_200
    assert energy_cost(350, 50_000, 1, 0.10) == 1_750


def test_rental_cost_is_devices_times_hours_times_price():
    assert rental_cost(8, 24, 2.5) == 480


@given(st.floats(0, 1e4), st.integers(0, 10**6), st.floats(0, 1e5), st.floats(1, 3))
def test_energy_kwh_and_cost_scale_with_pue(watts, devices, hours, pue):
    machines = energy_kwh(watts, devices, hours)
    assert energy_kwh(watts, devices, hours, pue) == pytest.approx(pue * machines)
    assert energy_cost(watts, devices, hours, 0.2, pue) == pytest.approx(pue * 0.2 * machines)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: energy_kwh(-1, 1, 1), "watts_per_device"),
        (lambda: energy_kwh(1, 1, float("nan")), "hours"),
        (lambda: energy_kwh(1, 1, 1, 0.9), "pue"),
        (lambda: energy_cost(1, 1, 1, -0.1), "price_per_kwh"),
        (lambda: rental_cost(-1, 1, 1), "devices"),
        (lambda: rental_cost(1, 1, -1), "price_per_device_hour"),
    ],
)
def test_energy_functions_reject_invalid_arguments(call, field):
    with pytest.raises(UserError, match=f"^{field} = "):
        call()
