import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from phalanx.spec.errors import UserError
from phalanx.testing import rank_pool
from phalanx.testing.rank_failure import RankError
from phalanx.testing.rank_pool import MAX_GROWTH_BYTES

RETAINED_BUFFERS = []


def rank_and_pid():
    return dist.get_rank(), os.getpid()


def all_reduced(value):
    tensor = torch.tensor(value + dist.get_rank())
    dist.all_reduce(tensor)
    return tensor


def fails_on(rank):
    print("before the failure")
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def raise_on_all_ranks():
    raise KeyError("all alike")


def dies_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def connect_and_hang(port):
    """Hold a connection that ends with this process."""
    with socket.create_connection(("127.0.0.1", port)):
        time.sleep(60)


def sharded_product(seed):
    """Build a mesh, DTensors and a group, which the pool must discard."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(16.0).reshape(4, 4) + seed
    sharded = distribute_tensor(full, mesh["tp"], [Shard(0)])
    assert torch.equal((sharded @ sharded).full_tensor(), full @ full)
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, dist.get_world_size() - 1]))
    return len(dist.distributed_c10d._world.pg_names)


def random_number():
    torch.set_default_dtype(torch.float64)
    return torch.rand(1).item()


def retain_bytes_on_rank_1(size):
    if dist.get_rank() == 1:
        RETAINED_BUFFERS.append(b"1" * size)
    return rank_and_pid()


def test_rank_pool_returns_results_in_rank_order_and_reuses_processes():
    first, second = rank_pool(2).run(rank_and_pid), rank_pool(2).run(rank_and_pid)
    assert [rank for rank, _ in first] == [0, 1]
    assert first == second


def test_rank_pool_runs_all_reduce():
    assert rank_pool(2).run(all_reduced, 10) == [torch.tensor(21)] * 2


def test_rank_pool_resets_random_seed_between_calls():
    assert rank_pool(2).run(random_number) == rank_pool(2).run(random_number)


def test_rank_pool_discards_process_groups_after_each_call():
    counts = [rank_pool(2).run(sharded_product, seed)[0] for seed in range(20)]
    assert len(set(counts)) == 1


def test_rank_error_reports_raising_rank_first():
    with pytest.raises(RankError) as error:
        rank_pool(2).run(fails_on, 1)
    assert [failure.rank for failure in error.value.failures] == [1, 0]
    message = str(error.value)
    assert message.startswith(f"{__name__}.fails_on failed on rank 1 of 2: raised")
    assert "ValueError: rank 1 has had enough" in message
    assert "> before the failure" in message
    assert rank_pool(2).run(all_reduced, 0) == [torch.tensor(1)] * 2


def test_rank_pool_replaces_ranks_when_memory_grows():
    before = rank_pool(2).run(rank_and_pid)
    assert rank_pool(2).run(retain_bytes_on_rank_1, 1000) == before
    assert rank_pool(2).run(retain_bytes_on_rank_1, MAX_GROWTH_BYTES + 2**26) == before
    assert not set(rank_pool(2).run(rank_and_pid)) & set(before)


def test_rank_pool_reuses_processes_when_all_ranks_raise():
    before = rank_pool(2).run(rank_and_pid)
    with pytest.raises(RankError, match="all alike"):
        rank_pool(2).run(raise_on_all_ranks)
    assert rank_pool(2).run(rank_and_pid) == before


def test_rank_error_reports_killed_rank_first():
    with pytest.raises(RankError, match=r"rank 1 of 2: died .* killed by SIGKILL"):
        rank_pool(2).run(dies_on, 1)


def test_rank_error_shows_stack_of_hung_rank_when_call_times_out():
    rank_pool(2).run(rank_and_pid)
    with pytest.raises(RankError, match=r"rank 1 of 2: did not return") as error:
        rank_pool(2).run(hangs_on, 1, timeout=0.5)
    assert "in hangs_on" in str(error.value)
    assert "rank 0: returned" in str(error.value)
    assert rank_pool(2).run(all_reduced, 0) == [torch.tensor(1)] * 2


def test_rank_pool_rejects_function_that_is_not_importable():
    with pytest.raises(UserError, match="top level of a module"):
        rank_pool(2).run(lambda: None)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_rank_pool_processes_exit_when_parent_is_signaled(signal_number):
    imports = f"import signal; from phalanx.testing import rank_pool; from {__name__} import connect_and_hang"
    # Background jobs of a shell ignore SIGINT.
    install_handler = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        parent = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"{imports}; {install_handler}; rank_pool(1).run(connect_and_hang, {server.getsockname()[1]})",
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.DEVNULL,
        )
        server.settimeout(60)
        child, _ = server.accept()
        parent.send_signal(signal_number)
        parent.wait(60)
        child.settimeout(60)
        assert child.recv(1) == b""
