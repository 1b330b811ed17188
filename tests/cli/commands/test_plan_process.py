"""Plans in separate processes: results, errors and limits."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from phalanx.cli.commands import plan_process
from phalanx.cli.commands.plan_explorer import PlanArguments
from phalanx.cli.commands.plan_process import PlanProcess
from phalanx.spec.errors import UserError

RUN = """
[model]
preset = "{model}"
[training]
seq_len = {seq_len}
tokens_per_step = {tokens}
[cluster]
nproc_per_node = 8
"""


def large_arguments(folder: Path, nodes: int) -> dict[str, object]:
    """Return the arguments of a plan of 405B that takes tens of seconds."""
    file = folder / "large.toml"
    file.write_text(RUN.format(model="llama3-405b", seq_len=8192, tokens=16 * 2**20))
    return arguments(file, nodes)


def arguments(file: Path, nodes: int) -> dict[str, object]:
    return PlanArguments(
        run=file, machine="h100", nodes=nodes, nproc=None, overrides=(), topology=None, all_schedules=False
    ).as_json()


def test_plan_process_keeps_its_plan_and_answers_for_layouts(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(model="gpt2-124m", seq_len=1024, tokens=2**14))
    plan = PlanProcess(arguments(file, 1))
    try:
        facts = plan.facts()
        assert plan.facts() is facts
        assert plan.details(facts["ranked"][0])["memory"]
        with pytest.raises(UserError, match="layout = 1000000 is not a layout of this plan"):
            plan.details(10**6)
        assert plan.is_running
    finally:
        plan.close()
    assert not plan.is_running
    with pytest.raises(UserError, match="plan was stopped"):
        plan.details(0)


@pytest.mark.parametrize(
    ("limit", "value", "problem"),
    [("MAX_CPU_SECONDS", 1, "exceeded 1 s of CPU time"), ("MAX_MEMORY_BYTES", 2**28, "exceeded 0.25 GiB of memory")],
)
def test_plan_process_ends_at_its_limits(
    limit: str, value: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_process, limit, value)
    plan = PlanProcess(large_arguments(tmp_path, 512))
    try:
        with pytest.raises(UserError, match=f"plan {problem}\\n  fix: choose fewer"):
            plan.facts()
    finally:
        plan.close()


def test_plan_process_plans_within_limits_that_are_set_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root can raise its limits, so the process drops that capability."""
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(model="gpt2-124m", seq_len=1024, tokens=2**14))
    unprivileged = "" if os.geteuid() else "setpriv --bounding-set -sys_resource"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nulimit -t 500 -v {3 * 2**20}\nexec {unprivileged} {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    plan = PlanProcess(arguments(file, 1))
    try:
        assert plan.facts()["setup"]["title"] == "gpt2-124m on 8 x h100"
    finally:
        plan.close()


def test_plan_process_reports_error_of_run(tmp_path: Path) -> None:
    plan = PlanProcess(arguments(tmp_path / "none.toml", 1))
    try:
        with pytest.raises(UserError, match=r"run file = .*none.toml. does not exist"):
            plan.facts()
    finally:
        plan.close()


@pytest.mark.parametrize("nodes", [512, 2048])
def test_large_clusters_are_planned_within_the_limits(nodes: int, tmp_path: Path) -> None:
    """The plans are for 405B on 4,096 and 16,384 GPUs."""
    plan = PlanProcess(large_arguments(tmp_path, nodes))
    try:
        assert f"on {8 * nodes:,} x h100" in plan.facts()["setup"]["title"].replace("16384", "16,384")
    finally:
        plan.close()
