from functools import partial
from pathlib import Path

import pytest

from tests.helpers import cli_runner

mesh_output = partial(cli_runner.command_output, "mesh")
mesh_json = partial(cli_runner.command_json, "mesh")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("")
    return path


def test_mesh_json_says_which_groups_stay_inside_a_node(run: Path) -> None:
    facts = mesh_json(
        run, "--ranks", 16, "--set", "layout.pp=4", "--set", "layout.tp=2", "--set", "cluster.nproc_per_node=8"
    )
    groups_inside_a_node = {
        axis["axis"]: {group["inside_a_node"] for group in axis["groups"]} for axis in facts["axes"]
    }
    assert groups_inside_a_node == {"tp": {True}, "pp": {True}, "dp_replicate": {False}}


def test_mesh_prints_axes_and_marks_groups_that_cross_nodes(run: Path) -> None:
    output = mesh_output(run, "--ranks", "8", "--set", "layout.pp=2", "--set", "cluster.nproc_per_node=4")
    assert output.startswith("8 ranks on 2 nodes; axes outermost first")
    assert "dp_replicate 4: copies of the model" in output
    assert "  0 2 4 6   crosses nodes" in output
    assert "  0 1\n" in output


def test_mesh_excludes_parameter_servers_from_groups(run: Path) -> None:
    output = mesh_output(run, "--ranks", "4", "--set", "layout.data_parallel=parameter_server")
    assert "of which the first 1 are servers" in output
    assert "  1 2 3" in output


def test_mesh_reports_tp_size_that_does_not_divide_heads(run: Path) -> None:
    output = mesh_output(run, "--ranks", "4", "--set", "layout.tp=4", "--set", "model.preset=tiny")
    assert "this layout is not possible: layout.tp = 4 does not divide model.num_heads (3)" in output
    assert "this run" not in mesh_output(run, "--ranks", "4")
