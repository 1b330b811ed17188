"""Many numbers of a GPU are read with one wait."""

from __future__ import annotations

import ctypes

import torch

from phalanx.parallel.comm.host_copy import copy_to_host


def test_numbers_of_several_devices_take_one_wait() -> None:
    numbers = [torch.tensor(index, device="cuda" if index % 2 else "cpu") for index in range(9)]
    waits = ctypes.c_uint64.in_dll(ctypes.CDLL(None), "null_host_syncs")
    before = waits.value
    copies = copy_to_host(*numbers)
    assert waits.value == before + 1
    assert [int(copy) for copy in copies[::2]] == [0, 2, 4, 6, 8]
