"""Export of a run as a trace for Perfetto."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from phalanx.report.export.chrome_trace import chrome_trace
from phalanx.report.run_data import read_run
from phalanx.spec.errors import UserError
from tests.helpers.cli_runner import command_output
from tests.helpers.trained_runs import copy_run, hybrid_run, two_rank_run


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    command_output("report", hybrid_run(), "--trace", file, "--html", file.with_suffix(".html"))
    return json.loads(file.read_text())


def rank_events(trace, category, rank):
    return [event for event in trace["traceEvents"] if event.get("cat") == category and event["pid"] == rank]


def test_chrome_trace_has_steps_passes_and_collectives_of_each_rank(trace):
    for rank, record in read_run(hybrid_run()).ranks.items():
        spans = sum(len(line.get("spans", ())) for line in record.steps)
        calls = sum(call["end"] is not None for line in record.steps for call in line.get("collectives", ()))
        assert len(rank_events(trace, "passes", rank)) == spans > 0
        assert len(rank_events(trace, "collectives", rank)) == calls > 0
        assert {f"step {step}" for step in range(1, 9)} <= {
            event["name"] for event in rank_events(trace, "steps", rank)
        }


def test_chrome_trace_passes_lie_within_their_step(trace):
    for rank in range(4):
        steps = [event for event in rank_events(trace, "steps", rank) if event["name"] in ("step 5", "step 6")]
        for event in rank_events(trace, "passes", rank):
            within_step = [
                step
                for step in steps
                if step["ts"] <= event["ts"] + 1 and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1
            ]
            assert len(within_step) == 1


def test_chrome_trace_collectives_do_not_overlap_within_a_track(trace):
    for rank in range(4):
        events = rank_events(trace, "collectives", rank)
        for lane in {event["tid"] for event in events}:
            track = sorted((event for event in events if event["tid"] == lane), key=lambda event: event["ts"])
            assert all(earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3 for earlier, later in pairwise(track))


def test_chrome_trace_aligns_rank_clocks_and_reports_error(tmp_path):
    """The clock of one rank is an hour off, which it records at its start or in the step."""
    directory = copy_run(hybrid_run(), tmp_path)
    file = directory / "trace" / "rank-00003.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[0] |= {"clock_offset_seconds": -3600.0, "clock_error_seconds": 0.25}
    for line in lines[1:]:
        line["start"] += 3600
        for key in ("clock", "waits", "collectives", "memory"):
            line.pop(key, None)
        line["spans"] = [[*fields, start + 3600, end + 3600] for *fields, start, end in line.get("spans", ())]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before, after = chrome_trace(read_run(hybrid_run())), chrome_trace(read_run(directory))
    assert after["otherData"]["clock_error_seconds"] == 0.25
    assert after["otherData"]["clock_error_seconds_of_ranks"]["3"] == 0.25
    for event, shifted in zip(rank_events(before, "passes", 3), rank_events(after, "passes", 3), strict=True):
        # The offset of an hour costs digits, and each step has its own clock offset.
        assert shifted["ts"] == pytest.approx(event["ts"], abs=1e3)


def test_report_trace_rejects_run_without_records_and_several_runs(tmp_path):
    directory = copy_run(two_rank_run(), tmp_path)
    for file in (directory / "trace").glob("*"):
        file.unlink()
    for directories in ((directory,), (two_rank_run(), hybrid_run())):
        with pytest.raises(UserError, match="--trace"):
            command_output("report", *directories, "--trace", tmp_path / "trace.json", "--html", tmp_path / "page.html")
