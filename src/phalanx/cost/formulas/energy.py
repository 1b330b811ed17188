"""What a run uses and costs: electricity, or rented devices."""

from __future__ import annotations

from math import inf

from phalanx.cost.argument_checks import require_non_negative
from phalanx.spec.errors import UserError


def energy_kwh(watts_per_device: float, devices: int, hours: float, pue: float = 1.0) -> float:
    """Kilowatt-hours that `devices` draw in `hours`.

    `watts_per_device` is the mean draw, with the device's share of its host if that is to be counted. `pue`, power
    usage effectiveness (ISO/IEC 30134-2), is the whole building's energy over the machines': 1.0 counts these alone.
    """
    require_non_negative(watts_per_device=watts_per_device, devices=devices, hours=hours)
    if not 1 <= pue < inf:
        raise UserError(
            "pue", pue, "cannot be below 1, the machines alone", fix="give whole energy / the machines' energy"
        )
    return watts_per_device * devices * hours * pue / 1000


def energy_cost(watts_per_device: float, devices: int, hours: float, price_per_kwh: float, pue: float = 1.0) -> float:
    """Money for the electricity of `energy_kwh`, in the currency of `price_per_kwh`."""
    require_non_negative(price_per_kwh=price_per_kwh)
    return energy_kwh(watts_per_device, devices, hours, pue=pue) * price_per_kwh


def rental_cost(devices: int, hours: float, price_per_device_hour: float) -> float:
    """Money for rented devices, in the currency of `price_per_device_hour`; their electricity is mostly in it."""
    require_non_negative(devices=devices, hours=hours, price_per_device_hour=price_per_device_hour)
    return devices * hours * price_per_device_hour
