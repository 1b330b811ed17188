import pytest

from phalanx.launch.recomputation import machine_memory_bytes, resolve_recomputation
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table

MODEL = {"preset": "llama3-8b", "num_layers": 8}


def make_run(cluster, **layout):
    layout = {"activation_checkpointing": "auto", "micro_batch_size": 1, **layout}
    return run_from_table({"model": MODEL, "training": {"seq_len": 4096}, "cluster": cluster, "layout": layout})


def test_resolve_recomputation_prints_choice_for_memory_of_cluster(capsys):
    run = resolve_recomputation(make_run({"preset": "h100", "memory_bytes": 52 * 10**9}), 1)
    assert not run.layout.auto_checkpointing
    assert run.layout.activation_checkpointing == "full"
    assert 0 < run.layout.recomputed_blocks < 8
    count = run.layout.recomputed_blocks
    assert f"activation checkpointing chosen: recompute full in {count} blocks (fits" in capsys.readouterr().err


def test_resolve_recomputation_leaves_other_runs_unchanged(capsys):
    run = make_run({}, activation_checkpointing="full")
    assert resolve_recomputation(run, 1) is run
    assert capsys.readouterr().err == ""


def test_resolve_recomputation_uses_memory_of_this_machine_for_cpus(monkeypatch):
    run = make_run({"device": "cpu"})
    sizes = {"nothing": 10**12, "blocks": 51 * 10**9}
    layouts = {}
    for name, size in sizes.items():
        monkeypatch.setattr("phalanx.launch.recomputation.machine_memory_bytes", lambda size=size: size)
        layouts[name] = resolve_recomputation(run, 1).layout
    assert layouts["nothing"].activation_checkpointing == "none"
    assert layouts["blocks"].activation_checkpointing != "none"
    assert resolve_recomputation(run, 1).cluster.memory_bytes is None
    assert machine_memory_bytes() > 10**8


def test_resolve_recomputation_requires_memory_of_gpu():
    run = make_run({"device": "cuda"})
    with pytest.raises(UserError, match="requires the memory of a GPU"):
        resolve_recomputation(run, 1)
    assert resolve_recomputation(run, 1, gpu_memory_bytes=10**12).layout.activation_checkpointing == "none"


def test_resolve_recomputation_uses_actual_memory_if_cluster_describes_more(monkeypatch):
    run = make_run({"preset": "h100"})
    monkeypatch.setattr("phalanx.launch.recomputation.machine_memory_bytes", lambda: 51 * 10**9)
    for device, gpu_memory_bytes in (("cpu", None), ("cuda", 52 * 10**9)):
        layout = resolve_recomputation(run.on_device(device), 1, gpu_memory_bytes).layout
        assert layout.activation_checkpointing != "none"
    assert resolve_recomputation(run, 1, gpu_memory_bytes=10**12).layout.activation_checkpointing == "none"


def test_resolve_recomputation_divides_memory_of_machine_by_its_own_ranks(monkeypatch):
    run = make_run({"device": "cpu"})
    monkeypatch.setattr("phalanx.launch.recomputation.machine_memory_bytes", lambda: 2 * 10**11)
    assert resolve_recomputation(run, 4).layout.activation_checkpointing != "none"
    resolved = resolve_recomputation(run, 4, nproc=1)
    assert resolved.layout.activation_checkpointing == "none"
    assert resolved.cluster == run.cluster


def test_resolve_recomputation_rejects_number_of_blocks():
    with pytest.raises(UserError, match='"auto", which chooses it'):
        resolve_recomputation(make_run({"device": "cpu"}, recomputed_blocks=1), 1)
