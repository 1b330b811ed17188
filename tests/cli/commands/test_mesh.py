from functools import partial
from pathlib import Path

import pytest

from phalanx.spec.layout import Layout
from phalanx.spec.parallel_dims import parallel_dims, process_groups
from tests.helpers import cli_runner

mesh_output = partial(cli_runner.command_output, "mesh")
mesh_json = partial(cli_runner.command_json, "mesh")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("")
    return path


def test_process_groups_match_published_example_on_16_ranks(run: Path) -> None:
    """4 stages x 2 tensor-parallel ranks x 2 copies: rank = dp x 8 + pp x 2 + tp."""
    sizes = parallel_dims(Layout(pp=4, tp=2), 16)
    assert process_groups(sizes, "tp") == [(2 * i, 2 * i + 1) for i in range(8)]
    assert process_groups(sizes, "pp") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert process_groups(sizes, "dp_replicate") == [(i, i + 8) for i in range(8)]
    assert parallel_dims(Layout(pp=4, tp=4), 32).dp_size == 2
    facts = mesh_json(
        run, "--ranks", 16, "--set", "layout.pp=4", "--set", "layout.tp=2", "--set", "cluster.nproc_per_node=8"
    )
    inside = {axis["axis"]: {group["inside_a_node"] for group in axis["groups"]} for axis in facts["axes"]}
    assert inside == {"tp": {True}, "pp": {True}, "dp_replicate": {False}}


def test_process_groups_of_dp2_pp2_layout_match_expected_ranks(run: Path) -> None:
    sizes = parallel_dims(Layout(pp=2), 4)
    assert process_groups(sizes, "pp") == [(0, 1), (2, 3)]
    assert process_groups(sizes, "dp_replicate") == [(0, 2), (1, 3)]
    assert process_groups(sizes, "dp_replicate", "pp") == [(0, 1, 2, 3)]


def test_mesh_prints_axes_and_marks_groups_that_cross_nodes(run: Path) -> None:
    out = mesh_output(run, "--ranks", "8", "--set", "layout.pp=2", "--set", "cluster.nproc_per_node=4")
    assert out.startswith("8 ranks on 2 nodes; axes outermost first")
    assert "dp_replicate 4: copies of the model" in out
    assert "  0 2 4 6   crosses nodes" in out
    assert "  0 1\n" in out


def test_mesh_excludes_parameter_servers_from_groups(run: Path) -> None:
    out = mesh_output(run, "--ranks", "4", "--set", "layout.data_parallel=parameter_server")
    assert "of which the first 1 are servers" in out
    assert "  1 2 3" in out


def test_mesh_reports_tp_size_that_does_not_divide_heads(run: Path) -> None:
    out = mesh_output(run, "--ranks", "4", "--set", "layout.tp=4", "--set", "model.preset=tiny")
    assert "this run cannot be divided so: layout.tp = 4: does not divide model.num_heads (3)" in out
    assert "this run" not in mesh_output(run, "--ranks", "4")
