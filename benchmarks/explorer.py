"""Measure the size, loading time and click time of the explorer page with a hundred thousand layouts.

    python -m benchmarks.explorer       # prints the table and writes docs/results/benchmarks/explorer.md

Needs Chromium (apt-get install chromium), which renders without a GPU."""

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

from benchmarks.pages import write_results
from phalanx.cli.commands.plan_explorer import PlanArguments, write_page
from tests.helpers.browser import CHROMIUM, Browser

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "explorer.md"
RUN = '[model]\npreset = "llama3-405b"\n[training]\nseq_len = 8192\ntokens_per_step = 16777216\n'
"""Run file with the step of the Llama 3 paper: 16 Mi tokens in sequences of 8,192."""
NODES = 2048
CLICKS = 25
MAX_LOAD_SECONDS, MAX_CLICK_SECONDS, MAX_BYTES = 2.0, 0.2, 5_000_000
READY = "document.body.dataset.ready === 'true'"
AFTER_DRAWING = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
"""Promise that resolves when the browser has drawn the changes."""


Times = tuple[list[float], float]
"""Wall-clock seconds of each action, and their mean CPU seconds, which are independent of other programs."""


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
    """Clicks on layouts whose details are in the file."""
    other_click: Times
    color_seconds: float
    hover_seconds: float


def plan_page(file: Path, nodes: int) -> tuple[float, float]:
    """Write the page; return the wall-clock seconds and the CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.toml"
        run.write_text(RUN)
        started_at = time.perf_counter(), time.process_time()
        write_page(
            PlanArguments(
                run=run,
                machine="h100",
                nodes=nodes,
                nproc=None,
                overrides=(),
                topology=None,
                all_schedules=False,
            ),
            file,
        )
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
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser("benchmarks.explorer")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--page", type=Path, help="explorer page; it is planned and written unless it exists")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        parser.error("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.page or Path(folder) / "plan.html"
        plan_seconds = None if file.exists() else plan_page(file, arguments.nodes)
        measured = measure_page(file)
        table = format_table(file.read_text(encoding="utf-8"), measured, plan_seconds)
    print(table)
    write_results(PAGE, table)


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
        ("layouts with details in the file", f"{len(facts['details'])}"),
        ("page size", f"{size / 1e6:.2f} MB"),
        ("size of the columns of all layouts", f"{columns / 1e6:.2f} MB ({columns / rows:.1f} bytes per layout)"),
        ("size of the details", f"{details / 1e6:.2f} MB"),
        ("navigation until the page is drawn, median of 5 (worst)", _spread(measured.load)),
        (f"click until details are drawn, {len(described[0])} best layouts, median (worst)", _spread(described)),
        (f"click until details are drawn, {len(others[0])} of all layouts, median (worst)", _spread(others)),
        ("recolor all points", f"{1e3 * measured.color_seconds:.0f} ms"),
        ("find and highlight the point under the mouse", f"{1e3 * measured.hover_seconds:.0f} ms"),
    ]
    if plan_seconds is not None:
        table.append(("`phalanx plan explore --html`, total", f"{plan_seconds[0]:.0f} s; CPU {plan_seconds[1]:.0f} s"))
    lines = [f"| {name} | {value} |" for name, value in table]
    return "\n".join(
        [
            "# Explorer page with all layouts of Llama 3 405B on 16,384 GPUs",
            "",
            "| llama3-405b, 2,048 nodes of 8 H100, 16 Mi tokens per step | |",
            "|---|---:|",
            *lines,
            "",
            f"{'Passed' if passed else 'FAILED'}: loading takes less than {MAX_LOAD_SECONDS:g} s, a click takes less "
            f"than {MAX_CLICK_SECONDS:g} s, and the page is smaller than {MAX_BYTES / 1e6:g} MB.",
            "",
            f"Headless Chromium without a GPU; {os.cpu_count()} cores ({platform.machine()}), load average "
            f"{os.getloadavg()[0]:.1f}.",
            "CPU is the mean CPU time of an action over all threads of the page's process.",
            "Columns contain 32-bit floats, rounded to one part in 65,536 and split into planes of bytes of equal",
            "weight. They are compressed with zlib, encoded as base64 and unpacked by the DecompressionStream of the",
            "browser. Points are pixels of a canvas.",
            "",
            "- Written by `python -m benchmarks.explorer`.",
            "",
        ]
    )


def _spread(times: Times) -> str:
    seconds, cpu = times
    return f"{1e3 * statistics.median(seconds):.0f} ms ({1e3 * max(seconds):.0f} ms); CPU {1e3 * cpu:.0f} ms"


if __name__ == "__main__":
    main()
