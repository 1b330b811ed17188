"""Reasons for lower clocks of a GPU: NVML's bits and nvidia-smi's names. Free of pydantic, for doctor's checks."""

HARDWARE_SLOWDOWNS = ("hw_thermal_slowdown", "hw_power_brake_slowdown")
"""Reasons for lower clocks that no healthy machine has: heat, and the power supply."""
THROTTLE_REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Reasons for lower clocks by NVML's bit, with nvidia-smi's names. The bit of an idle GPU is none of them."""
SLOWDOWNS = ("hw_slowdown", "sw_thermal_slowdown", *HARDWARE_SLOWDOWNS)
"""Reasons that indicate a fault. A GPU at its power cap (sw_power_cap) is usual under load."""
