import json
import re
from functools import partial
from pathlib import Path

import pytest

from phalanx.schedule.registry import build_schedule
from phalanx.schedule.schedule import Schedule, read_csv
from phalanx.spec.errors import UserError
from tests.helpers import cli_runner

pipeline_output = partial(cli_runner.command_output, "pipeline")
pipeline_json = partial(cli_runner.command_json, "pipeline")
SIZES = ("--stages", "4", "--microbatches", "8")


def test_pipeline_show_prints_timeline_makespan_and_bubble():
    output = pipeline_output("show", "1f1b", *SIZES)
    assert re.search(r"^rank 3 +F0 *B0 +F1 *B1", output, re.MULTILINE)
    assert "makespan  33" in output
    assert "27.27% of the makespan, 37.50% over the ideal" in output
    assert "by rank 4 3 2 1" in output
    assert "\x1b" not in output, "colors only on a terminal"


@pytest.mark.parametrize(
    ("name", "makespan"),
    [("1f1b", 33), ("interleaved", 28.5), ("zb-h1", 27), ("zb-v", 25.5), ("gpipe", 33), ("naive", 96)],
)
def test_pipeline_show_makespan_matches_reference_simulator(name: str, makespan: float):
    assert pipeline_json("show", name, *SIZES)["makespan"] == makespan


def test_pipeline_show_labels_idealised_timeline():
    sizes = ("--stages", "4", "--microbatches", "4")
    assert pipeline_json("show", "book-overlap", *sizes)["active"] == [
        0.25,
        0.5,
        0.75,
        1,
        0.75,
        0.75,
        1,
        0.75,
        0.5,
        0.25,
    ]
    assert "idealised" in pipeline_output("show", "book-overlap", *sizes)


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "ticks", "mean"),
    [(4, 8, 14, 0.7857), (4, 16, 22, 0.8636), (8, 8, 22, 0.6136), (2, 4, 6, 0.8333)],
)
def test_pipeline_show_idealised_active_fraction_matches_expected_mean(
    num_stages: int, num_micro_batches: int, ticks: int, mean: float
):
    shares = pipeline_json(
        "show", "book-overlap", "--stages", str(num_stages), "--microbatches", str(num_micro_batches)
    )["active"]
    assert len(shares) == ticks
    assert sum(shares) / ticks == pytest.approx(mean, abs=1e-4)


def test_pipeline_show_times_are_per_rank_and_include_transfer():
    assert pipeline_json("show", "zb-v", *SIZES, "--times", "2,2,1")["makespan"] == 8 * 5 + 3
    down_and_up = 2 * 3 * 0.5
    assert pipeline_json("show", "gpipe", *SIZES, "--times", "1,1,1,0.5")["makespan"] == 33 + down_and_up


def test_pipeline_searched_schedule_respects_memory_limit_and_reloads_from_csv(tmp_path: Path):
    file = tmp_path / "found.csv"
    times = ("--times", "2,3,1,0.5")
    result = pipeline_json("show", "searched", *SIZES, *times, "--memory", "3", "--out", str(file))
    assert max(result["peak_activations"]) <= 3
    assert pipeline_json("show", str(file), *times)["makespan"] == pytest.approx(result["makespan"])
    assert "valid as orders: 4 ranks, 8 stages, 8 micro-batches" in pipeline_output("check", str(file))


def test_pipeline_show_writes_svg_png_chrome_trace_and_pytorch_csv(tmp_path: Path):
    files = [tmp_path / f"picture{ending}" for ending in (".svg", ".png", ".json", ".csv")]
    pipeline_output("show", "zb-v", *SIZES, *(part for file in files for part in ("--out", str(file))))
    svg, png, trace, table = files
    assert "<svg" in svg.read_text(encoding="utf-8")
    assert png.read_bytes().startswith(b"\x89PNG")
    spans = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 3 * 8 * 8, "forward and two halves of 8 micro-batches through 8 stages"
    assert max(event["ts"] + event["dur"] for event in spans) == 25_500
    assert Schedule.from_rows(read_csv(table.read_text(encoding="utf-8"))) == build_schedule("zb-v", 4, 8)


def test_pipeline_check_reports_every_violation(tmp_path: Path):
    picture = tmp_path / "drawn.csv"
    picture.write_text("0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    output = pipeline_output("check", str(picture), exit_code=1)
    assert "rejected as drawn, a tick per cell: 2 violations (2 ranks, 2 stages, 2 micro-batches)" in output
    assert "rank 0: 0B0 runs in tick 2, before 1B0 is done, in tick 2" in output
    assert "rank 0: 0B1 runs in tick 3, before 1B1 is done, in tick 4" in output
    assert "see --order" in output
    assert pipeline_json("check", str(picture), "--order")["valid"] is True
    picture.write_text("0F0,0B0\n1B0,1F0\n")
    assert pipeline_json("check", str(picture), exit_code=1)["violations"] == [
        "rank 0: 0B0 (number 2 in its row) waits forever for 1B0",
        "rank 1: 1B0 (number 1 in its row) waits forever for 1F0",
    ]


def test_pipeline_split_balances_stages_better_than_equal_layer_counts(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "llama3-8b"\n[training]\nseq_len = 2048\ntokens_per_step = 16384\n')
    result = pipeline_json("split", str(path), "--stages", "4")
    assert result["layers"] == [8, 9, 9, 6]
    assert result["slowest_over_mean"] < result["by_layers_alone"]["slowest_over_mean"]
    assert result["by_layers_alone"]["layers"] == [8, 8, 8, 8]
    output = pipeline_output("split", str(path), "--set", "layout.pp=2")
    assert "embedding, 0-16" in output
    assert "17-31, head" in output
    assert "by layers alone (16 16)" in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("show", "1f2b", *SIZES), "SCHEDULE = '1f2b' is not known"),
        (("show", "1f1b", "--stages", "4"), "--microbatches is missing"),
        (("show", "1f1b", *SIZES, "--times", "1,2"), "--times = '1,2' is not a list of three or four times"),
        (("show", "1f1b", *SIZES, "--times", "1,-2,1"), "--times = '1,-2,1'"),
        (("show", "1f1b", *SIZES, "--out", "x.pdf"), "--out = 'x.pdf' has an unknown suffix"),
        (("show", "1f1b", *SIZES, "--out", "/nowhere/x.csv"), "cannot be written"),
        (("show", "interleaved", "--stages", "4", "--microbatches", "6"), "is not a multiple of the 4 ranks"),
        (("show", "dualpipe-v", "--stages", "4", "--microbatches", "6"), "is less than the 8 stages"),
        (("show", "book-overlap", *SIZES, "--out", "x.csv"), "cannot represent an idealised timeline"),
        (("check", "nowhere.csv"), "cannot be read"),
    ],
)
def test_pipeline_raises_user_error_for_invalid_arguments(arguments: tuple[str, ...], problem: str):
    with pytest.raises(UserError, match=re.escape(problem)):
        pipeline_output(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("zb-v", "--stages", "2", "--microbatches", "2", "--memory", "3"),
        ("1f1b", "--stages", "2", "--microbatches", "2", "--virtual-stages", "3"),
        ("FILE", "--stages", "3"),
        ("FILE", "--microbatches", "3"),
    ],
)
def test_pipeline_show_rejects_inapplicable_options(arguments: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(UserError, match=f"{arguments[-2]} = {arguments[-1]}.* does not apply to"):
        pipeline_output("show", *(file if argument == "FILE" else argument for argument in arguments))
