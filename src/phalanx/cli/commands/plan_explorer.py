"""`phalanx plan explore`: the plan explorer as a page that replans, and as a file."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from threading import Lock
from typing import Any

from phalanx.cli.commands.plan_cluster import run_on_cluster
from phalanx.cli.commands.plan_process import PlanProcess
from phalanx.cli.common.http_server import (
    JSON_TYPE,
    LOCAL_ADDRESS,
    Answer,
    make_http_server,
    refuse_other_hosts,
    serve_until_interrupted,
)
from phalanx.cli.common.output_file import write_file
from phalanx.cli.common.progress import search_progress
from phalanx.cli.views.plan import calibration_note
from phalanx.cli.views.plan_notes import list_assumptions
from phalanx.plan.search.oom_risk import describe_memory_limit
from phalanx.report.explorer.exploration import Exploration, explore
from phalanx.report.explorer.page import PageContext, packed_details, page, page_facts
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import model_source, preset_names
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

NUM_FIRST_CHOICES = 100
"""Number of layouts on a page, in the planner's order, all with details in a file."""
MAX_NUMBERS = {"nodes": 20_000, "batch": 10**6, "seq_len": 10**7, "layout": 10**9}
"""Upper limits of the fields of a request, above those of published runs: larger ones keep a planner busy."""
MAX_PLANS = 3
"""Maximum number of plans, running and kept, besides that of the command line. A large one keeps 650 MiB."""
RENDEZVOUS = "HOST:29500"


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Arguments of `phalanx plan` that determine a run on a cluster."""

    run: Path
    machine: str | None
    nodes: int | None
    nproc: int | None
    overrides: tuple[str, ...]
    topology: Path | None
    all_schedules: bool

    def load(self) -> ResolvedRun:
        """Return the run on its cluster. Raises UserError if it cannot be planned."""
        return run_on_cluster(self.run, self.machine, self.nodes, self.nproc, list(self.overrides), self.topology)

    def as_json(self) -> dict[str, object]:
        """Return the arguments in JSON types, for another process."""
        topology = None if self.topology is None else str(self.topology)
        return {**asdict(self), "run": str(self.run), "topology": topology}

    def plan_command(self, name: str) -> str:
        """Return the command line of a command of `phalanx plan` for this run, machine and overrides."""
        options = {"--machine": self.machine, "--nodes": self.nodes, "--nproc": self.nproc, "--topology": self.topology}
        return shlex.join(
            ["phalanx", "plan", name, str(self.run), *_given_arguments(options), *self._override_arguments()]
        )

    def train_command(self, run: RunSpec) -> str:
        """Return the command that trains the run on its cluster; "" for a model without a run file."""
        if model_source(self.run) is not None:
            return ""
        cluster = run.cluster
        options: dict[str, object] = {"--nproc": cluster.nproc_per_node}
        if cluster.nodes > 1:
            options |= {"--nodes": cluster.nodes, "--rendezvous": RENDEZVOUS}
        machine = ["--set", f"cluster.preset={self.machine}"] if self.machine else []
        return shlex.join(
            ["phalanx", "train", str(self.run), *_given_arguments(options), *machine, *self._override_arguments()]
        )

    def _override_arguments(self) -> list[str]:
        return [word for override in self.overrides for word in ("--set", override)]


def _given_arguments(options: Mapping[str, object]) -> list[str]:
    return [word for option, value in options.items() if value is not None for word in (option, str(value))]


@dataclass(frozen=True)
class Choices:
    """Choices of a reader on the page."""

    machine: str
    """Preset; "" is the machine of the command line."""
    nodes: int
    batch: int
    """Sequences per step."""
    seq_len: int


def choices_of(run: RunSpec) -> Choices:
    """Return the choices of a run."""
    training = run.training
    return Choices("", run.cluster.nodes, training.tokens_per_step // training.seq_len, seq_len=training.seq_len)


class InvalidChoiceError(UserError):
    """A request that the page does not send, or a number above its maximum."""


class BusyError(UserError):
    """A request that must wait for others."""


def parse_choices(
    table: object, integer_fields: tuple[str, ...], first_choices: Choices
) -> tuple[Choices, dict[str, int]]:
    """Return the choices in a decoded JSON body, and the integers in its other fields, `integer_fields`.

    The choices of the command line (`first_choices`) may exceed `MAX_NUMBERS`. Raises InvalidChoiceError if fields are
    unknown or missing, a machine is unknown, or a value has another type.
    """
    fields = ("machine", "nodes", "batch", "seq_len", *integer_fields)
    if not isinstance(table, dict) or set(table) != set(fields):
        problem = f"does not have the fields {', '.join(fields)}"
        raise InvalidChoiceError("request", None, problem, fix="reload the page")
    if table["machine"] not in ("", *preset_names("machines")):
        raise InvalidChoiceError("machine", table["machine"], "is not a known machine", fix="choose one from the list")
    for name in fields[1:]:
        value = table[name]
        low = 0 if name in integer_fields else 1
        high = max(MAX_NUMBERS[name], asdict(first_choices).get(name, 0))
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            fix = f"use a whole number from {low} to {high:,}"
            raise InvalidChoiceError(name, value, "is not a valid number", fix=fix)
    return Choices(*(table[name] for name in fields[:4])), {name: table[name] for name in integer_fields}


def with_choices(arguments: PlanArguments, choices: Choices) -> PlanArguments:
    """Return the arguments that plan for other choices; unchanged choices keep their arguments."""
    run = arguments.load().run
    current = choices_of(run)
    training = {"seq_len": choices.seq_len, "tokens_per_step": choices.batch * choices.seq_len}
    changed = (choices.batch, choices.seq_len) != (current.batch, current.seq_len)
    overrides = [f"training.{field}={value}" for field, value in training.items()] if changed else []
    if choices.machine:
        # A topology belongs to the machine of the command line.
        arguments = replace(arguments, machine=choices.machine, topology=None)
    nodes = choices.nodes if choices.nodes != current.nodes else arguments.nodes
    return replace(arguments, nodes=nodes, overrides=(*arguments.overrides, *overrides))


def write_page(arguments: PlanArguments, file: Path) -> None:
    """Write the explorer as one file."""
    exploration, facts = explore_arguments(arguments)
    with search_progress(exploration.resolved.world_size) as report:
        details = packed_details(exploration, report)
    write_file("--html", file, page(facts | {"details": details, "web": False}))
    print(f"wrote {file}", file=sys.stderr)


def serve_page(arguments: PlanArguments, port: int) -> None:
    """Serve the explorer to this machine until Ctrl-C."""
    explorer = ExplorerServer(arguments)
    server = make_http_server("--port", LOCAL_ADDRESS, port, explorer.get, explorer.post)
    with closing(explorer), server:
        if has_screen(sys.platform, os.environ):
            import webbrowser

            webbrowser.open(f"http://{LOCAL_ADDRESS}:{server.server_port}/")
        with suppress(KeyboardInterrupt):
            serve_until_interrupted(server)


class ExplorerServer:
    """Server of the explorer. It plans for choices on the page in other processes, and keeps the last plans.

    So a slow plan delays no other, and is stopped at the limits of `PlanProcess`."""

    def __init__(self, arguments: PlanArguments) -> None:
        self._arguments = arguments
        self._lock = Lock()
        self._plans: dict[Choices, PlanProcess] = {}
        """Plans of other choices than those of the command line, the last used one last."""
        run = arguments.load().run
        self._first_choices = choices_of(run)
        self._first_plan = PlanProcess(arguments.as_json(), is_limited=False)
        try:
            facts = self._page_facts(self._first_choices, self._first_plan.facts())
        except BaseException:
            self.close()
            raise
        self._page = page(facts, choices_form(self._first_choices, run.cluster.preset or "as in the run file"))

    def close(self) -> None:
        """End the processes of all plans."""
        for plan in (self._first_plan, *self._plans.values()):
            plan.close()

    def get(self, path: str, host: str) -> Answer:
        """Respond to GET with the page, for the run of the command line."""
        if refusal := refuse_other_hosts(host):
            return refusal
        return (200, "text/html", self._page) if path == "/" else (404, "text/plain", "not found")

    def post(self, path: str, host: str, body: bytes) -> Answer:
        """Respond to POST with a plan for new choices (/plan), or with a selected layout (/layout).

        The host header of the request must name this machine; the body has the choices as JSON.
        """
        if refusal := refuse_other_hosts(host):
            return refusal
        try:
            table = json.loads(body)
        except (ValueError, RecursionError):
            return 400, JSON_TYPE, json.dumps({"problem": "the request is not JSON"})
        try:
            return 200, JSON_TYPE, json.dumps(self._answer_request(path, table), allow_nan=False)
        except InvalidChoiceError as error:
            return 400, JSON_TYPE, json.dumps({"problem": str(error)})
        except BusyError as error:
            return 503, JSON_TYPE, json.dumps({"problem": str(error)})
        except UserError as error:
            return 422, JSON_TYPE, json.dumps({"problem": str(error)})

    def _answer_request(self, path: str, table: object) -> dict[str, Any]:
        if path not in ("/plan", "/layout"):
            raise InvalidChoiceError("path", path, "is not known", fix="reload the page")
        integer_fields = () if path == "/plan" else ("layout",)
        choices, numbers = parse_choices(table, integer_fields, self._first_choices)
        with self._hold_plan(choices) as plan:
            if path == "/plan":
                return self._page_facts(choices, plan.facts())
            return plan.details(numbers["layout"])

    @contextmanager
    def _hold_plan(self, choices: Choices) -> Iterator[PlanProcess]:
        """Provide the process that plans for some choices, which is not closed in the meantime."""
        with self._lock:
            if choices == self._first_choices and self._first_plan.is_running:
                plan = self._first_plan
            else:
                existing = self._plans.pop(choices, None)
                plan = existing if existing is not None and existing.is_running else self._start_plan(choices)
                self._plans[choices] = plan
            plan.num_users += 1
        try:
            yield plan
        finally:
            with self._lock:
                plan.num_users -= 1

    def _start_plan(self, choices: Choices) -> PlanProcess:
        """Start the plan of some choices; the plan that was not used for the longest time may make room for it."""
        arguments = with_choices(self._arguments, choices)
        for old_choices, plan in [*self._plans.items()]:
            if len(self._plans) >= MAX_PLANS and not plan.num_users:
                self._plans.pop(old_choices).close()
        if len(self._plans) >= MAX_PLANS:
            raise BusyError("plan", None, f"must wait for {MAX_PLANS} other plans", fix="try again when they are done")
        return PlanProcess(arguments.as_json())

    def _page_facts(self, choices: Choices, facts: dict[str, Any]) -> dict[str, Any]:
        return facts | {"details": {}, "web": True, "choices": asdict(choices)}


def choices_form(choices: Choices, machine: str) -> str:
    """Return the form of choices as HTML, filled in; `machine` is the name of the command line's machine."""
    names = "".join(f'<option value="{name}">{name}</option>' for name in preset_names("machines"))
    numbers = {"nodes": "nodes", "batch": "sequences a step", "seq_len": "tokens a sequence"}
    fields = "".join(
        f'<label>{label}<input name="{name}" type="number" min="1" required value="{getattr(choices, name)}"></label>'
        for name, label in numbers.items()
    )
    return (
        f'<form id="choices"><label>machine<select name="machine"><option value="">{escape(machine)}</option>'
        f'{names}</select></label>{fields}<button type="submit" name="plan">Plan</button></form>'
    )


def explore_arguments(arguments: PlanArguments) -> tuple[Exploration, dict[str, Any]]:
    """Return the plan of some arguments with the data of a page, without details."""
    resolved = arguments.load()
    run = resolved.run
    with search_progress(resolved.world_size) as report:
        exploration = explore(resolved, NUM_FIRST_CHOICES, not arguments.all_schedules, report)
    assumed = "; ".join(list_assumptions(resolved, list(exploration.ranked.values())))
    notes = [calibration_note(run.cluster), describe_memory_limit(run.cluster)]
    notes += [f"assumed: {assumed}"] if assumed else []
    commands = {name: arguments.plan_command(name) for name in ("compare", "explore")}
    context = PageContext({**commands, "train": arguments.train_command(run)}, notes)
    return exploration, page_facts(exploration, context)


def has_screen(platform: str, environment: Mapping[str, str]) -> bool:
    """Return whether the user who started the command could see a browser on this machine."""
    if "SSH_CONNECTION" in environment:
        return False
    return platform in ("darwin", "win32") or "DISPLAY" in environment or "WAYLAND_DISPLAY" in environment
