"""Rules of thumb equal their publications, apply under their conditions, and are compared fairly with the planner."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from phalanx.cost.formulas.activation_checkpointing import (
    optimal_num_checkpoints,
    peak_saved_layers,
    recompute_overhead,
)
from phalanx.plan.advice.compare_rules import AGREEMENT_TOLERANCE, Advice, AdviceReport, advise
from phalanx.plan.advice.oom_remedies import REMEDIES
from phalanx.plan.advice.rules_of_thumb import RULES, SIZE_RULES, RunSituation, is_in_range
from phalanx.plan.search.enumerate_layouts import enumerate_layouts
from phalanx.plan.search.evaluate import evaluate
from phalanx.plan.search.explain import plan_or_raise
from phalanx.plan.search.oom_risk import MAX_OOM_PROBABILITY
from phalanx.plan.search.search import UNCERTAIN_GAIN, rank_fitting, runnable_layouts
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import run_from_table
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec

GIB = 2**30
BASELINE_SITUATION = RunSituation(
    parameters=10**9,
    layers=24,
    experts=False,
    sequences=64,
    ranks=16,
    domain=8,
    memory_bytes=80 * GIB,
    state={"parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer": 8 * GIB},
    activation_bytes=GIB,
    recomputed_bytes=GIB / 4,
    layer_bytes=GIB,
    fits_one_device=True,
)
"""Situation without difficulties; tests change single fields."""


def make_run(
    model: str, machine: str = "h100", nodes: int = 1, tokens: int = 2**22, sequence: int = 8192, nproc: int = 8
) -> RunSpec:
    training = {"seq_len": sequence, "tokens_per_step": tokens}
    cluster = {"preset": machine, "nodes": nodes, "nproc_per_node": nproc}
    return run_from_table({"model": {"preset": model}, "training": training, "cluster": cluster})


def applicable_rules(situation: RunSituation) -> set[str]:
    return {rule.name for rule in RULES if rule.applies(situation)}


def advice_for_rule(advised: AdviceReport, name: str) -> Advice:
    return next(advice for advice in advised.advice if advice.rule.name == name)


@pytest.fixture(scope="module")
def llama3_8b_report() -> AdviceReport:
    return advise(ResolvedRun(make_run("llama3-8b", nodes=4), 32))


@pytest.fixture(scope="module")
def llama3_70b_report() -> AdviceReport:
    return advise(ResolvedRun(make_run("llama3-70b", nodes=16), 128))


DATA_ONLY = {"tp": "1", "pp": "1", "cp": "1", "ep": "1"}
THREE_D = {"dp": "at least 2", "tp": "at least 2", "pp": "at least 2"}


@pytest.mark.parametrize(
    ("billions", "recommendation", "requirements"),
    [
        (0.5, "data parallelism (DDP)", {"data_parallel": ("ddp",), **DATA_ONLY}),
        (5, "data parallelism with ZeRO-2", {"data_parallel": ("zero2",), **DATA_ONLY}),
        (50, "3D: data, tensor and pipeline parallelism", THREE_D),
        (500, "3D with ZeRO-3 and offload to CPU or NVMe", THREE_D),
    ],
)
def test_size_rules_match_published_guide(billions, recommendation, requirements):
    """Published as T25."""
    rules = [rule for rule in SIZE_RULES if rule.applies(replace(BASELINE_SITUATION, parameters=int(billions * 1e9)))]
    assert [(rule.recommendation, rule.requirements) for rule in rules] == [(recommendation, requirements)]


@pytest.mark.parametrize("billions", [1, 10, 100])
def test_size_rule_boundary_belongs_to_larger_class(billions):
    below, at = (
        [rule.name for rule in SIZE_RULES if rule.applies(replace(BASELINE_SITUATION, parameters=size))]
        for size in (billions * 10**9 - 1, billions * 10**9)
    )
    assert len(below) == len(at) == 1
    assert at[0].startswith(f"{billions}B")
    assert below != at


def test_optimal_num_checkpoints_of_64_layers_is_eight():
    """Published as T26: eight checkpoints, the memory of sixteen layers, and one additional forward
    pass, which is a third of the compute of a step."""
    assert optimal_num_checkpoints(64) == 8
    assert peak_saved_layers(64, 8) == 16
    assert all(peak_saved_layers(64, other) > 16 for other in range(1, 65) if other != 8)
    assert [optimal_num_checkpoints(layers) for layers in (1, 32, 81, 100)] == [1, 6, 9, 10]
    assert recompute_overhead() == pytest.approx(1 / 3)
    assert recompute_overhead(backward=1) == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("requirement", "degrees"),
    [
        ("1", range(1, 2)),
        ("at least 2", range(2, 20)),
        ("at most the domain", range(1, 9)),
        ("at least the domain", range(8, 20)),
    ],
)
def test_degrees_within_limits_are_in_range(requirement, degrees):
    assert [degree for degree in range(1, 20) if is_in_range(degree, requirement, 8)] == list(degrees)


BASELINE_RULES = {
    "fewer than 1B parameters",
    "1B to 10B parameters",
    "a large dataset",
    "optimizer state",
    "a copy fits one device",
    "the smallest structure that fits",
    "tensor parallelism",
    "data parallelism",
}
LARGE_STATE = {"parameters": 40 * GIB, "gradients": 40 * GIB, "optimizer": 80 * GIB}


@pytest.mark.parametrize(
    ("change", "added_rules", "removed_rules"),
    [
        ({"activation_bytes": 2 * GIB}, {"activation memory"}, set()),
        (
            {"state": LARGE_STATE, "fits_one_device": False},
            {"parameter memory", "state that ranks can share"},
            {"a copy fits one device"},
        ),
        ({"layer_bytes": 81 * GIB}, {"a single layer too big"}, set()),
        ({"sequences": 8}, {"compute inside layers"}, {"a large dataset"}),
        ({"experts": True}, {"more capacity at the same compute", "expert parallelism"}, set()),
        ({"activation_bytes": 9 * GIB}, {"activations of a sequence", "long context"}, {"optimizer state"}),
        (
            {"fits_one_device": False},
            {"it does not fit, memory tight", "pipeline"},
            {"the smallest structure that fits"},
        ),
        (
            {"fits_one_device": False, "fits_with_zb_h2": True},
            {"it does not fit, memory to spare"},
            {"a copy fits one device"},
        ),
        (
            {"ranks": 1, "domain": 1},
            set(),
            {"a large dataset", "optimizer state", "tensor parallelism", "data parallelism"},
        ),
    ],
)
def test_applicable_rules_follow_run_situation(change, added_rules, removed_rules):
    before, after = applicable_rules(BASELINE_SITUATION), applicable_rules(replace(BASELINE_SITUATION, **change))
    assert before <= BASELINE_RULES
    assert added_rules <= after - before
    assert removed_rules <= before - after


def test_exactly_one_pipeline_rule_of_thumb_applies(llama3_8b_report, llama3_70b_report):
    for situation in (BASELINE_SITUATION, llama3_8b_report.situation, llama3_70b_report.situation):
        assert (
            len(
                applicable_rules(situation)
                & {
                    rule.name
                    for rule in RULES
                    if rule.recommendation in ("no pipeline; DP or ZeRO", "ZB-H2", "ZB-H1 or 1F1B")
                }
            )
            == 1
        )


def test_run_situation_of_llama3_8b_matches_hand_count(llama3_8b_report):
    """AdamW has 4, 4 and 8 bytes per parameter, and a block of Llama 3 8B has 218 M parameters."""
    situation = llama3_8b_report.situation
    m, block = 8_030_261_248, 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert (situation.parameters, situation.layers, situation.sequences, situation.domain) == (m, 32, 512, 8)
    assert situation.state == {"parameters": 4 * m, "gradients": 4 * m, "optimizer": 8 * m}
    assert 16 * block < situation.layer_bytes < 16 * block + situation.activation_bytes / 32
    assert situation.recomputed_bytes < situation.activation_bytes / 3
    assert not situation.fits_one_device


def test_run_situation_has_spare_memory_only_if_zb_h2_fits(llama3_70b_report):
    """Compared with the layouts themselves: the fastest 1F1B pipeline, and the same layout with ZB-H2."""
    roomy = make_run("llama3-70b", "b300", nodes=64, sequence=4096)
    for run, advised, spare in (
        (roomy, advise(ResolvedRun(roomy, 512)), True),
        (make_run("llama3-70b", nodes=16), llama3_70b_report, False),
    ):
        ranks = advised.situation.ranks
        pipelines = [c for c in enumerate_layouts(ResolvedRun(run, ranks)) if c.pp > 1 and c.schedule == "1f1b"]
        fastest = next(
            runnable_layouts(ResolvedRun(run, ranks), rank_fitting(ResolvedRun(run, ranks), pipelines))
        ).candidate
        zb_h2 = evaluate(ResolvedRun(run, ranks), [fastest._replace(schedule="zb-h2")])[0]
        assert advised.situation.fits_with_zb_h2 == spare == (zb_h2.p_oom < MAX_OOM_PROBABILITY)


def test_size_rule_is_slower_than_planner_best_for_llama3_8b(llama3_8b_report):
    advice = advice_for_rule(llama3_8b_report, "1B to 10B parameters")
    assert advice.verdict == "costs"
    assert advice.evaluated is not None
    assert (advice.evaluated.candidate.data_parallel, advice.evaluated.candidate.tp, advice.evaluated.candidate.pp) == (
        "zero2",
        1,
        1,
    )
    slower = advice.evaluated.step_seconds / llama3_8b_report.best.step_seconds - 1
    assert advice.slower == pytest.approx(slower)
    assert slower > 0.01
    assert advice.evaluated.candidate.activation_checkpointing == "norms"
    assert "exposed communication of gradients and parameters" in advice.reason


def test_large_dataset_rule_agrees_with_planner_for_llama3_8b(llama3_8b_report):
    advice = advice_for_rule(llama3_8b_report, "a large dataset")
    assert (advice.verdict, advice.evaluated) == ("agrees", llama3_8b_report.best)
    assert advice.reason.startswith("otherwise ")
    assert "dp 1," in advice.reason
    assert "s: +" in advice.reason, "what the other layout spends more on"


def test_3d_parallelism_rule_costs_less_than_a_tenth_for_llama3_70b(llama3_70b_report):
    advice = advice_for_rule(llama3_70b_report, "10B to 100B parameters")
    assert advice.verdict == "costs"
    assert advice.evaluated is not None
    assert min(advice.evaluated.candidate.dp, advice.evaluated.candidate.tp, advice.evaluated.candidate.pp) >= 2
    assert advice.evaluated.step_seconds < 1.1 * llama3_70b_report.best.step_seconds


def test_advice_warns_when_tp_leaves_fast_link_domain(llama3_70b_report):
    assert "tp = 16 leaves the domain of 8 devices" in advice_for_rule(llama3_70b_report, "tensor parallelism").reason


def test_advice_reports_excess_memory_when_rule_does_not_fit():
    advised = advise(ResolvedRun(make_run("llama3-8b", "l4"), 8))
    advice = advice_for_rule(advised, "1B to 10B parameters")
    assert advice.verdict == "does not fit"
    assert advice.evaluated is not None
    assert advice.evaluated.p_oom >= MAX_OOM_PROBABILITY
    assert advice.more_bytes == advice.evaluated.memory_bytes - advised.best.memory_bytes
    assert "state 15.0" in advice.reason, "weights in bf16: the rest is offloaded"
    printed_bytes, parts = re.fullmatch(
        r".* uses ([\d.]+) GiB of 24\.0 of device memory .* device memory in GiB: (.*)", advice.reason
    ).groups()
    sizes = {name: float(size) for name, _, size in (part.rpartition(" ") for part in parts.split(", "))}
    assert "driver and libraries" in sizes
    assert sum(sizes.values()) == pytest.approx(float(printed_bytes), abs=0.3)


def test_advice_reports_rule_without_any_valid_layout():
    """With one sequence per step, data-parallel ranks have no work."""
    advised = advise(ResolvedRun(make_run("llama3-8b", tokens=8192), 8))
    assert advice_for_rule(advised, "compute inside layers").verdict in ("agrees", "costs")
    impossible = advice_for_rule(advised, "1B to 10B parameters")
    assert (impossible.verdict, impossible.evaluated) == ("does not run", None)
    assert "no layout of 8 devices" in impossible.reason


def test_advice_verdicts_match_evaluated_layouts(llama3_8b_report, llama3_70b_report):
    for run, advised in (
        (make_run("llama3-8b", nodes=4), llama3_8b_report),
        (make_run("llama3-70b", nodes=16), llama3_70b_report),
    ):
        layouts = enumerate_layouts(ResolvedRun(run, advised.situation.ranks))
        assert advised.best == plan_or_raise(ResolvedRun(run, advised.situation.ranks), keep=1).layouts[0]
        assert {advice.verdict for advice in advised.advice} == {"agrees", "costs"}
        for advice in advised.advice:
            assert advice.reason
            assert advice.evaluated is not None
            assert advice.rule.is_satisfied_by(advice.evaluated.candidate, 8)
            assert advice.evaluated.p_oom < MAX_OOM_PROBABILITY
            assert (advice.slower < AGREEMENT_TOLERANCE) == (advice.verdict == "agrees")
            # In a sample of layouts that obey the rule, none is faster by more than the tolerance for simpler layouts.
            others = [c for c in layouts[::97] if advice.rule.is_satisfied_by(c, 8)]
            fit = [
                o for o in evaluate(ResolvedRun(run, advised.situation.ranks), others) if o.p_oom < MAX_OOM_PROBABILITY
            ]
            assert all((1 + UNCERTAIN_GAIN) * o.step_seconds > 0.998 * advice.evaluated.step_seconds for o in fit)
        assert len(advised.advice) + len(advised.inapplicable_rules) == len(RULES)


def test_advise_raises_with_memory_suggestion_when_nothing_fits():
    with pytest.raises(UserError, match="advise oom") as error_info:
        advise(ResolvedRun(make_run("llama3-70b", "l4", nproc=4), 4))
    assert "GiB" in error_info.value.fix


def test_advice_quotes_papers_or_documentation():
    for source in (*(rule.source for rule in RULES), *(remedy.source for remedy in REMEDIES)):
        assert re.search(r"arXiv \d{4}\.\d{5}|^Megatron-Core, ", source), source
