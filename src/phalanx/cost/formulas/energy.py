"""Energy and money that a run costs: electricity or rented devices."""

from __future__ import annotations

from math import inf

from phalanx.cost.argument_checks import require_non_negative
from phalanx.spec.errors import UserError


def energy_kwh(watts_per_device: float, devices: int, hours: float, pue: float = 1.0) -> float:
    """Return the kilowatt-hours that `devices` draw in `hours`.

    Args:
        watts_per_device: Power of a device, plus its share of the host if the host counts.
        devices: Number of devices.
        hours: Duration of the run.
        pue: Power usage effectiveness (ISO/IEC 30134-2): energy of the building / energy of the machines. 1.0 counts
            the machines only.
    """
    require_non_negative(watts_per_device=watts_per_device, devices=devices, hours=hours)
    if not 1 <= pue < inf:
        fix = "use the energy of the building divided by the energy of the machines"
        raise UserError("pue", pue, "must be at least 1", fix)
    return watts_per_device * devices * hours * pue / 1000


def energy_cost(watts_per_device: float, devices: int, hours: float, price_per_kwh: float, pue: float = 1.0) -> float:
    """Return the price of the electricity of `energy_kwh`.

    Args:
        watts_per_device: Power of a device, as in `energy_kwh`.
        devices: Number of devices.
        hours: Duration of the run.
        price_per_kwh: Price of a kilowatt-hour; the result is in its currency.
        pue: Power usage effectiveness, as in `energy_kwh`; at least 1.
    """
    require_non_negative(price_per_kwh=price_per_kwh)
    return energy_kwh(watts_per_device, devices, hours, pue=pue) * price_per_kwh


def rental_cost(devices: int, hours: float, price_per_device_hour: float) -> float:
    """Return the price of rented devices.

    The rent usually includes electricity.

    Args:
        devices: Number of devices.
        hours: Duration of the run.
        price_per_device_hour: Rent of a device for an hour; the result is in its currency.
    """
    require_non_negative(devices=devices, hours=hours, price_per_device_hour=price_per_device_hour)
    return devices * hours * price_per_device_hour
