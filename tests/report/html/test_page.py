"""The page's text and figures, without a browser."""

from __future__ import annotations

import copy
import json
import locale
import re
import sys
from html import escape
from itertools import pairwise

import pytest

from phalanx.report import formatting
from phalanx.report.compare_runs import report_data
from phalanx.report.facts import report_facts
from phalanx.report.gpu_profile.step import profile_gpu_step
from phalanx.report.gpu_profile.trace import parse_gpu_trace
from phalanx.report.gpu_samples import gpu_sample_facts
from phalanx.report.html import page as page_module
from phalanx.report.html.figures import legend
from phalanx.report.html.page import main, page
from phalanx.report.run_data import read_run
from tests.helpers.gpu_samples import gpu_run, sampled_lines
from tests.helpers.gpu_traces import step_events
from tests.helpers.report_page import parse_embedded_json
from tests.helpers.trained_runs import copy_run, hybrid_run, mixture_run, read_source_losses, two_rank_run


@pytest.fixture(scope="module")
def two_run_report():
    return report_data([report_facts(read_run(hybrid_run())), report_facts(read_run(two_rank_run()))])


def test_report_speed_and_mfu_ratios_agree_on_shared_cores(two_run_report):
    speed, mfu = (
        formatting.measured_row(two_run_report["runs"][0], quantity) for quantity in ("tokens_per_second", "mfu")
    )
    assert mfu["ratio"] == pytest.approx(speed["ratio"], rel=0.02)


def test_report_page_embeds_facts_and_plotly_once(two_run_report):
    text = page(two_run_report)
    assert parse_embedded_json(text, "facts") == json.loads(json.dumps(two_run_report))
    assert len(re.findall(r"<script\b[^>]*\bsrc=", text)) == 0
    assert text.count("plotly.js (cartesian - minified) v") == 1


def test_report_page_reads_its_files_as_utf8_in_any_locale(monkeypatch):
    monkeypatch.setattr(page_module, "main", lambda report: "")
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        assert sys.flags.utf8_mode or locale.getencoding() == "ANSI_X3.4-1968"
        text = page({"runs": []})
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert "闰" in text  # from plotly's calendars


def test_report_page_is_small_enough_to_send(two_run_report):
    assert len(page(two_run_report)) < 2_000_000


def test_report_page_figures_are_valid_plotly(two_run_report):
    from plotly.graph_objects import Figure

    figures = parse_embedded_json(main(two_run_report), "figures")
    assert set(figures) == {
        "ranks-0",
        "ranks-1",
        "timeline-0",
        "curves",
        "memory-0",
        "traffic-0",
        "traffic-1",
        "experts-0",
    }
    for figure in figures.values():
        Figure(data=figure["data"], layout=figure["layout"])  # raises for unknown properties


def test_report_page_timelines_share_one_axis(two_run_report):
    layout = parse_embedded_json(main(two_run_report), "figures")["timeline-0"]["layout"]
    assert [note["text"].split(",")[0].split()[0] for note in layout["annotations"]] == [
        "planned",
        "simulated",
        "measured",
    ]
    heights = [layout[axis]["domain"] for axis in ("yaxis", "yaxis2", "yaxis3")]
    assert all(below[1] < above[0] for above, below in pairwise(heights))
    assert [axis for axis in layout if axis.startswith("xaxis")] == ["xaxis"]


def test_report_page_escapes_untrusted_text(two_run_report):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>%{x}"
    changed = copy.deepcopy(two_run_report)
    run = changed["runs"][0]
    run["run"] |= {"name": evil, "hosts": [evil]}
    run["problems"] = [evil]
    run["findings"][0]["evidence"] = run["verdict"]["evidence"] = evil
    run["memory"]["bytes"][evil] = run["memory"]["bytes"]["parameters"]
    text = page(report_data(changed["runs"]))
    assert "<script>alert" not in text
    assert "<img" not in re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)
    assert parse_embedded_json(text, "facts")["runs"][0]["problems"] == [evil]
    assert "<img" not in json.dumps(parse_embedded_json(text, "figures"))


def test_report_page_has_no_empty_sections_and_one_hint(two_run_report):
    text = main(report_data([two_run_report["runs"][1]]))
    titles = re.findall("<h2>(.*?)</h2>", text)[1:]  # after the verdict
    assert titles == ["Predicted and measured", "Time of each rank's step", "Loss and speed", "Traffic between ranks"]
    assert text.count("train with <code>--profile-steps FIRST:LAST</code>.") == 1
    assert "--profile-steps" not in main(report_data([two_run_report["runs"][0]]))


def test_report_page_curves_have_learning_rate_gradient_norm_and_marks(two_run_report):
    facts = copy.deepcopy(two_run_report["runs"][1])
    facts["curves"]["marks"] = [{"step": 4, "kind": "change", "text": "step 4: resumed; layout.pp: 2 (before: <1>)"}]
    text = main(report_data([facts]))
    figure = parse_embedded_json(text, "figures")["curves-0"]
    axes = [figure["layout"][f"yaxis{number}"] for number in ("", 2, 3, 4)]
    assert [axis["title"]["text"] for axis in axes] == ["loss", "learning rate", "gradient norm", "tokens/s"]
    assert all(below["domain"][1] < above["domain"][0] for above, below in pairwise(axes))
    lines = {trace["yaxis"]: trace["y"] for trace in figure["data"] if trace["mode"] == "lines"}
    assert [lines[axis] for axis in ("y2", "y3")] == [facts["curves"][name] for name in ("learning_rate", "grad_norm")]
    (mark,) = figure["layout"]["shapes"]
    assert (mark["x0"], mark["x1"]) == (4.5, 4.5)
    assert "</span>step 4: resumed; layout.pp: 2 (before: &lt;1&gt;)</li>" in text


def test_report_page_curves_have_losses_of_sources(tmp_path):
    from plotly.graph_objects import Figure as PlotlyFigure

    run = copy_run(mixture_run(), tmp_path)
    expected = read_source_losses(run)
    facts = report_facts(read_run(run))
    figure = parse_embedded_json(main(report_data([facts])), "figures")["curves-0"]
    assert [figure["layout"][axis]["title"]["text"] for axis in ("yaxis", "yaxis2")] == ["loss", "loss by source"]
    traces = [trace for trace in figure["data"] if trace.get("yaxis") == "y2"]
    lines = {trace["name"]: trace["y"] for trace in traces if trace["mode"] == "lines"}
    assert lines == expected
    assert {trace["name"]: trace["x"] for trace in traces if trace["mode"] == "markers"} == {
        "json": [4, 8],
        "email": [4, 8],
    }
    PlotlyFigure(data=figure["data"], layout=figure["layout"])  # raises for unknown properties
    colors = legend(figure)
    assert len(set(colors.values())) == len(colors) == 4  # training text, held-out text, and both sources


def test_report_page_draws_runs_with_other_tokens_per_step_over_tokens(two_run_report):
    runs = copy.deepcopy(two_run_report["runs"])
    for factor, facts in enumerate(runs, 1):
        facts["run"]["tokens_per_step"] *= factor
        facts["curves"]["tokens"] = [factor * tokens for tokens in facts["curves"]["tokens"]]
    figure = parse_embedded_json(main(report_data(runs)), "figures")["curves"]
    assert figure["layout"]["xaxis"]["title"]["text"] == "tokens"
    tokens = runs[1]["curves"]["tokens"]
    lines, markers = ([trace for trace in figure["data"] if trace["mode"] == mode] for mode in ("lines", "markers"))
    assert lines[1]["x"] == tokens
    assert markers[1]["x"] == [tokens[3], tokens[7]]
    assert markers[1]["hovertemplate"].startswith("%{x:,} tokens: ")


def test_report_page_of_many_runs_begins_with_a_sortable_table(two_run_report):
    runs = []
    for number in range(5):
        facts = copy.deepcopy(two_run_report["runs"][1])
        facts["run"] |= {"name": f"run-{number}", "settings": {**facts["run"]["settings"], "training.seed": number}}
        runs.append(facts)
    text = main(report_data(runs))
    assert text.startswith('<main class="several">\n<section><h1>5 runs</h1><div class="scroll"><table class="sort')
    assert re.findall(r'<td data-value="(\d)">', text) == ["0", "1", "2", "3", "4"]
    assert re.findall("<summary>(run-.*?)</summary>", text) == [
        f"run-{number}: training.seed={number}" for number in range(5)
    ]
    figures = parse_embedded_json(text, "figures")
    assert {f"curves-{number}" for number in range(5)} | {"curves"} <= set(figures)
    colors = {trace["line"]["color"] for trace in figures["curves"]["data"] if trace["mode"] == "lines"}
    assert len(colors) == 5
    assert "<title>5 runs - Phalanx</title>" in page(report_data(runs))


def test_report_page_has_titles_of_runs_once_and_then_their_names(two_run_report):
    text = re.sub(r"<script\b.*?</script>", "", main(two_run_report), flags=re.DOTALL)
    for name, title in zip(two_run_report["comparison"]["names"], two_run_report["comparison"]["titles"], strict=True):
        assert title != name
        assert text.count(escape(title)) == 1
        assert text.count(f"<h3>{name}</h3>") > 3


def test_group_rows_omits_zero_rows(two_run_report):
    groups = dict(formatting.group_rows(two_run_report["runs"][0]["comparison"]))
    assert list(groups) == [
        "of a step",
        "memory of pp0",
        "sent by pp0 in a step",
        "memory of pp1",
        "sent by pp1 in a step",
    ]
    assert "offloaded" not in [row["quantity"] for row in groups["memory of pp0"]]


def test_report_page_has_table_of_gpus_if_a_run_has_their_figures(two_run_report):
    assert "Step on the GPU" not in main(two_run_report)
    trace = parse_gpu_trace(step_events("step"))
    profile = profile_gpu_step(trace.events, trace.annotations["step"])
    report = copy.deepcopy(two_run_report)
    report["runs"][0]["gpu"] = {"step": 6, "ranks": [{"rank": 0, **profile}]}
    text = main(report)
    assert "<td>exposed communication of mesh_tp</td><td>50.0 µs  5.0 %</td>" in text
    assert "No data." in text  # of the second run


def test_report_page_has_sensors_of_gpus_if_a_run_recorded_them(two_run_report):
    assert "GPUs during the run" not in main(two_run_report)
    report = copy.deepcopy(two_run_report)
    slow = sampled_lines(clock_mhz=1200)
    report["runs"][0]["gpu_samples"] = gpu_sample_facts(gpu_run({0: sampled_lines(), 1: slow}))
    text = main(report)
    assert "<td>SM clock, median</td><td>1,755 MHz</td><td>1,200 MHz</td>" in text
    assert "<p>Rank 1 on node0: SM clock of 1,200 MHz" in text
    assert "No data." in text  # of the second run
