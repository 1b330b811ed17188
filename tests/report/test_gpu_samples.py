"""Findings from samples of GPU sensors: slow clocks, power, temperature, energy per token, ECC errors."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.report.gpu_samples import (
    MAX_RANKS_SHOWN,
    describe_slow_clock,
    gpu_sample_facts,
    summary_lines,
    table_rows,
    table_title,
)
from phalanx.spec.files.load import run_from_table
from tests.helpers.gpu_samples import gpu_run, sampled_lines

RUN = run_from_table({"model": {"preset": "tiny"}, "training": {"seq_len": 128, "tokens_per_step": 1024}})


def facts_of(lines_by_rank: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    facts = gpu_sample_facts(gpu_run(lines_by_rank, RUN))
    assert facts is not None
    return facts


def test_gpu_sample_facts_are_none_without_samples() -> None:
    assert gpu_sample_facts(gpu_run({0: [{"step": 1, "start": 0.5}]})) is None


def test_gpu_sample_facts_have_no_findings_at_the_power_cap() -> None:
    facts = facts_of({rank: sampled_lines(clock_mhz=1755 - 20 * rank) for rank in range(4)})
    assert facts["findings"] == []
    assert facts["ranks"][0]["throttled"] == {"sw_power_cap": 1.0}
    assert facts["ranks"][0]["samples"] == 4


def test_power_is_that_of_the_time_between_the_ends_of_steps() -> None:
    """The first step compiles blocks for 20 s before its sample."""
    lines = sampled_lines(count=4)
    lines[0]["start"] = -19.0
    lines[0]["seconds"] = {"passes": 20.0}
    for line in lines[::2]:
        line["gpu_sample"]["energy_joules"] = 600.0 * (line["start"] + line["seconds"]["passes"])
    assert facts_of({0: lines})["power_watts"] == pytest.approx(600)


def test_rank_with_lower_clock_is_named_with_reasons_of_throttling() -> None:
    slow = sampled_lines(clock_mhz=1200, temperature_celsius=91)
    slow[0]["gpu_sample"]["throttle_reasons"] = ["hw_slowdown", "hw_thermal_slowdown"]
    lines_by_rank = {0: sampled_lines(), 1: slow, 2: sampled_lines()}
    facts = facts_of(lines_by_rank)
    evidence = (
        "SM clock of 1,200 MHz (median of the other ranks: 1,755 MHz), throttled by sw_power_cap in 75.0 % of samples, "
        "hw_slowdown in 25.0 % of samples, hw_thermal_slowdown in 25.0 % of samples"
    )
    assert facts["findings"] == [{"rank": 1, "host": "node0", "evidence": evidence}]
    assert facts["temperature_celsius"] == 91
    assert describe_slow_clock(gpu_run(lines_by_rank), 1) == f"; its GPU: {evidence}"
    assert describe_slow_clock(gpu_run(lines_by_rank), 0) == ""


def test_throttled_rank_is_named_without_others_and_low_clock_without_reason() -> None:
    throttled = facts_of({0: sampled_lines(throttle_reasons=["sw_thermal_slowdown"])})
    assert [finding["evidence"] for finding in throttled["findings"]] == [
        "SM clock of 1,755 MHz, throttled by sw_thermal_slowdown in 100 % of samples"
    ]
    low = facts_of({0: sampled_lines(), 1: sampled_lines(clock_mhz=1500, throttle_reasons=[])})
    assert low["findings"][0]["evidence"].endswith("1,755 MHz), without a reported reason")


@pytest.mark.parametrize("has_counter", [True, False])
def test_power_and_energy_per_token_are_those_of_counter_or_mean_of_samples(has_counter: bool) -> None:
    lines_by_rank = {rank: sampled_lines() for rank in range(2)}
    for rank, lines in lines_by_rank.items():
        for line in lines[::2] if has_counter else ():
            line["gpu_sample"] |= {"power_watts": 1.0, "energy_joules": 1e6 + 600 * line["start"] + rank}
    facts = facts_of(lines_by_rank)
    assert facts["power_watts"] == pytest.approx(600)
    # Two GPUs of 600 W, and steps of half a second and 1,024 tokens.
    assert facts["joules_per_token"] == pytest.approx(2 * 600 * 0.5 / 1024)
    assert summary_lines(facts) == ["mean power 600 W per GPU, maximum temperature 60 °C, 0.586 J per token"]


def test_energy_per_token_is_unknown_if_a_rank_has_none() -> None:
    assert facts_of({0: sampled_lines(), 1: [{"step": 1, "start": 0.5}]})["joules_per_token"] is None
    assert facts_of({0: sampled_lines(count=1)})["joules_per_token"] is None


def test_new_ecc_errors_are_findings() -> None:
    facts = facts_of({0: sampled_lines(ecc_corrected=1200), 1: sampled_lines(ecc_corrected=1, ecc_uncorrected=2)})
    assert summary_lines(facts)[1:] == [
        "rank 0 on node0: 1,200 corrected ECC errors since the start",
        "rank 1 on node0: 2 uncorrected and 1 corrected ECC errors since the start: drain the node, and reset or "
        "replace the GPU",
    ]


def test_table_has_slowest_ranks_and_no_rows_of_absent_sensors() -> None:
    lines_by_rank = {rank: sampled_lines(clock_mhz=1000 + rank) for rank in range(MAX_RANKS_SHOWN + 1)}
    for lines in lines_by_rank.values():
        for line in lines[::2]:
            del line["gpu_sample"]["ecc_corrected"], line["gpu_sample"]["ecc_uncorrected"]
    facts = facts_of(lines_by_rank)
    header, *rows = table_rows(facts)
    assert header == ["", *(f"rank {rank}" for rank in range(MAX_RANKS_SHOWN))]
    assert {row[0]: row[1] for row in rows} == {
        "SM clock, median": "1,000 MHz",
        "power, mean": "600 W",
        "temperature, maximum": "60 °C",
        "utilization, mean": "98.0 %",
        "throttled: sw_power_cap": "100 %",
    }
    assert table_title(facts) == "GPUs during the run, the 8 of 9 with the lowest clock"
