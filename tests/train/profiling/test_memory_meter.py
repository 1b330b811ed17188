"""Bytes by part, of tensors whose sizes are known."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from phalanx.train.profiling.memory_meter import MemoryMeter

KIB = 1024


def test_memory_meter_drops_freed_tensors_and_retains_peaks() -> None:
    with MemoryMeter(dict) as meter:
        first = torch.zeros(KIB, dtype=torch.float32)
        second = first + 1
        view = second[10:]
        del first
        third = torch.zeros(2 * KIB, dtype=torch.uint8)
        assert meter.bytes_by_part["activations"] == 4 * KIB + 2 * KIB
        del second
        assert meter.bytes_by_part["activations"] == 4 * KIB + 2 * KIB  # the view still needs it
        del view, third
        assert meter.bytes_by_part["activations"] == 0
    assert meter.peaks["activations"] == meter.peak_total == 8 * KIB


def test_memory_meter_separates_parameters_gradients_and_activations() -> None:
    layer = nn.Linear(64, 32, bias=False)
    weight_bytes = 4 * 64 * 32
    with MemoryMeter(lambda: {"parameters": layer.parameters()}) as meter, meter.tracking_gradients(layer.parameters()):
        x = torch.ones(128, 64)
        loss = layer(x).square().sum()
        kept = meter.bytes_by_part["activations"]
        loss.backward()
        assert meter.bytes_by_part["gradients"] == weight_bytes
    assert meter.bytes_by_part["parameters"] == meter.peaks["parameters"] == weight_bytes
    assert 4 * 128 * (64 + 32) <= kept <= 4 * 128 * (64 + 3 * 32) + 64
    del loss, x
    gc.collect()
    assert meter.bytes_by_part["activations"] == 0


def test_memory_meter_counts_shared_storage_once() -> None:
    weights = torch.zeros(100, dtype=torch.float64)
    grown = False
    meter = MemoryMeter(lambda: {"parameters": [weights], "optimizer": [weights[:10]] if grown else []})
    assert meter.bytes_by_part == {"parameters": 800, "communication": 0}
    grown = True
    meter.reclassify()
    assert +meter.bytes_by_part == {"optimizer": 800}


def test_memory_meter_counts_resized_storage_as_communication() -> None:
    units = [[torch.zeros(10), torch.zeros(20)], [torch.zeros(100), torch.zeros(200)]]
    gathered = [tensor for unit in units for tensor in unit]
    resize(gathered, 0)
    with MemoryMeter(dict, units) as meter:
        resize(units[0], 1)
        torch.zeros(1)
        assert meter.bytes_by_part["communication"] == 4 * 30
        resize(units[1], 1)
        torch.zeros(1)
        resize(units[0], 0)
        torch.zeros(1)
        assert meter.bytes_by_part["communication"] == 4 * 300
        resize(gathered, 0)
        torch.zeros(1)
    assert meter.bytes_by_part["communication"] == 0
    assert meter.peaks["communication"] == 4 * 330


def resize(tensors: list[torch.Tensor], factor: int) -> None:
    """Resize the storage of tensors to `factor` times their size."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(factor * tensor.numel() * tensor.itemsize)


@pytest.mark.parametrize("set_data", [lambda tensor, data: setattr(tensor, "data", data), torch.Tensor.set_])
def test_memory_meter_counts_new_storage_of_known_tensor(
    set_data: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    weight = torch.zeros(10)
    with MemoryMeter(lambda: {"parameters": [weight]}) as meter:
        assert +meter.bytes_by_part == {"parameters": 40}
        set_data(weight, torch.zeros(100))
        meter.reclassify()
        assert +meter.bytes_by_part == {"parameters": 400}


def test_memory_meter_looks_only_for_some_tensors_after_a_collective() -> None:
    momentum, gradients = [torch.zeros(10)], list[torch.Tensor]()
    known = {"optimizer": momentum, "gradients": gradients}
    with MemoryMeter(lambda: known, known_after_collectives=lambda: {"gradients": gradients}) as meter:
        momentum.append(torch.zeros(100))
        gradients.append(torch.zeros(1000))
        meter.reclassify_after_collective()
        assert +meter.bytes_by_part == {"optimizer": 40, "activations": 400, "gradients": 4000}
        meter.reclassify()
        assert +meter.bytes_by_part == {"optimizer": 440, "gradients": 4000}


def test_memory_meter_total_is_of_the_device() -> None:
    """A GPU run's offloaded state is in CPU memory, and was counted as the GPU's."""
    parts = {"parameters": [torch.zeros(10)], "offloaded": [torch.zeros(1000)]}
    meter = MemoryMeter(lambda: parts, other_memory=("offloaded",))
    assert (meter.peaks["parameters"], meter.peaks["offloaded"]) == (40, 4000)
    assert meter.peak_total == 40
    assert MemoryMeter(lambda: parts).peak_total == 4040


def test_memory_meter_stops_to_record_a_change_at_an_error() -> None:
    with MemoryMeter(dict) as meter:
        before = torch.zeros(100)
        with contextlib.suppress(ArithmeticError), meter.recording_change() as change:
            during = torch.zeros(10)
            meter.move(during, "communication")
            raise ArithmeticError
        meter.move(before, "communication")
        assert [number for number, _ in change.moves] == [1]
        assert +change.net == {"communication": 40}
        assert meter.peak_total == 440
