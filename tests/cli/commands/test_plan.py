import csv
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import tomllib
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from typer.main import get_command

from phalanx.cli.commands.plan import PlanGroup
from phalanx.cli.commands.plan import app as plan_app
from phalanx.cli.commands.plan_cluster import run_on_cluster
from phalanx.cli.commands.plan_export import _explain_not_best
from phalanx.cli.commands.plan_nodes import parse_node_counts
from phalanx.cli.main import app
from phalanx.cost.exact.layout_checks import check_layout
from phalanx.plan.search.evaluate import evaluate_layout, parse_layout
from phalanx.plan.search.explain import PART_DESCRIPTIONS, plan_or_raise
from phalanx.plan.search.result import Plan
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run, run_from_table
from phalanx.spec.formatting import GIB, format_duration
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.testing.processes import run_python, start_python
from tests.helpers import cli_runner
from tests.helpers.published_rows import MEGATRON_22B_ROW
from tests.helpers.svg_elements import texts_of_class

plan_output = partial(cli_runner.command_output, "plan", width=200)
plan_json = partial(cli_runner.command_json, "plan")
H100 = ("--machine", "h100", "--nodes", "2")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "llama3-8b"\n[training]\nseq_len = 4096\ntokens_per_step = 524288\n')
    return path


def test_plan_ranks_runnable_layouts_by_step_time(run):
    plan = plan_json(run, *H100, "--top", 5)
    assert plan["devices"] == 16
    assert len(plan["layouts"]) == 5
    times = [option["step_seconds"] for option in plan["layouts"]]
    assert times[-1] >= times[0]
    for option in plan["layouts"]:
        settings = [f"layout.{key}={value}" for key, value in option["layout"].items()]
        check_layout(ResolvedRun(load_run(run, [*settings, "cluster.nodes=2", "cluster.nproc_per_node=8"]), 16))
    table = plan_output(run, *H100, "--top", 5)
    assert plan["layouts"][0]["candidate"] in table
    assert "llama3-8b on 16 x h100" in table
    assert " kWh" in table
    narrow = plan_output(run, *H100, "--top", 5, width=80).splitlines()
    rows = [line for line in narrow if "micro-batch" in line and "P(OOM)" not in line]
    assert rows
    assert max(map(len, rows)) <= 120


def test_plan_takes_link_bandwidth_from_topology_file_unless_overridden(run):
    """The file is stronger than the machine's data sheet, and weaker than
    --set. It has 12 of the 18 NVLinks of the machine."""
    node = Path(__file__).parents[2] / "spec/topology/topologies/h100-nv18.txt"
    topology_file = run.parent / "node.txt"
    topology_file.write_text(node.read_text().replace("NV18", "NV12"))
    resolved = run_on_cluster(run, "h100", 2, None, [], topology_file)
    assert (resolved.run.cluster.link_bytes_per_second, resolved.world_size) == (12 * 25e9, 16)
    cluster = run_on_cluster(run, "h100", 2, 4, ["cluster.link_bytes_per_second=1e9"], topology_file).run.cluster
    assert (cluster.link_bytes_per_second, cluster.nproc_per_node) == (1e9, 4)
    slower, usual = (
        plan_json(run, *H100, *options, "--top", 1)["layouts"][0] for options in (("--topology", topology_file), ())
    )
    assert slower["step_seconds"] > usual["step_seconds"]


def test_plan_notes_cluster_fields_that_topology_does_not_determine(run, capsys):
    node = Path(__file__).parents[2] / "spec/topology/topologies/rtx4090-pcie.txt"
    run_on_cluster(run, None, 2, None, ["cluster.network_bytes_per_second=1e9"], node)
    note = "--topology does not determine cluster.link_bytes_per_second: the GPUs have no NVLinks\n"
    assert capsys.readouterr().err == note


def test_plan_states_every_assumption_in_one_line(run):
    """The line is under the table, comparisons and explanations, and in the JSON. Given values are not assumptions."""
    machine = ("--machine", "rtx4090", "--set", "training.tokens_per_step=131072")
    plan = plan_json(run, *machine, "--top", 1)
    text = plan_output(run, *machine, "--top", 1)
    assert text.splitlines()[-1] == f"assumed: {'; '.join(plan['assumed'])}"
    expected = (
        "nproc_per_node = 8",
        "fast_link_domain = 8, a node",
        "host_memory_bytes = 275 GB of CPU memory per device",
    )
    assert {f"cluster.{field}" for field in expected} <= set(plan["assumed"])
    assert "cluster.nproc_per_node = 8" not in plan_json(run, *machine, "--nproc", 8)["assumed"]
    layout = "data_parallel=zero3,offload=cpu,activation_checkpointing=full"
    for command, *layouts in (("explain",), ("compare", layout), ("compare", layout, f"{layout},micro_batch_size=1")):
        text = plan_output(command, run, *layouts, *machine)
        lines = [line for line in text.splitlines() if line.startswith("assumed: ")]
        assert len(lines) == 1, (command, layouts)
        assert "cluster.host_memory_bytes" in lines[0]


def test_plan_of_a_model_is_that_of_its_run_file_and_lists_what_it_assumes(run, tmp_path):
    run.write_text('[model]\npreset = "llama3-8b"\n[training]\nseq_len = 8192\ntokens_per_step = 4194304\n')
    of_model, of_file = (plan_json(source, *H100, "--top", 2) for source in ("llama3-8b", run))
    unset = ["training.seq_len = 8192", "training.tokens_per_step = 4194304"]
    assert of_model["assumed"] == unset + of_file["assumed"]
    assert "training.precision = bf16" in of_file["assumed"]
    assert (of_model["seq_len"], of_model["tokens_per_step"], of_model["optimizer"]) == (8192, 4_194_304, "adamw")
    assert {**of_model, "assumed": None} == {**of_file, "assumed": None}
    out = tmp_path / "planned.toml"
    text = plan_output("llama3-8b", *H100, "--out", out)
    assert unset[0] in text.splitlines()[-1]
    assert "1,000 steps, the default" in text
    assert "the default" not in plan_output("llama3-8b", *H100, "--tokens", "1e9")
    planned = load_run(out, environment={})
    assert planned.training == load_run(run, environment={}).training
    assert planned.layout.data_parallel == of_model["layouts"][0]["layout"]["data_parallel"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("8h", 28_800), ("1.5d", 129_600)])
def test_plan_takes_time_between_failures_of_a_node(text, seconds, tmp_path):
    """Two nodes fail twice as often as one."""
    planned = tmp_path / "planned.toml"
    plan = plan_json("llama3-8b", *H100, "--mtbf", text, "--set", "cluster.restart_seconds=20", "--out", planned)
    assert plan["training"]["mtbf_seconds"] == pytest.approx(seconds / 2)
    assert load_run(planned, environment={}).cluster.failures_per_device_hour == pytest.approx(3600 / seconds / 8)
    assert not any("failures" in line for line in plan["assumed"])


def test_plan_shows_goodput_and_checkpoint_interval_for_time_between_failures():
    goodputs = []
    for mtbf in ("8h", "8d"):
        text = plan_output("llama3-8b", *H100, "--mtbf", mtbf)
        assert re.search(r"a failure every 4.0 (hours|days); a checkpoint \(96\.4 GB in 48\.2 s\)", text)
        goodputs += re.findall(r"goodput of ([\d.]+)%", text)
    assert 85 < float(goodputs[0]) < float(goodputs[1]) < 100
    assert "cluster.storage_bytes_per_second = 1.00 GB/s per node, as of Llama 3 405B" in text


def test_plan_writes_the_checkpoint_interval_that_its_goodput_assumes(tmp_path):
    out = tmp_path / "planned.toml"

    def planned_every(*options: str) -> tuple[object, str]:
        out.unlink(missing_ok=True)
        text = plan_output("llama3-8b", *H100, "--top", 1, "--out", out, *options)
        return tomllib.loads(out.read_text())["checkpoint"].get("every"), text

    every, text = planned_every("--mtbf", "8h")
    training = plan_json("llama3-8b", *H100, "--mtbf", "8h")["training"]
    assert every == training["interval_steps"] < 500
    assert f"{format_duration(training['interval_seconds'])}, or {every} steps (Young's" in text
    note = f"# checkpoint.every = {every}: the best goodput ({training['goodput']:.1%}) with a failure"
    assert note in out.read_text()
    assert "checkpoint.every (500)" not in out.read_text()
    assert planned_every("--mtbf", "8h", "--set", "checkpoint.every=70")[0] == 70
    assert planned_every("--mtbf", "8h", "--set", "checkpoint.keep.every=1000")[0] is None
    assert planned_every("--mtbf", "1h", "--set", "cluster.storage_bytes_per_second=1e15")[0] == 1
    assert planned_every()[0] is None


@pytest.mark.parametrize("text", ["8", "8x", "0h", "-1h", "h", "1e3s"])
def test_plan_refuses_time_between_failures_without_number_or_unit(text):
    with pytest.raises(UserError, match="is not a duration\n  fix: write a number with its unit"):
        plan_output("tiny", *H100, "--mtbf", text)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("plan explain", H100),
        ("plan compare", ("data_parallel=zero1", *H100)),
        ("plan export", ("--to", "megatron", *H100)),
        ("plan", ("--machine", "h100", "--nodes", "2:3")),
        ("advise", H100),
        ("memory", ("--ranks", 8)),
        ("mesh", ("--ranks", 8)),
        ("placement", ("--ranks", 8)),
        ("pipeline split", ("--stages", 2)),
    ],
)
def test_commands_that_predict_take_a_model(command, options):
    assert cli_runner.command_output(*command.split(), "tiny", *options)


@pytest.mark.parametrize("command", [("train",), ("launch", "--to", "slurm")])
def test_commands_that_train_refuse_a_model(command):
    with pytest.raises(UserError, match="is a model, not a run file"):
        cli_runner.command_output(*command, "llama3-8b")


def test_plan_names_much_faster_layout_that_lacks_memory(run):
    """Two GPUs with a slow network train long sequences. The best layout that fits is
    about a third as fast, as the printed commands show."""
    slow = ("--set", "cluster.network_bytes_per_second=1.25e8", "--set", "training.tokens_per_step=524288")
    memory = ("--set", f"cluster.memory_bytes={28 * GIB}", "--set", "training.seq_len=131072")
    cards = ("--machine", "rtx4090", "--nodes", 2, "--nproc", 1, *slow, *memory)
    plan = plan_json(run, *cards)
    faster = plan["faster_but_too_large"]
    option = faster["option"]
    best = min(layout["step_seconds"] for layout in plan["layouts"])
    assert faster["speedup"] == pytest.approx(best / option["step_seconds"])
    assert faster["speedup"] > 2.5
    assert option["p_oom"] > 0.9
    assert 0 < faster["missing_device_bytes"] < 5 * GIB
    lines = plan_output(run, *cards).splitlines()
    (number,) = (i for i, line in enumerate(lines) if line.startswith("A layout that does not fit would be"))
    shortage = f"It lacks {faster['missing_device_bytes'] / GIB:.1f} GiB of device memory"
    assert f"{option['candidate']}, {option['step_seconds']:.1f} s a step. {shortage}" in lines[number]
    (text,) = re.findall(r'phalanx plan compare RUN\.toml "(.*)" compares', lines[number + 1])
    assert f"{option['step_seconds']:.3f} s" in plan_output("compare", run, text, *cards)
    (setting,) = re.findall(r"It fits with --set (training\.seq_len=\d+) ", lines[number + 1])
    faster_plan = plan_json(run, *cards, "--set", setting)
    assert faster_plan["layouts"][0]["step_seconds"] <= 1.001 * faster["fitting_step_seconds"]


@pytest.mark.parametrize("given_bytes", [None, 200 * GIB])
def test_plan_shows_cpu_memory_of_a_node_and_the_reserve(run, given_bytes):
    """Of 16 bytes per parameter, 12 are offloaded, and checkpoints copy 12. The table shows them per node and
    layout, compared with the CPU memory of the node."""
    host_memory = ("--set", f"cluster.host_memory_bytes={given_bytes}") if given_bytes else ()
    cards = ("--machine", "rtx4090", "--nproc", 2, "--set", "training.tokens_per_step=131072", *host_memory)
    plan, text = plan_json(run, *cards, "--top", 3), plan_output(run, *cards, "--top", 3)
    host_bytes = [layout["node_host_bytes"] for layout in plan["layouts"]]
    assert host_bytes == [2 * layout["host_bytes"] for layout in plan["layouts"]]
    assert max(host_bytes) / GIB > 24 * 8.03e9 / GIB > 160
    for layout, need in zip(plan["layouts"], host_bytes, strict=True):
        assert f" {layout['memory_bytes'] / GIB:.1f} + {need / GIB:.0f} " in text
    assert plan["node_host_memory_bytes"] == 2 * (given_bytes or 256 * GIB)
    reported = "cluster.host_memory_bytes provides 400.0 GiB"
    if not given_bytes:
        reported = "cluster.host_memory_bytes is not set, so 512.0 GiB is assumed"
    purpose = "for checkpoint copies and offload"
    assert (
        f"\nCPU memory: a node of 2 ranks needs up to {max(host_bytes) / GIB:.1f} GiB {purpose}; {reported}.\n" in text
    )
    limit = f"limit: a rank can use {plan['rank_limit_bytes'] / GIB:.1f} GiB ("
    reserve = "of 24.0 GiB, including the memory that PyTorch's allocator and NCCL reserve; the reserve is 0.4 GiB for "
    reserve += "the CUDA context, 1.0 GiB for errors of the prediction"
    assert re.search(rf"{re.escape(limit)}[\d.]+ GB\) {re.escape(reserve)}", text)
    explained = plan_output("explain", run, *cards)
    assert (
        f"CPU memory: a node of 2 ranks needs up to {host_bytes[0] / GIB:.1f} GiB {purpose}; {reported}\n" in explained
    )
    assert limit in explained


def test_plan_without_offload_shows_cpu_memory_of_checkpoint_copies(run):
    (layout,) = plan_json(run, *H100, "--top", 1)["layouts"]
    text, need = plan_output(run, *H100, "--top", 1), layout["node_host_bytes"]
    assert "offload" not in layout["candidate"]
    assert f" {layout['memory_bytes'] / GIB:.1f} + {need / GIB:.0f} " in text
    assert f"\nCPU memory: a node of 8 ranks needs up to {need / GIB:.1f} GiB for checkpoint copies" in text
    assert "GiB: tensors of the fullest rank + CPU memory of a node; limit: a rank can use " in text


def test_plan_of_cpus_shows_no_other_cpu_memory(run):
    text = plan_output(run, "--machine", "cpu", "--nproc", 2, "--set", "cluster.memory_bytes=400000000000", "--top", 1)
    assert "CPU memory" not in text
    assert "GiB: tensors of the fullest rank; limit: a rank can use " in text


def test_plan_all_shows_each_schedule(run):
    """The run has 8 stages on two nodes: one row per layout, or one row per schedule."""
    options = ("--machine", "h100", "--nodes", 2, "--set", "cluster.memory_bytes=16000000000", "--top", 20)
    grouped, all_rows = (
        [row["layout"] for row in plan_json(run, *options, *all_option)["layouts"]] for all_option in ((), ("--all",))
    )
    without_schedule = [
        [{key: value for key, value in row.items() if key not in ("schedule", "virtual_stages")} for row in rows]
        for rows in (grouped, all_rows)
    ]
    counts_grouped, counts_all = ([rows.count(row) for row in rows] for rows in without_schedule)
    assert max(counts_all) > 2
    assert max(counts_grouped) < max(counts_all)


def test_plan_asks_for_network_speed_of_consumer_cards_on_several_nodes(run):
    with pytest.raises(UserError, match=r"cluster\.network_bytes_per_second is unknown, but 16 devices"):
        plan_output(run, "--machine", "rtx4090", "--nodes", 2)
    search = r"set cluster\.network_bytes_per_second to find a sufficient number of nodes"
    with pytest.raises(UserError, match=search):
        plan_output(run, "--machine", "rtx4090", "--nodes", 1, "--set", "model.preset=llama3-405b")


def test_plan_prints_rent_of_training_when_price_is_set(run):
    priced = plan_output(run, *H100, "--set", "cluster.price_per_device_hour=2.5")
    hours, price = re.search(r"([\d,]+) device-hours at 2.5: ([\d,]+)", priced).groups()
    assert float(price.replace(",", "")) == pytest.approx(2.5 * float(hours.replace(",", "")), rel=0.02)


def test_plan_explain_prints_time_and_memory_breakdown_and_alternatives(run):
    text = plan_output("explain", run, *H100)
    for arguments in (
        "the optimizer",
        "activations",
        "other layouts, compared with this one",
        "twice the memory",
        "P(OOM)",
        "HFU",
    ):
        assert arguments in text
    one_gpu = ("--machine", "h100", "--nodes", 1, "--nproc", 1, "--set", "model.preset=tiny")
    with pytest.raises(UserError, match=r"K = 500 is not a layout of the table\s+fix: use a number from 1 to \d+$"):
        plan_output("explain", run, 500, *one_gpu)


def test_plan_explain_and_compare_show_the_phase_with_the_most_tokens(run):
    run.write_text(
        '[model]\npreset = "tiny"\n[training]\nsteps = 10\nseq_len = 128\ntokens_per_step = 4096\n'
        "[[phase]]\nfrom_step = 2\nseq_len = 256\n"
    )
    for command in (("explain", run), ("compare", run, "micro_batch_size=1", "micro_batch_size=2")):
        text = plan_output(*command, "--machine", "h100", "--nodes", 1, "--nproc", 1)
        assert "4,096 tokens a step in sequences of 256" in text
        assert "(from step 3), which has the most tokens" in text


def test_plan_of_fp32_run_on_gpus_names_the_option_that_plans_it(run):
    with pytest.raises(UserError, match=r"= 'fp32' is not .*\n.*\(--set training.precision=bf16\), or calib"):
        plan_output(run, *H100, "--set", "training.precision=fp32")


def test_plan_picture_contains_numbers_of_explained_layout(run, tmp_path):
    layouts = plan_json(run, *H100)["layouts"]
    title = "llama3-8b on 16 x h100, 524,288 tokens a step in sequences of 4,096"
    for arguments, index in (((), 0), ((2,), 1)):
        file = tmp_path / "step.html"
        text = plan_output("explain", run, *arguments, *H100, "--picture", file)
        picture, option = re.search(r"<svg.*</svg>", file.read_text(), re.DOTALL).group(), layouts[index]
        assert f"{index + 1}. {option['candidate']}" in text
        assert texts_of_class(picture, "title") == [f"{title}, layout {index + 1}"]
        assert texts_of_class(picture, "layout") == [option["candidate"]]
        assert texts_of_class(picture, "total")[0] == f"{option['step_seconds']:.3f} s"
        parts = option["parts"]
        assert sum(parts.values()) == pytest.approx(option["step_seconds"])
        seconds = [f"{parts[part]:.3f}" for part in PART_DESCRIPTIONS]
        shares = [f"{parts[part] / option['step_seconds']:.1%}" for part in PART_DESCRIPTIONS]
        figures = texts_of_class(picture, "figure")
        assert (figures[: 6 * len(parts) : 6], figures[1 : 6 * len(parts) : 6]) == (seconds, shares)
        alternatives = [
            f"{position}. {other['candidate']}" for position, other in enumerate(layouts, 1) if position != index + 1
        ]
        assert texts_of_class(picture, "name")[1:5] == alternatives[:4]
        last = [f"{part_bytes / GIB:.2f}" for part_bytes in option["stages"]["last"].values()]
        stages = len(figures[6 * len(parts) :]) // len(last)
        assert figures[6 * len(parts) :][stages - 1 :: stages] == last
        assert texts_of_class(picture, "counted")[-1].startswith(f"{option['memory_bytes'] / GIB:.1f} GiB")


def test_plan_explain_memory_parts_add_up_to_table(run):
    option = plan_json(run, *H100)["layouts"][0]
    text = plan_output("explain", run, *H100)
    table = text[text.index("memory, GiB") : text.index("parts: ")].splitlines()[1:]
    rows = {arguments[0]: float(arguments[-1]) for line in table if (arguments := line.rstrip("█ ").split())}
    total = rows.pop("total")
    assert sum(rows.values()) == pytest.approx(total, abs=0.03)
    assert total == pytest.approx(option["memory_bytes"] / GIB, abs=0.01)
    assert option["stage_bytes"]["last"] == option["memory_bytes"]


def test_plan_export_names_what_the_trainer_cannot_express_of_the_chosen_layout(run, monkeypatch):
    resolved = run_on_cluster(run, "h100", 2, 8, [])
    evaluated = partial(evaluate_layout, resolved)
    option = evaluated(parse_layout("data_parallel=zero3,activation_checkpointing=selective"))
    exported = evaluated(parse_layout("data_parallel=zero3,tp=2"))
    plan = Plan(layouts=[option], candidates=[], fitting=1, fastest=option, closest_to_fitting=None)
    monkeypatch.setattr("phalanx.cli.commands.plan_export.rank_layouts", lambda *_: plan)
    (note,) = _explain_not_best(resolved, exported, "torchtitan")
    assert str(option.candidate) in note
    assert "layout.activation_checkpointing = selective cannot be written for torchtitan" in note
    assert _explain_not_best(resolved, exported, "megatron") == []
    assert _explain_not_best(resolved, option, "torchtitan") == []


def test_plan_export_has_no_verdict_on_the_other_trainer(run):
    stderr_lines = cli_runner.command_stderr("plan", "export", run, "--to", "megatron", *H100).splitlines()
    (figures,) = (line for line in stderr_lines if " s a step" in line)
    assert figures.endswith("are Phalanx's figures for this layout; those of Megatron-LM are not predicted")
    assert not any("P(OOM)" in line for line in stderr_lines)
    assert any(line.startswith("note: Megatron-LM keeps in addition to what Phalanx does: ") for line in stderr_lines)


def test_plan_names_the_predicted_trainer_in_its_first_line(run, tmp_path):
    for arguments in ((run, "--top", 1), ("compare", run, "tp=8", "tp=4")):
        first, *_ = plan_output(*arguments, *H100).splitlines()
        assert first.startswith("Phalanx's own trainer: llama3-8b on 16 x h100")
    assert plan_json(run, *H100, "--top", 1)["trainer"] == "Phalanx"
    path = tmp_path / "runs.csv"
    rows = [{**MEGATRON_22B_ROW, "id": name, "facts": name} for name in ("DeepSpeed", "nanotron", "")]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    first, _, *lines = plan_output("predict", path).splitlines()
    assert first.startswith("each row's own trainer, from `schedule` and `facts`; never Phalanx")
    trainers = [json.loads(line)["trainer"] for line in plan_output("predict", path, "--json").splitlines()]
    assert trainers == ["DeepSpeed", "nanotron", "Megatron-LM"]
    assert all(f"  {trainer}" in line for trainer, line in zip(trainers, lines, strict=True))


def test_plan_reports_written_files_on_stderr(run, tmp_path):
    picture, run_file = tmp_path / "step.svg", tmp_path / "planned.toml"
    for file, *arguments in ((run_file, run, "--out", run_file), (picture, "explain", run, "--picture", picture)):
        assert f"wrote {file}" in cli_runner.command_stderr("plan", *arguments, *H100)
        assert file.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("export", "RUN", "--to", "megatrom"), r"--to = 'megatrom' is not known\s+fix: use one of megatron, torchti"),
        (
            ("export", "RUN", "--to", "nanotron", "--set", "model.preset=mixtral-8x7b"),
            "model.moe cannot be(.|\n)*for the unchanged run: Megatron-LM, torchtitan, NeMo Automodel, DeepSpeed$",
        ),
        (("compare", "RUN", "tp=3"), r"layout\.tp = 3"),
        (("compare", "RUN", "tp:3"), "is not of the form KEY=VALUE"),
        (("compare", "RUN", 1, "tp=3"), r"layout\.tp = 3"),
        (("compare", "RUN", 1, "third"), "is not of the form KEY=VALUE"),
        (("compare", "RUN", 0, 1), "layout = 0 is not a layout of the table"),
        (("compare", "RUN", 1, 99_999), "layout = 99999 is not a layout of the table"),
        (("explain", "RUN", 99_999), r"K = 99999 is not a layout of the table\s+fix: use a number from 1 to 1,000"),
        (("explain", "RUN", "--picture", "step.gif"), r"--picture = 'step.gif'(.|\n)*\.svg, \.html or \.png"),
        (("explain", "RUN", "--picture", "no/step.svg"), "--picture = .*cannot be written: there is no directory no"),
        (("explore", "RUN", "--html", "no/page.html"), "--html = .*cannot be written: there is no directory no"),
        (("RUN", "--out", "."), "cannot be written: it is a directory"),
        (("RUN", "--out", "nowhere/run.toml"), "cannot be written: there is no directory nowhere"),
        (("RUN", "--out", "run.toml"), "is the run file itself"),
    ],
)
def test_plan_rejects_invalid_values_before_search(run, monkeypatch, words, message):
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr("phalanx.plan.search.search.enumerate_layouts", lambda *_: pytest.fail("searched"))
    with pytest.raises(UserError, match=message):
        plan_output(*("run.toml" if argument == "RUN" else argument for argument in words), *H100)


def test_plan_compare_explains_slower_layout(run):
    text = plan_output("compare", run, "tp=16,data_parallel=ddp,micro_batch_size=1", *H100)
    assert "tp = 16 leaves the domain of 8 devices with fast links" in text
    assert "+" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("layout", "evaluated", "reason"),
    [
        ("data_parallel=zero2,pp=16", "zero1", "in a pipeline"),
        ("data_parallel=zero3,tp=8,pp=2", "ddp", "on one shard"),
        ("data_parallel=hsdp,dp_shard=1", "ddp", "on one shard"),
    ],
)
def test_plan_compare_says_which_strategy_it_evaluates_instead(run, layout, evaluated, reason):
    strategy = layout.partition(",")[0].partition("=")[2]
    text = plan_output("compare", run, layout, "tp=8", *H100)
    (note,) = (line for line in text.splitlines() if reason in line)
    assert note.startswith(f"A: data_parallel = {strategy} {reason} trains as {evaluated}, which is evaluated here: ")


def test_plan_compare_attributes_step_time_difference_of_two_layouts(run):
    layouts = ("data_parallel=zero1,tp=2,micro_batch_size=1", "data_parallel=zero3,micro_batch_size=1")
    text = plan_output("compare", run, *layouts, *H100)
    assert "A: zero1 dp 8" in text
    assert "B: zero3 dp 16" in text
    last_line = text.splitlines()[-1]
    share, longer = re.match(r"A takes ([\d.]+)% longer than B, \+(\d+) ms: ", last_line).groups()
    first_seconds, second_seconds, difference = re.search(
        r"^step +([\d.]+) s +([\d.]+) s +\+([\d.]+) s", text, re.MULTILINE
    ).groups()
    assert float(share) == pytest.approx(100 * (float(first_seconds) / float(second_seconds) - 1), abs=0.1)
    assert float(difference) == int(longer) / 1e3
    parts = [int(size) for size in re.findall(r"([+-]\d+) ms", last_line)][1:]
    assert sum(parts) == pytest.approx(int(longer), rel=0.02)  # small parts are not listed
    assert plan_output("compare", run, *reversed(layouts), *H100).splitlines()[-1] == last_line.translate(
        {65: 66, 66: 65}
    )
    assert plan_output("compare", run, layouts[0], layouts[0], *H100).splitlines()[-1] == "A and B are equally fast"
    short = ("--machine", "h100", "--nproc", 1, "--set", "model.preset=tiny", "--set", "training.tokens_per_step=8192")
    layouts = ("micro_batch_size=2", "micro_batch_size=2,activation_checkpointing=selective")
    assert re.match(
        r"B takes [\d.]+% longer than A, \+\d+ µs: \+\d+ µs",
        plan_output("compare", run, *layouts, *short).splitlines()[-1],
    )


def test_plan_compare_accepts_layout_numbers_of_table(run):
    first, _, third = (option["candidate"] for option in plan_json(run, *H100, "--top", 3)["layouts"])
    text = plan_output("compare", run, "3*", 1, *H100)
    assert f"layout 3: {third}" in text
    assert f"layout 1: {first}" in text
    assert text.replace("layout 1", "best").split() == plan_output("compare", run, 3, *H100).split()
    text = plan_output("compare", run, "data_parallel=ddp,tp=16,micro_batch_size=1", 3, *H100)
    assert "A: ddp dp 1, tp 16" in text
    assert f"layout 3: {third}" in text
    one_gpu = ("--machine", "h100", "--nodes", 1, "--nproc", 1, "--set", "model.preset=tiny")
    with pytest.raises(
        UserError, match=r"layout = 500 is not a layout of the table\s+fix: use a number from 1 to \d+$"
    ):
        plan_output("compare", run, 1, 500, *one_gpu)


def test_plan_exports_best_layout_to_other_trainers_and_run_file(run, tmp_path):
    assert "--num-layers" in plan_output(
        "export", run, "--to", "megatron", *H100, "--set", "layout.data_parallel=zero1"
    )
    for trainer in ("nanotron", "torchtitan", "deepspeed"):
        short = ("--set", "model.num_layers=8", "--set", "model.rope.theta=10000")
        assert plan_output("export", run, "--to", trainer, *H100, *short)
    experts = ("--machine", "h100", "--nodes", 8, "--set", "model.preset=mixtral-8x7b")
    assert json.loads(plan_output("export", run, "--to", "deepspeed", *experts))["zero_optimization"]["stage"] == 1
    one_gpu = ("--machine", "a100", "--nproc", 1, "--set", "model.rope.theta=10000")
    with pytest.raises(
        UserError, match=r"cannot express any layout of this run that fits; for the fastest, layout\.\w+ cannot"
    ):
        plan_output("export", run, "--to", "nanotron", *one_gpu)
    out = tmp_path / "planned.toml"
    best = plan_json(run, *H100, "--out", out)["layouts"][0]
    planned = load_run(out)
    assert planned.cluster.ranks == 16
    check_layout(ResolvedRun(planned, 16))
    assert planned.layout.model_dump(exclude_defaults=True) == best["layout"]


def test_plan_writes_no_default_for_small_runs_into_file_of_large_model(run, tmp_path):
    out = tmp_path / "planned.toml"
    errors = cli_runner.command_stderr("plan", run, *H100, "--top", 1, "--out", out)
    notes = (
        "not set: data.train (stdlib), data.tokenizer (bpe), data.tokenizer_vocab (2048; the model has 128256), "
        "training.steps (1000), optimizer.warmup_steps (50), checkpoint.every (500). These defaults are for small "
        "runs; set the fields before you train."
    )
    assert notes in " ".join(errors.split())
    assert f"start it with phalanx train {out} --rendezvous FIRST_NODE:29500 on each node, or phalanx launch" in errors
    assert f"# {notes}" in out.read_text()
    run_table = tomllib.loads(out.read_text())
    unset = {"data": ("train", "tokenizer", "tokenizer_vocab"), "training": ("steps",)}
    unset |= {"optimizer": ("warmup_steps",), "checkpoint": ("every",)}
    assert [name for table, names in unset.items() for name in names if name in run_table[table]] == []
    out.unlink()
    settings = ("--set", "training.steps=9000", "--set", "checkpoint.every=70", "--set", "data.tokenizer=llama.json")
    errors = cli_runner.command_stderr("plan", run, *H100, "--top", 1, *settings, "--out", out)
    assert "not set: data.train (stdlib), optimizer.warmup_steps (50). These" in " ".join(errors.split())
    planned = load_run(out)
    assert (planned.training.steps, planned.checkpoint.every) == (9000, 70)
    out.unlink()
    small = ("--set", "model.preset=tiny", "--machine", "cpu", "--nproc", 2)
    errors = cli_runner.command_stderr("plan", run, *small, "--top", 1, "--out", out)
    assert "small runs" not in errors
    assert errors.splitlines()[0].endswith(f"; start it with phalanx train {out}")


def test_plan_of_a_config_without_trainable_weights_writes_a_run_from_new_weights(tmp_path):
    out = tmp_path / "planned.toml"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 128}
    reasons = {
        "phi3": "is planned as Phalanx's transformer of its sizes, without factors of long contexts",
        "llama": "has no *.safetensors",
    }
    ropes = {"phi3": {"rope_type": "longrope"}}
    for family, reason in reasons.items():
        folder = tmp_path / "a\nname = 1\x1b" / family
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(
            json.dumps({"model_type": family, **sizes, "rope_scaling": ropes.get(family)})
        )
        errors = cli_runner.command_stderr(
            "plan", folder / "config.json", "--machine", "cpu", "--nproc", 1, "--top", 1, "--out", out
        )
        assert "start it" not in errors
        assert f"train from new weights, not those of the model, with phalanx train {out}" in errors
        header = out.read_text().splitlines()[1]
        assert reason in header
        assert header.endswith("; this run trains Phalanx's transformer of these sizes from new weights")
        planned = load_run(out, environment={})
        assert (planned.name, planned.model.from_hf, planned.model.hidden_size) == (family, None, 64)
        assert f"trainer: {family} on 1 x cpu" in plan_output(folder, "--machine", "cpu", "--nproc", 1, "--top", 1)
        out.unlink()
    folder = folder.rename(tmp_path / "llama")
    (folder / "model.safetensors").touch()
    errors = cli_runner.command_stderr("plan", folder, "--machine", "cpu", "--nproc", 1, "--top", 1, "--out", out)
    assert "start it with" in errors
    assert load_run(out, environment={}).model.from_hf == str(folder)
    assert "new weights" not in out.read_text()


def test_plan_writes_learning_rate_of_published_runs_with_its_source(run, tmp_path):
    run_file = tmp_path / "planned.toml"
    note = "optimizer.learning_rate = 0.0003: not set; the default is that of Llama 3 8B (arXiv 2407.21783, table 3)"
    errors = cli_runner.command_stderr("plan", run, *H100, "--top", 1, "--out", run_file)
    assert (load_run(run_file).optimizer.learning_rate, run_file.read_text().splitlines()[1]) == (3e-4, f"# {note}")
    assert note in errors.splitlines()


def test_plan_predict_predicts_rows_of_csv_file(tmp_path):
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(MEGATRON_22B_ROW))
        table.writeheader()
        table.writerows([MEGATRON_22B_ROW, {**MEGATRON_22B_ROW, "id": "row-2", "layers": ""}])
    first, second = (json.loads(line) for line in plan_output("predict", path, "--json").splitlines())
    spans = {"step_time_s", "step_time_low_s", "step_time_high_s"}
    keys = spans | {"id", "memory_gib", "p_oom", "tflops_per_gpu", "mfu", "hfu"}
    assert keys <= set(first)
    assert second["id"] == "row-2"
    assert "layers" in second["reason"]
    text = plan_output("predict", path)
    assert "row-1" in text
    assert "layers is required" in text


def test_plan_reports_shortage_and_needed_devices_when_no_layout_fits(run):
    with pytest.raises(
        UserError,
        match=r"none of [\d,]+ fits(.|\n)*uses [\d.]+ GiB of [\d.]+ of \w+ memory \(P.*\); with \d+ times",
    ):
        plan_output(run, "--machine", "h100", "--nodes", 1, "--nproc", 2, "--set", "model.preset=llama3-70b")


def test_plan_raises_user_error_for_unknown_machine(run):
    with pytest.raises(UserError, match="did you mean 'h100'"):
        plan_output(run, "--machine", "h1000")
    with pytest.raises(UserError, match=r"cluster\.peak_flops is unknown, .* names no machine") as error_info:
        plan_output(run)
    assert "--machine h100, or on a machine without GPUs --machine cpu" in error_info.value.fix


def test_plan_writes_safe_layout_when_fastest_may_not_fit(tmp_path):
    run, out_file = tmp_path / "run.toml", tmp_path / "written.toml"
    run.write_text(
        '[model]\npreset = "llama3-8b"\n[training]\nseq_len = 8192\ntokens_per_step = 4194304\n', encoding="utf-8"
    )
    machine = ("--machine", "h100", "--nodes", 8, "--set", f"cluster.memory_bytes={70 * GIB}")
    output = " ".join(plan_output(run, *machine, "--top", 1, "--out", out_file).split())
    facts = json.loads(plan_output(run, *machine, "--json"))
    first, *others = facts["layouts"]
    sure = next(layout for layout in others if layout["p_oom"] < 0.05)
    assert 0.05 <= first["p_oom"] < 0.2
    assert f"Layout 1 may not fit (P(OOM) {first['p_oom']:.0%})" in output
    assert sure["candidate"] in output
    assert facts["taken"] == sure["candidate"]
    written_layout = load_run(out_file, environment={}).layout.model_dump(exclude_defaults=True)
    assert sure["layout"].items() <= written_layout.items()


def test_plan_imports_numpy_and_pydantic_but_not_torch(run):
    assert cli_runner.imported_packages("plan", run, "--machine", "a100") == {"numpy", "pydantic"}


def test_plan_draws_progress_bar_only_on_terminal(run):
    command = [sys.executable, "-m", "phalanx", "plan", str(run), *map(str, H100), "--json"]
    quiet = run_python(command, text=True, timeout=120, check=True)
    assert quiet.stderr == ""
    controller, terminal = pty.openpty()
    with tempfile.TemporaryFile("w+") as stdout_file:  # a pipe would be full before the bar is read
        with start_python(command, stdout=stdout_file, stderr=terminal, text=True):
            os.close(terminal)
            screen = b"".join(iter(partial(read_terminal, controller), b"")).decode()
        stdout_file.seek(0)
        assert stdout_file.read() == quiet.stdout
    assert re.search(r"counting memory of the fastest.* \d+/10", screen)
    assert len(json.loads(quiet.stdout)["layouts"]) == 10


def read_terminal(terminal: int) -> bytes:
    """Return the output since the last call; an empty string when the program has ended."""
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux raises this when the other end is closed
        return b""


def test_plan_help_does_not_import_numpy_or_torch():
    assert cli_runner.imported_packages("plan", "--help") <= {"pydantic"}


def test_plan_help_lists_its_options_commands_and_examples():
    text = plan_output("--help")
    for name in ("explain", "compare", "explore", "export", "predict"):
        assert re.search(rf"│ {name} +[A-Z]", text), name
        assert f"phalanx plan {name} " in text
    assert "--top " in text


@pytest.mark.parametrize("option", list(PlanGroup.moved_options))
def test_plan_names_command_of_option_that_has_moved(option):
    with pytest.raises(
        UserError, match=f"'{option}' has moved to another command\n  fix: write: phalanx plan "
    ) as error:
        plan_output("run.toml", f"{option}=1", "--machine", "h100")
    *_, command = error.value.fix.partition("phalanx plan ")
    name, *arguments = command.split()
    options = {option for parameter in get_command(plan_app).commands[name].params for option in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options


def test_plan_of_run_file_with_name_of_command(run, monkeypatch):
    """`explain` is a run file, in the position of a command."""
    monkeypatch.chdir(run.parent)
    small = ("--machine", "h100", "--nproc", 1, "--set", "model.preset=tiny")
    with pytest.raises(UserError, match=r"^RUN\.toml\|MODEL is missing\n  fix: write: .*plan explain "):
        plan_output("explain", *small)
    run.rename("explain")
    assert plan_output("explain", *small).splitlines()[3].split()[:2] == ["layout", "step"]
    assert plan_output("explain", "explain", *small).splitlines()[3].startswith("1. ")


AUTO_LAYOUT_RUN = """layout = "auto"
[model]
preset = "tiny"
[data]
train = ["{text}"]
tokenizer = "bytes"
[training]
steps = 2
seq_len = 64
tokens_per_step = 512
[cluster]
preset = "a100"
device = "cpu"
nproc_per_node = 2
"""


def test_train_with_auto_layout_uses_best_planned_layout(tmp_path):
    text, path = tmp_path / "text.txt", tmp_path / "run.toml"
    text.write_text("To plan is to choose. " * 400)
    path.write_text(
        AUTO_LAYOUT_RUN.format(text=text) + "[model.moe]\nnum_experts = 4\ntop_k = 2\nexpert_ffn_size = 64\n"
    )
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "train",
        str(path),
        "--set",
        f"output_dir={tmp_path}",
        "--set",
        "name=planned",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "planned" / "plan.json").read_text())
    best = plan["layouts"][0]
    assert f"layout: {best['candidate']}" in done.stderr
    trained = load_run(tmp_path / "planned" / "run.toml")
    assert trained.layout.model_dump(exclude_defaults=True) == best["layout"]
    assert not trained.auto_layout


def test_plan_and_auto_layout_predict_fp32_on_cpu(tmp_path):
    path = tmp_path / "run.toml"
    cpu = AUTO_LAYOUT_RUN.format(text="stdlib").replace('preset = "a100"', 'preset = "cpu"')
    path.write_text(cpu.replace("steps = 2", 'steps = 2\nprecision = "fp32"'))
    assert "cluster.peak_flops = 60.0 GFLOP/s also in fp32, preset cpu" in cli_runner.command_output("plan", path)
    (single, double) = (
        cli_runner.command_json("plan", path, "--set", f"training.precision={name}")["layouts"][0]
        for name in ("bf16", "fp32")
    )
    assert double["step_seconds"] > single["step_seconds"]  # twice the bytes
    config = tomllib.loads(cli_runner.command_output("train", path, "--print-config"))
    check_layout(ResolvedRun(run_from_table(config), 2))
    assert config["training"]["precision"] == "fp32"
    with pytest.raises(UserError, match=r"training\.precision = 'fp32'"):
        cli_runner.command_output("plan", path, "--machine", "h100", "--set", "cluster.device=cuda")


def test_auto_layout_is_planned_for_all_ranks_of_all_nodes(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(AUTO_LAYOUT_RUN.format(text="stdlib") + "nodes = 2\n")
    for nproc in (2, 4):
        text = cli_runner.command_output("train", path, "--print-config", "--nproc", nproc)
        check_layout(ResolvedRun(run_from_table(tomllib.loads(text)), 2 * nproc))


def test_memory_rejects_run_with_auto_layout(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(AUTO_LAYOUT_RUN.format(text="stdlib"))
    with pytest.raises(UserError, match="chosen by the planner"):
        cli_runner.command_output("memory", path, "--ranks", 2)
    assert "[layout]" in cli_runner.command_output("train", path, "--print-config")


def test_plan_table_fits_in_100_columns_and_has_one_line_a_row_in_a_pipe(run, monkeypatch):
    command = ("plan", run, *H100, "--top", 3)
    rows = cli_runner.command_output(*command, width=100).partition("layout ")[2].partition("\n\n")[0].splitlines()
    assert max(map(len, rows)) <= 100
    assert any(row.startswith("    ") for row in rows)
    monkeypatch.delenv("COLUMNS", raising=False)
    with redirect_stdout(StringIO()) as piped:
        app([str(argument) for argument in command], standalone_mode=False)
    layouts = [option["candidate"] for option in plan_json(run, *H100, "--top", 3)["layouts"]]
    lines = [line for line in piped.getvalue().splitlines() if re.match(r"\d[* ] ", line)]
    assert [layout in line for layout, line in zip(layouts, lines, strict=True)] == [True] * 3


def test_plan_compare_accepts_pasted_rows_of_its_table(run):
    text = plan_output(run, *H100, "--top", 3, width=100)
    rows = re.findall(r"^(\d\*? .*\n(?: {4}.*\n)*)", text, re.MULTILINE)
    assert len(rows) == 3
    assert plan_output("compare", run, rows[0], *H100)
    by_text = plan_output("compare", run, rows[1], rows[2], *H100)
    by_number = plan_output("compare", run, 2, 3, *H100)
    figures = [re.findall(r"\d[\d.]*", re.sub("layout [23]", "", output)) for output in (by_text, by_number)]
    assert figures[0] == figures[1]


def test_parse_layout_accepts_boolean_and_float_options(run):
    assert (
        parse_layout("data_parallel=zero3, reshard_after_forward=false, bucket_mb=10.5").reshard_after_forward is False
    )


def test_plan_of_a_range_shows_best_layout_of_each_number_of_nodes(run):
    small = ("--machine", "h100", "--nproc", 2, "--set", "model.num_layers=4")
    counts = plan_json(run, *small, "--nodes", "1:2")["node_counts"]
    assert [(count["nodes"], count["devices"]) for count in counts] == [(1, 2), (2, 4)]
    two_nodes = plan_json(run, *small, "--nodes", 2)
    assert counts[1]["best"]["candidate"] == two_nodes["taken"]
    assert counts[1]["best"]["step_seconds"] == two_nodes["layouts"][0]["step_seconds"]
    table = plan_output(run, *small, "--nodes", "1:2")
    for count in counts:
        best = count["best"]
        row = rf"^{count['nodes']} +{re.escape(best['candidate'])} +{count['devices']} .* {best['step_seconds']:.3f} "
        assert re.search(row, table, re.MULTILINE)
    for option, *value in (("--out", "planned.toml"), ("--top", 10), ("--tokens", 1e9), ("--all",)):
        with pytest.raises(UserError, match=f"--nodes = '1:2' is a range, which cannot be combined with {option}"):
            plan_output(run, "--nodes", "1:2", option, *value)


def test_plan_of_a_range_keeps_going_where_no_layout_fits(run, monkeypatch):
    module = "phalanx.plan.search.explain.plan_or_raise"

    def plan_where_two_ranks_fit(resolved, **options):
        if resolved.world_size != 2:
            raise UserError("layout", None, "cannot be chosen: none of 9 fits")
        return plan_or_raise(resolved, **options)

    monkeypatch.setattr(module, plan_where_two_ranks_fit)
    small = ("--machine", "h100", "--nproc", 1, "--set", "model.num_layers=4")
    counts = plan_json(run, *small, "--nodes", "1:3")["node_counts"]
    assert [bool(count["best"]) for count in counts] == [False, True, False]
    assert counts[0]["problem"] == "layout cannot be chosen: none of 9 fits"
    assert "layout cannot be chosen: none of 9 fits" in plan_output(run, *small, "--nodes", "1:3")
    with pytest.raises(UserError, match="cannot be chosen: none of 9 fits"):
        plan_output(run, *small, "--nodes", "3:4")


@pytest.mark.parametrize(
    ("text", "counts"),
    [(None, [None]), ("4", [4]), ("2:4", [2, 3, 4]), ("3:40", [3, 6, 12, 24, 40]), ("8:64", [8, 16, 32, 64])],
)
def test_parse_node_counts_returns_all_numbers_or_doublings(text, counts):
    assert parse_node_counts(text) == counts


def test_plan_rejects_more_nodes_than_any_cluster_has(tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('[model]\npreset = "tiny"\n')
    with pytest.raises(UserError, match=r"--nodes = 1000000000000 is more than any cluster has"):
        cli_runner.command_output("plan", run, "--machine", "h100", "--nodes", 10**12)
