"""`phalanx plan explore`."""

from __future__ import annotations

import json
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest

from phalanx.cli.commands import plan_explorer
from phalanx.cli.commands.plan_explorer import (
    Choices,
    InvalidChoiceError,
    PlanArguments,
    has_screen,
    parse_choices,
    with_choices,
)
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.testing.processes import wait_until
from tests.helpers.cli_runner import command_json, command_output
from tests.helpers.report_page import parse_embedded_json
from tests.helpers.trained_runs import TIMEOUT_SECONDS
from tests.helpers.watch_server import serving

RUN = """
[model]
preset = "gpt2-124m"
[training]
seq_len = 1024
tokens_per_step = 16384
[cluster]
nproc_per_node = 4
"""
FIRST = Choices("", 1, 16, 1024)
CHOICES = {"machine": "", "nodes": 1, "batch": 16, "seq_len": 1024}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "it's a run.toml"
    file.write_text(RUN)
    return file


def arguments_for(file: Path) -> PlanArguments:
    return PlanArguments(
        run=file, machine="h100", nodes=None, nproc=None, overrides=(), topology=None, all_schedules=False
    )


def test_plan_explore_writes_page_with_first_choices_of_plan(run_file, monkeypatch):
    monkeypatch.setattr(plan_explorer, "NUM_FIRST_CHOICES", 10)
    file = run_file.parent / "plan.html"
    command_output("plan", "explore", run_file, "--machine", "h100", "--html", file)
    facts = parse_embedded_json(file.read_text(), "facts")
    plan = command_json("plan", run_file, "--machine", "h100")
    ranked = [facts["counted"][str(index)] for index in facts["ranked"]]
    assert [option["step_seconds"] for option in ranked[:10]] == [option["step_seconds"] for option in plan["layouts"]]
    assert facts["setup"]["summary"][-1].startswith(f"{plan['considered']:,} layouts")
    assert set(facts["details"]) == {str(index) for index in (*facts["ranked"], *facts["front"])}


def test_plan_explore_replaces_no_file_of_the_users(run_file):
    file = run_file.parent / "mine.html"
    file.write_text("<p>mine</p>")
    with pytest.raises(UserError, match="exists, and was not written by phalanx"):
        command_output("plan", "explore", run_file, "--machine", "h100", "--html", file)
    assert file.read_text() == "<p>mine</p>"


def test_plan_explore_serves_no_file(run_file):
    with pytest.raises(UserError, match="--port = 8000 cannot be combined with --html"):
        command_output("plan", "explore", run_file, "--html", "x.html", "--port", 8000)


def ask(address: str, path: str, table: object, **headers: str) -> tuple[int, dict]:
    request = urllib.request.Request(
        address + path, json.dumps(table).encode(), {"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else {"text": text}


def test_plan_explore_answers_new_choices_and_refuses_bad_ones(run_file):
    with serving("plan", "explore", run_file, "--machine", "h100") as address:
        page = urllib.request.urlopen(address, timeout=60).read().decode()
        facts = parse_embedded_json(page, "facts")
        assert (facts["web"], facts["details"]) == (True, {})
        assert ask(address, "layout", {**CHOICES, "layout": facts["ranked"][0]})[1]["memory"]
        code, other_plan = ask(address, "plan", {**CHOICES, "machine": "a100", "nodes": 2})
        assert (code, other_plan["setup"]["title"]) == (200, "gpt2-124m on 8 x a100")
        assert other_plan["setup"]["commands"]["compare"].endswith("--machine a100 --nodes 2")
        for table, expected_code, problem in (
            ({**CHOICES, "machine": "/etc/passwd"}, 400, "is not a known machine"),
            ({**CHOICES, "run": "other.toml"}, 400, "does not have the fields"),
            ({**CHOICES, "nodes": 0}, 400, "is not a valid number"),
            ({**CHOICES, "nodes": 10_007}, 422, "has no layout that divides this model and this batch"),
            ({**CHOICES, "seq_len": 2048}, 422, "is longer than the model's learned positions"),
            ([], 400, "does not have the fields"),
        ):
            code, answer = ask(address, "plan", table)
            assert code == expected_code
            assert problem in answer["problem"]
            assert "\n  fix: " in answer["problem"]
        assert ask(address, "layout", {**CHOICES, "layout": 10**8})[0] == 422
        assert ask(address, "other", {**CHOICES, "layout": 0})[0] == 400
        assert ask(address, "plan", CHOICES, Host="evil.example")[0] == 403
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address + "run.toml", timeout=60)


def test_train_command_trains_the_run_on_its_cluster(run_file):
    run = load_run(run_file, machine="h100")
    arguments = shlex.split(arguments_for(run_file).train_command(run))
    assert arguments == ["phalanx", "train", str(run_file), "--nproc", "4", "--set", "cluster.preset=h100"]
    nodes = run.model_copy(update={"cluster": run.cluster.model_copy(update={"nodes": 4})})
    assert "--nodes 4 --rendezvous HOST:29500" in arguments_for(run_file).train_command(nodes)
    assert replace(arguments_for(run_file), run=Path("config.json")).train_command(run) == ""


def test_with_choices_changes_only_what_was_chosen(run_file):
    arguments = arguments_for(run_file)
    same = Choices("", 1, 16, 1024)
    assert with_choices(arguments, same) == arguments
    changed = with_choices(arguments, Choices("b200", 2, 32, 512))
    run = changed.load().run
    assert (run.cluster.preset, run.cluster.ranks) == ("b200", 8)
    assert (run.training.seq_len, run.training.tokens_per_step) == (512, 16384)
    assert re.search(r"--machine b200 --nodes 2 --set training.seq_len=512", changed.plan_command("explore"))


def test_parse_choices_returns_numbers_beside_choices():
    choices, numbers = parse_choices({**CHOICES, "layout": 3}, ("layout",), FIRST)
    assert (asdict(choices), numbers) == (CHOICES, {"layout": 3})
    with pytest.raises(InvalidChoiceError, match="nodes = True is not a valid number"):
        parse_choices({**CHOICES, "nodes": True}, (), FIRST)


@pytest.mark.parametrize(("field", "number"), [("nodes", 100_000), ("batch", 10**7), ("seq_len", 10**8)])
def test_parse_choices_refuses_numbers_above_those_of_real_clusters(field, number):
    with pytest.raises(InvalidChoiceError, match=rf"{field} = {number} .*\n.*fix: use a whole number from 1 to"):
        parse_choices({**CHOICES, field: number}, (), FIRST)
    parse_choices({**CHOICES, field: number}, (), replace(FIRST, **{field: number}))  # the values of the command line
    parse_choices({**CHOICES, "nodes": 16_384, "batch": 65_536, "seq_len": 2**20}, (), FIRST)


class WaitingPlan:
    """Plan that returns after it is released."""

    made: ClassVar[list[WaitingPlan]] = []

    def __init__(self, arguments: Mapping[str, Any], is_limited: bool = True) -> None:
        self.arguments = arguments
        self.is_limited = is_limited
        self.is_running = True
        self.num_users = 0
        self.asked = Event()
        self.released = Event()
        self.made.append(self)
        if not is_limited:
            self.released.set()

    def facts(self) -> dict[str, Any]:
        self.asked.set()
        assert self.released.wait(TIMEOUT_SECONDS)
        return {"setup": {"title": str(self.arguments["nodes"])}}

    def close(self) -> None:
        self.is_running = False


def test_explorer_server_answers_other_requests_during_a_plan(run_file, monkeypatch):
    monkeypatch.setattr(plan_explorer, "PlanProcess", WaitingPlan)
    monkeypatch.setattr(plan_explorer, "page", lambda *_: "")
    monkeypatch.setattr(WaitingPlan, "made", [])
    explorer = plan_explorer.ExplorerServer(arguments_for(run_file))

    def plan(nodes: int) -> tuple[int, str]:
        code, _, text = explorer.post("/plan", "localhost", json.dumps({**CHOICES, "nodes": nodes}).encode())
        return code, text

    with ThreadPoolExecutor() as threads:
        slow = [threads.submit(plan, nodes) for nodes in range(2, 2 + plan_explorer.MAX_PLANS)]
        wait_until(lambda: len(WaitingPlan.made) == 1 + plan_explorer.MAX_PLANS, "all plans have started")
        assert plan(1)[0] == 200, "the plan of the command line is kept"
        code, text = plan(100)
        assert (code, "fix: try again" in text) == (503, True)
        _, first, *others = WaitingPlan.made
        first.released.set()
        wait_until(lambda: not first.num_users, "the first request was answered")
        other_plan = threads.submit(plan, 100)
        wait_until(lambda: len(WaitingPlan.made) == 2 + plan_explorer.MAX_PLANS, "it makes room for another")
        assert not first.is_running
        assert all(plan_process.is_running for plan_process in others)
        for plan_process in WaitingPlan.made:
            plan_process.released.set()
        assert [request.result()[0] for request in (*slow, other_plan)] == [200] * (len(slow) + 1)
    assert [plan_process.is_limited for plan_process in WaitingPlan.made] == [False] + [True] * (
        1 + plan_explorer.MAX_PLANS
    )
    explorer.close()
    assert not any(plan_process.is_running for plan_process in WaitingPlan.made)


def test_explorer_server_plans_for_no_unknown_path(run_file, monkeypatch):
    monkeypatch.setattr(plan_explorer, "PlanProcess", WaitingPlan)
    monkeypatch.setattr(plan_explorer, "page", lambda *_: "")
    monkeypatch.setattr(WaitingPlan, "made", [])
    explorer = plan_explorer.ExplorerServer(arguments_for(run_file))
    body = json.dumps({**CHOICES, "nodes": 2, "layout": 0}).encode()
    code, _, text = explorer.post("/other", "localhost", body)
    assert (code, "is not known" in text, len(WaitingPlan.made)) == (400, True, 1)


@pytest.mark.parametrize("body", [b"[" * 9_999, b'{"a":' * 1_900, b"", b"{", b"\xff", b"9" * 9_999])
def test_explorer_server_refuses_bodies_that_are_not_json(body, run_file, monkeypatch):
    monkeypatch.setattr(plan_explorer, "PlanProcess", WaitingPlan)
    monkeypatch.setattr(plan_explorer, "page", lambda *_: "")
    explorer = plan_explorer.ExplorerServer(arguments_for(run_file))
    for path in ("/plan", "/layout"):
        code, _, text = explorer.post(path, "localhost", body)
        assert (code, json.loads(text)) == (400, {"problem": "the request is not JSON"})


def test_has_screen_is_false_over_ssh_and_without_display():
    assert has_screen("linux", {"DISPLAY": ":0"})
    assert has_screen("darwin", {})
    assert not has_screen("linux", {})
    assert not has_screen("darwin", {"SSH_CONNECTION": "1"})
