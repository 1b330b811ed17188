"""How large the explorer's page of a hundred thousand layouts is, how fast it loads, and how fast a click is answered.

    python -m benchmarks.explorer       # prints the table and writes docs/results/benchmarks/explorer.md

Needs Chromium (apt-get install chromium), which draws without a GPU here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.cli.commands.plan_explorer import PlanArguments, write_page
from tests.helpers.browser import CHROMIUM, Browser

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "explorer.md"
RUN = '[model]\npreset = "llama3-405b"\n[training]\nseq_len = 8192\ntokens_per_step = 16777216\n'
"""Llama 3's own step: 16 Mi tokens in sequences of 8,192."""
NODES = 2048
CLICKS = 25
MAX_LOAD_SECONDS, MAX_CLICK_SECONDS, MAX_BYTES = 2.0, 0.2, 5_000_000
READY = "document.body.dataset.ready === 'true'"
AFTER_DRAWING = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
"""Ends when the browser has drawn what was changed."""


Times = tuple[list[float], float]
"""Seconds by the clock of each of some actions, and the mean of their CPU seconds, which other programs do not
lengthen."""


def load_seconds(browser: Browser, address: str) -> Times:
    """Return the seconds from the navigation's start until the page is drawn, of five loads."""
    times = []
    before = browser.cpu_seconds()
    for attempt in range(5):
        browser.navigate(f"{address}?{attempt}", READY)
        times.append(float(browser.evaluate("state.readyAt")) / 1000)
    return times, (browser.cpu_seconds() - before) / len(times)


def click_seconds(browser: Browser, rows: list[int]) -> Times:
    """Return the seconds from a click on each layout's point until its details are drawn.

    Includes the search for the point: the click is an event of the canvas at the point's place.
    """
    browser.evaluate("setView('all')")
    program = (
        "(async (row) => { const box = scatter.marks.getBoundingClientRect(), [x, y] = scatter.place(row);"
        "const at = {clientX: box.left + x, clientY: box.top + y, pointerType: 'mouse', button: 0, pointerId: 1};"
        "const before = performance.now();"
        "scatter.release(new PointerEvent('pointerup', at), select);"
        "while (document.getElementById('details').dataset.row !== String(state.selected[0]))"
        f" await new Promise(done => setTimeout(done)); await {AFTER_DRAWING};"
        "return (performance.now() - before) / 1000; })"
    )
    before = browser.cpu_seconds()
    times = [float(browser.evaluate(f"{program}({row})")) for row in rows]
    return times, (browser.cpu_seconds() - before) / len(rows)


def action_seconds(browser: Browser, action: str) -> float:
    """Return the seconds that an action and the drawing after it take: the median of five."""
    program = (
        f"(async () => {{ const before = performance.now(); {action}; await {AFTER_DRAWING}; "
        "return (performance.now() - before) / 1000; })()"
    )
    return statistics.median(float(browser.evaluate(program)) for _ in range(5))


@dataclass(frozen=True)
class Measured:
    """Measurements of the page in the browser."""

    rows: int
    load: Times
    described_click: Times
    """On layouts whose details are in the file."""
    other_click: Times
    color_seconds: float
    hover_seconds: float


def plan_page(file: Path, nodes: int) -> tuple[float, float]:
    """Write the page; return the seconds that it took by the clock and of the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.toml"
        run.write_text(RUN)
        started_at = time.perf_counter(), time.process_time()
        write_page(PlanArguments(run, "h100", nodes, None, (), None, False, 10), file)
        return time.perf_counter() - started_at[0], time.process_time() - started_at[1]


def measure_page(file: Path) -> Measured:
    """Load the page and click on it."""
    with Browser() as browser:
        browser.set_viewport(1280)
        load = load_seconds(browser, file.resolve().as_uri())
        rows, ranked = browser.evaluate("[state.layouts.rows, state.facts.ranked]")
        assert not browser.errors, browser.errors
        return Measured(
            rows,
            load,
            click_seconds(browser, ranked[:CLICKS]),
            click_seconds(browser, list(range(0, rows, rows // CLICKS))),
            action_seconds(browser, "document.getElementById('color-by').value = 'pp'; paint()"),
            action_seconds(browser, "scatter.hovered = null; scatter.hover(scatter.pick(400, 200), [400, 200])"),
        )


def main() -> None:
    """Measure, print a table, write it."""
    parser = argparse.ArgumentParser("benchmarks.explorer")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--page", type=Path, help="The page, which is planned and written unless it exists.")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        parser.error("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.page or Path(folder) / "plan.html"
        plan_seconds = None if file.exists() else plan_page(file, arguments.nodes)
        measured = measure_page(file)
        table = format_table(file.read_text(encoding="utf-8"), measured, plan_seconds)
    print(table)
    PAGE.write_text(table)


def format_table(page: str, measured: Measured, plan_seconds: tuple[float, float] | None) -> str:
    """Return the page of the benchmark."""
    facts = json.loads(page.partition('id="facts">')[2].partition("</script>")[0])
    size, columns = len(page.encode()), len(facts["columns"]["data"])
    details = sum(map(len, facts["details"].values()))
    rows, described, others = measured.rows, measured.described_click, measured.other_click
    worst_load, worst_click = max(measured.load[0]), max(*described[0], *others[0])
    passed = worst_load < MAX_LOAD_SECONDS and worst_click < MAX_CLICK_SECONDS and size < MAX_BYTES
    table = [
        ("layouts", f"{rows:,}"),
        ("with all details in the file", f"{len(facts['details'])}"),
        ("size of the page", f"{size / 1e6:.2f} MB"),
        ("of it columns of all layouts", f"{columns / 1e6:.2f} MB ({columns / rows:.1f} bytes a layout)"),
        ("of it details", f"{details / 1e6:.2f} MB"),
        ("from navigation to drawn, median of 5 (worst)", _spread(measured.load)),
        (f"click to details drawn, {len(described[0])} first choices, median (worst)", _spread(described)),
        (f"the same, {len(others[0])} layouts from all", _spread(others)),
        ("color all points by another choice", f"{1e3 * measured.color_seconds:.0f} ms"),
        ("find the point under the mouse and mark it", f"{1e3 * measured.hover_seconds:.0f} ms"),
    ]
    if plan_seconds is not None:
        table.append(("`phalanx plan --html`, all of it", f"{plan_seconds[0]:.0f} s; CPU {plan_seconds[1]:.0f} s"))
    lines = [f"| {name} | {value} |" for name, value in table]
    return "\n".join(
        [
            "# The explorer with all layouts of Llama 3 405B on 16,384 GPUs",
            "",
            "| llama3-405b, 2,048 nodes of 8 H100, 16 Mi tokens a step | |",
            "|---|---:|",
            *lines,
            "",
            f"{'Passed' if passed else 'FAILED'}: loads in under {MAX_LOAD_SECONDS:g} s, answers a click in under "
            f"{MAX_CLICK_SECONDS:g} s, is below {MAX_BYTES / 1e6:g} MB.",
            "",
            f"Chromium without a window and without a GPU; {os.cpu_count()} cores ({platform.machine()}), load average "
            f"{os.getloadavg()[0]:.1f}.",
            "CPU is the mean of all threads of the page's process.",
            "Numbers are 32-bit floats in columns, rounded to one part in 65,536, in planes of bytes of equal weight,",
            "compressed by zlib and written as base64; the browser's own DecompressionStream unpacks them. Points are",
            "pixels of a canvas.",
            "",
            "- Again: `python -m benchmarks.explorer`.",
            "",
        ]
    )


def _spread(times: Times) -> str:
    seconds, cpu = times
    return f"{1e3 * statistics.median(seconds):.0f} ms ({1e3 * max(seconds):.0f} ms); CPU {1e3 * cpu:.0f} ms"


if __name__ == "__main__":
    main()
