"""Restarts, resumes, rollbacks and changes of a run, as marks in its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.report.formatting import setting_texts
from phalanx.runs.events import FAILED, FINISHED, ROLLED_BACK, STARTED


def run_marks(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a mark for each start of a run after the first: the step after which the run continued, kind and text.

    The kind is "restart" (after a failure), "resume" (after an end), "rollback", or "change" if number of ranks,
    layout or another field of the run are not those of the start before.
    """
    marks = []
    end: Mapping[str, Any] = {}
    before: dict[str, Any] | None = None
    for event in events:
        if event["kind"] in (FAILED, FINISHED, ROLLED_BACK):
            end = event
        if event["kind"] != STARTED:
            continue
        # A start records the fields of the run only if they changed.
        settings = event.get("settings") or {name: value for name, value in (before or {}).items() if name != "ranks"}
        now = {"ranks": event["ranks"], **settings}
        if before is not None:
            kind, text = _describe_cause(end)
            # Runs of earlier versions record no fields, and a run with training.seconds decides its steps later.
            ignored = now.keys() - before.keys() if len(before) == 1 else {"training.steps"} - before.keys()
            names = [name for name in {**now, **before} if now.get(name) != before.get(name) and name not in ignored]
            changes = "".join(
                "; {}: {} (before: {})".format(name, *setting_texts([now.get(name), before.get(name)], unset="none"))
                for name in names
            )
            text = f"step {event['step']}: {text}{changes}"
            marks.append({"step": event["step"], "kind": "change" if names else kind, "text": text})
        before = now
        end = {}
    return marks


def _describe_cause(end: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind and the cause of a start, which follow from the event that ended the start before."""
    kind = end.get("kind")
    if kind == FAILED:
        return "restart", f"restarted after a failure (rank {end['rank']} {end['reason']}, step {end['step']})"
    if kind == ROLLED_BACK:
        return "rollback", f"rolled back from step {end['after']} ({end['reason']})"
    if kind == FINISHED:
        return "resume", "resumed"
    return "restart", "restarted after an end that was not recorded"
