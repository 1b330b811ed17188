"""Output of `phalanx advise`."""

from __future__ import annotations

from typing import Any

from phalanx.cli.common.text import print_line
from phalanx.cli.views.plan_notes import describe_batch, training_to_json
from phalanx.plan.advice.compare_rules import AGREEMENT_TOLERANCE, Advice, AdviceReport
from phalanx.plan.advice.rules_of_thumb import Kind, RuleOfThumb
from phalanx.plan.search.result import EvaluatedLayout
from phalanx.spec.formatting import GIB, format_gib
from phalanx.spec.run import RunSpec
from phalanx.spec.terminal import Terminal

TITLES: dict[Kind, str] = {
    "size": "by size",
    "bottleneck": "by bottleneck",
    "schedule": "by schedule",
    "placement": "by placement",
}
STYLES = {"agrees": "green", "costs": "yellow", "does not fit": "red", "does not run": "red"}
WIDTH = 120
"""Width of the text, so that a narrow terminal wraps lines instead of words."""


def print_advice(run: RunSpec, advised: AdviceReport) -> None:
    """Print the planner's best layout and every rule that applies."""
    console = Terminal(width=max(Terminal().width, WIDTH))
    situation = advised.situation
    best = advised.best
    name = run.model_name
    machine = run.cluster.preset or "device"
    agreement = f"{advised.num_agreeing} of {len(advised.advice)} rules that apply agree with the planner"
    setup = f"{name}, {situation.parameters / 1e9:.3g}B parameters, on {situation.ranks:,} x {machine}, "
    setup += describe_batch(run)
    print_line(console, f"{setup}: {agreement}", "bold")
    print_line(console, f"the planner's best: {_format_layout(best)}")
    for kind, title in TITLES.items():
        kind_advice = [advice for advice in advised.advice if advice.rule.kind == kind]
        if kind_advice:
            console.print(f"\n{title}", style="bold")
        for advice in kind_advice:
            _print_rule_advice(console, advice, best)
    console.print()
    for note in (
        f"agrees: the fastest layout that follows the rule takes less than {AGREEMENT_TOLERANCE:.0%} longer than the "
        "planner's best",
        f"{len(advised.inapplicable_rules)} rules do not apply; --json lists them",
    ):
        print_line(console, note, "dim")


def _print_rule_advice(console: Terminal, advice: Advice, best: EvaluatedLayout) -> None:
    rule = advice.rule
    verdict = advice.verdict
    label = f"{verdict} {advice.slower:.1%}" if verdict == "costs" else verdict
    console.print(f"  {label:13}", style=STYLES[verdict], end="", highlight=False)
    partial_note = f" [{rule.requirements_text}]" if rule.requirements_text else ""
    console.print(f"{rule.name} -> {rule.recommendation}{partial_note}", highlight=False, soft_wrap=True, markup=False)
    lines = [f"because {advice.why_rule_applies} ({rule.source})"]
    if advice.evaluated is not None and advice.evaluated is not best:
        lines.append(f"with {_format_layout(advice.evaluated)} ({advice.more_bytes / GIB:+.1f})")
    lines += [advice.reason, *([rule.unplanned_part] if rule.unplanned_part else [])]
    for line in lines:
        print_line(console, f"{'':15}{line}", "dim" if line == lines[0] else "")


def _format_layout(evaluated: EvaluatedLayout) -> str:
    return f"{evaluated.candidate}: {evaluated.step_seconds:.3f} s, {format_gib(evaluated.memory_bytes)}"


def advice_to_json(run: RunSpec, advised: AdviceReport) -> dict[str, Any]:
    """Return the output of `phalanx advise --json`."""
    situation = advised.situation
    return {
        "model": run.model.source_name,
        "parameters": situation.parameters,
        "devices": situation.ranks,
        **training_to_json(run),
        "best": _layout_to_json(advised.best),
        "advice": [
            {
                **_rule_to_json(advice.rule),
                "condition": advice.why_rule_applies,
                "verdict": advice.verdict,
                "layout": advice.evaluated and _layout_to_json(advice.evaluated),
                "slower": advice.slower,
                "more_bytes": advice.more_bytes,
                "reason": advice.reason,
            }
            for advice in advised.advice
        ],
        "silent": [_rule_to_json(rule) for rule in advised.inapplicable_rules],
    }


def _rule_to_json(rule: RuleOfThumb) -> dict[str, str]:
    return {
        "kind": rule.kind,
        "rule": rule.name,
        "says": rule.recommendation,
        "asks": rule.requirements_text,
        "source": rule.source,
        "beyond": rule.unplanned_part,
    }


def _layout_to_json(evaluated: EvaluatedLayout) -> dict[str, Any]:
    return {
        "candidate": str(evaluated.candidate),
        "layout": evaluated.candidate.layout().model_dump(exclude_defaults=True),
        "step_seconds": evaluated.step_seconds,
        "memory_bytes": evaluated.memory_bytes,
        "p_oom": evaluated.p_oom,
    }
