"""The device for which a cluster is planned."""

import pytest

from phalanx.spec.cluster import ClusterSpec
from phalanx.spec.files.load import load_machine, preset_names

SPEEDS = {"peak_flops": 1e15, "memory_bytes": 2**36, "hbm_bytes_per_second": 3e12}


@pytest.mark.parametrize("preset", preset_names("machines"))
def test_device_auto_is_planned_as_device_of_preset(preset):
    machine = load_machine(preset)
    auto = machine.model_copy(update={"device": "auto"})
    assert auto.planned_device == machine.planned_device
    assert machine.device in ("auto", machine.planned_device)
    assert (auto.planned_device == "tpu") == preset.startswith("tpu")


@pytest.mark.parametrize(
    ("fields", "device"),
    [
        ({}, "cpu"),
        ({"peak_flops": 1e12}, "cpu"),  # peak FLOP/s of a CPU, for its MFU
        (SPEEDS, "cuda"),
        ({**SPEEDS, "cores": 4}, "cpu"),
        ({**SPEEDS, "device": "cpu"}, "cpu"),
        ({"device": "cuda", "cores": 4}, "cuda"),
    ],
)
def test_planned_device_of_described_machine(fields, device):
    cluster = ClusterSpec(**fields)
    assert cluster.planned_device == device
    assert (cluster.uses_cpu, cluster.uses_cuda) == (device == "cpu", device == "cuda")
