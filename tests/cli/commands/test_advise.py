import re
from functools import partial
from pathlib import Path

import pytest

from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.plan.advice.compare_rules import advise
from phalanx.plan.advice.rules_of_thumb import RULES
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers import cli_runner

advise_output = partial(cli_runner.command_output, "advise", width=80)
advise_json = partial(cli_runner.command_json, "advise")
H100 = ("--machine", "h100", "--nodes", "4")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('model.preset = "llama3-8b"\n[training]\nseq_len = 8192\ntokens_per_step = 4194304\n')
    return path


def test_advise_compares_rules_of_thumb_with_planner_optimum_by_kind(run):
    text = advise_output(run, *H100)
    lines = text.splitlines()
    assert lines[0].startswith("llama3-8b, 8.03B parameters, on 32 x h100, ")
    best = cli_runner.command_json("plan", run, *H100, "--top", 1)["layouts"][0]
    assert lines[1].startswith(f"the planner's best: {best['candidate']}: {best['step_seconds']:.3f} s")
    titles = ["by size", "by bottleneck", "by schedule", "by placement"]
    assert [line for line in lines if line in titles] == titles
    assert "1B to 10B parameters -> data parallelism with ZeRO-2 [data_parallel zero2, tp 1, pp 1, cp 1, ep 1]" in text
    assert "because the model has 8.03B parameters (a common rule that no paper states; the method: ZeRO, " in text
    assert "ZeRO-3 in a pipeline" not in text, "that belongs to larger models"


def test_advise_json_lists_every_rule_once_with_verdict(run):
    facts = advise_json(run, *H100)
    assert (facts["model"], facts["devices"]) == ("llama3-8b", 32)
    assert facts["parameters"] == 8_030_261_248
    rules = [item["rule"] + item["kind"] for item in (*facts["advice"], *facts["silent"])]
    assert sorted(rules) == sorted(rule.name + rule.kind for rule in RULES)
    run_spec = load_run(run, ["cluster.preset=h100", "cluster.nodes=4", "cluster.nproc_per_node=8"], environment={})
    advised = advise(ResolvedRun(run_spec, 32))
    assert [item["verdict"] for item in facts["advice"]] == [advice.verdict for advice in advised.advice]
    first = facts["advice"][0]
    assert (first["verdict"], first["layout"]["layout"]["data_parallel"]) == ("costs", "zero2")
    assert first["layout"]["step_seconds"] == pytest.approx((1 + first["slower"]) * facts["best"]["step_seconds"])
    text = advise_output(run, *H100)
    assert f"costs {first['slower']:.1%}" in text
    agreeing = sum(item["verdict"] == "agrees" for item in facts["advice"])
    assert f"{agreeing} of {len(facts['advice'])} rules that apply agree" in text


def test_advise_reports_zero3_pipeline_rule_as_not_searched_by_planner(run):
    large = ("model.preset=gpt3-175b", "training.seq_len=2048", "training.tokens_per_step=131072")
    text = advise_output(
        run, "--machine", "b200", "--nodes", 8, *(argument for change in large for argument in ("--set", change))
    )
    assert "100B parameters or more -> 3D with ZeRO-3 and offload to CPU or NVMe" in text
    assert "the planner has no ZeRO-3 in pipelines" in text


def test_advise_oom_prints_single_remedies_sequence_and_settings(run):
    text = advise_output("oom", run, "--machine", "h100")
    lines = text.splitlines()
    assert re.fullmatch(
        r"llama3-8b on 8 x h100: the fullest rank holds 205\.1 GiB of the 7\d\.\d GiB available: does not fit", lines[0]
    )
    order = (
        "each change alone: those that make it fit, then those that do not suffice; by step time, then those that cost "
        "more than time"
    )
    assert lines.index(order) < lines.index("in sequence, until it fits")
    assert lines[lines.index(order) + 2].startswith("ZeRO-3")
    assert "no effect: smaller micro-batch: a micro-batch is one sequence" in text
    assert "It fits with  --set layout.data_parallel=zero3 --set layout.micro_batch_size=1" in text
    assert "The planner's best of all layouts on these devices: " in text
    assert "…" not in text
    assert " layout.data_parallel=zero1 --set layout.offload=cpu " in text
    assert "\nno effect: more devices: frees nothing on the fullest rank" in text
    assert "\nmore devices" not in text
    sharded = advise_output("oom", run, "--machine", "h100", "--set", "layout.data_parallel=zero3")
    assert "\nmore devices" in sharded
    without_times = advise_output("oom", run, "--machine", "h100", "--set", "training.precision=fp32")
    assert "Sufficient: recompute blocks; ZeRO-2" in without_times
    assert (
        "--set layout.data_parallel=zero2 --set layout.micro_batch_size=1 --set layout.activation_checkpointing=full"
        in without_times
    )


def test_advise_oom_settings_make_run_fit_when_applied(run):
    facts = advise_json("oom", run, "--machine", "h100")
    assert not facts["now"]["fits"]
    assert facts["fits"]
    subset = facts["needed"][-1]
    settings = [argument for setting in subset["settings"] for argument in ("--set", setting)]
    changed = advise_json("oom", run, "--machine", "h100", *settings)
    assert changed["now"] == subset["after"]
    assert changed["now"]["fits"]
    assert (changed["steps"], changed["needed"]) == ([], [])
    assert "The run fits without changes." in advise_output("oom", run, "--machine", "h100", *settings)
    cluster = ["cluster.preset=h100", "cluster.nproc_per_node=8"]
    memory = rank_memory(ResolvedRun(load_run(run, [*cluster, *subset["settings"]], environment={}), 8))["rank"]
    assert memory.total == changed["now"]["memory"]["total"] < 80 * 2**30


def test_advise_oom_reports_when_no_remedy_sequence_fits(run):
    text = advise_output("oom", run, "--machine", "h100", "--set", "cluster.memory_bytes=2000000000")
    assert "These changes together do not make it fit." in text
    assert "It fits with" not in text


def test_advise_accepts_run_file_named_oom(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run.rename(tmp_path / "oom")
    assert advise_json("oom", *H100)["devices"] == 32
    assert "now" in advise_json("oom", "oom", *H100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["oom"], "requires a run file"),
        (["over", "there.toml"], r"is not \[oom\] RUN.toml"),
        (["none.toml"], "does not exist"),
        (["RUN", "--set", "cluster.nproc_per_node=8"], "is unknown, but a plan requires it"),
        (["oom", "RUN"], r"cluster\.memory_bytes is unknown"),
        (["oom", "RUN", "--machine", "h100", "--set", "layout.pp=3"], "does not divide the . ranks"),
        (["oom", "RUN", "--machine", "h100", "--set", "layout=auto"], "is chosen by the planner"),
        (["RUN", "--machine", "l4", "--nodes", 1, "--nproc", 4, "--set", "model.preset=llama3-70b"], "advise oom"),
    ],
)
def test_advise_raises_user_error_with_fix_for_invalid_arguments(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    command = [run if argument == "RUN" else argument for argument in arguments]
    with pytest.raises(UserError, match=message) as error_info:
        advise_output(*command)
    assert error_info.value.fix


def test_advise_help_shows_usage_of_advise_and_advise_oom():
    text = cli_runner.command_output("advise", "--help")
    assert "advise [oom] RUN.toml [OPTIONS]" in text
    assert "phalanx advise run.toml --machine h100 --nodes 4" in text
    assert "phalanx advise oom run.toml --machine h100 --nproc 8" in text
    assert "or a file by phalanx calibrate" in re.sub(r"[\s│]+", " ", text)


@pytest.mark.parametrize("subcommand", [[], ["oom"]])
def test_advise_does_not_import_torch(run, subcommand):
    assert "torch" not in cli_runner.imported_packages("advise", *subcommand, run, "--machine", "h100")
