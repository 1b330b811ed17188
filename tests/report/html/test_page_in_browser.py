"""The page in Chromium: its figures equal the JSON, no other address is
requested, and texts fit and are readable in the dark."""

from __future__ import annotations

import subprocess

import pytest

from phalanx.report import formatting
from phalanx.spec.formatting import format_ratio
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.cli_runner import command_json
from tests.helpers.page_checks import FIND_LOW_CONTRAST_TEXT, FIND_OVERFLOWING_ELEMENTS
from tests.helpers.trained_runs import (
    hybrid_run,
    single_threaded_environment,
    train_command,
    two_rank_run,
    wait_for,
    write_run_file,
)
from tests.helpers.watch_server import watch_server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened_browser:
        yield opened_browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return each page and the output of `--json` that was written with it."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {"hybrid": [hybrid_run()], "both": [two_rank_run(), hybrid_run()], "many": [two_rank_run()] * 5}
    return {
        name: (
            (folder / f"{name}.html").as_uri(),
            command_json("report", *directories, "--html", folder / f"{name}.html"),
        )
        for name, directories in runs.items()
    }


@pytest.fixture(params=["hybrid", "both"])
def opened_page(request, browser, pages):
    """Return the page in the browser, and its facts."""
    address, facts = pages[request.param]
    browser.requested_urls.clear()
    browser.errors.clear()
    browser.open(address)
    return browser, facts


def plotly_traces(browser, element_id):
    """Return the data that plotly has drawn in an element."""
    return browser.evaluate(
        f"document.getElementById('{element_id}').data.map(({{x, y, z, base, name, type}}) => "
        "({x, y, z, base, name, type}))"
    )


def test_report_page_figures_in_browser_equal_report_json(opened_page):
    browser, report = opened_page
    assert browser.evaluate("JSON.parse(document.getElementById('facts').textContent)") == report
    assert any(all(facts[figure] for figure in ("timeline", "memory", "experts")) for facts in report["runs"])
    for number, facts in enumerate(report["runs"]):
        bars = plotly_traces(browser, f"ranks-{number}")
        parts = [
            part
            for part in facts["ranks"][0]
            if any(trace["name"] == formatting.DISPLAY_NAMES.get(part, part) for trace in bars)
        ]
        assert {"compute", "communication"} <= set(parts)
        for part in parts:
            (trace,) = [trace for trace in bars if trace["name"] == formatting.DISPLAY_NAMES.get(part, part)]
            assert trace["x"] == [rank[part] for rank in facts["ranks"]]
        if facts["timeline"]:
            spans = [
                [kind, start]
                for trace in plotly_traces(browser, f"timeline-{number}")
                for kind, start in zip([trace["name"]] * len(trace["base"]), trace["base"], strict=True)
            ]
            timelines = [facts["timeline"][name] for name in ("planned", "simulated", "measured")]
            names = {"F": "forward", "B": "backward"}
            assert sorted(spans) == sorted(
                [names[kind], start] for timeline in timelines for _, kind, _, _, start, _ in timeline
            )
        if facts["memory"]:
            memory_traces = {trace["name"]: trace["y"] for trace in plotly_traces(browser, f"memory-{number}")}
            assert memory_traces == {part: values for part, values in facts["memory"]["bytes"].items() if any(values)}
        if facts["experts"]:
            (cells,) = plotly_traces(browser, f"experts-{number}")
            tokens = facts["experts"]["tokens"]
            assert cells["z"] == [[value * len(layer) / sum(layer) for value in layer] for layer in tokens]


def test_report_page_curves_contain_every_run(opened_page):
    browser, report = opened_page
    figure = "curves" if report["comparison"] else "curves-0"
    lines = [trace for trace in plotly_traces(browser, figure) if trace["type"] == "scatter"]
    for facts in report["runs"]:
        for curve in ("loss", "learning_rate", "grad_norm", "tokens_per_second"):
            assert facts["curves"][curve] in [trace["y"] for trace in lines]


def test_report_page_tables_equal_report_json(opened_page):
    browser, report = opened_page
    rows = browser.evaluate(
        "[...document.querySelectorAll('.comparison tbody tr')].map(row => "
        "[...row.cells].map(cell => cell.firstChild.textContent))"
    )
    assert rows == [
        [
            formatting.row_label(row, facts["run"]["ranks"]),
            *(formatting.format_number(row[side], row["unit"]) for side in ("predicted", "measured")),
            format_ratio(row["ratio"]),
        ]
        for facts in report["runs"]
        for _, group in formatting.group_rows(facts["comparison"])
        for row in group
    ]


def test_report_page_fetches_no_external_resources(opened_page):
    browser, _ = opened_page
    assert [address for address in browser.requested_urls if not address.startswith(("file:", "data:"))] == []
    assert (
        browser.evaluate("performance.getEntriesByType('resource').filter(one => /^http/.test(one.name)).length") == 0
    )
    assert browser.errors == []


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("dark", [False, True])
def test_report_page_fits_viewport_with_readable_contrast(opened_page, width, dark):
    browser, _ = opened_page
    browser.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    browser.set_viewport(width, dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(FIND_OVERFLOWING_ELEMENTS) == []
    assert browser.evaluate(FIND_LOW_CONTRAST_TEXT) == []


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("dark", [False, True])
def test_report_page_of_many_runs_sorts_and_opens_reports(browser, pages, width, dark):
    browser.open(pages["many"][0])
    browser.set_viewport(width, dark)
    names = "[...document.querySelectorAll('.sortable tbody tr')].map(row => row.cells[0].textContent)"
    click = "document.querySelector('.sortable th button').click()"
    first = [f"two ({number})" for number in range(1, 6)]
    assert browser.evaluate(names) == first
    browser.evaluate(f"{click}; {click}")
    assert browser.evaluate(names) == first[::-1]
    assert browser.evaluate("document.querySelector('.sortable th').ariaSort") == "descending"
    assert browser.evaluate("document.querySelectorAll('main > details[open]').length") == 0
    browser.evaluate("document.querySelector('.sortable a').click()")
    browser.wait_until("document.querySelector('main > details[open] .main-svg')")
    assert browser.evaluate("document.querySelectorAll('main > details[open]').length") == 1
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(FIND_OVERFLOWING_ELEMENTS) == []
    assert browser.evaluate(FIND_LOW_CONTRAST_TEXT) == []
    assert browser.errors == []


def test_watch_page_updates_figures_during_training(browser):
    file = write_run_file("live", {"training.steps": 400, "layout.data_parallel": "zero2"})
    run, metrics = file.parent / "live", file.parent / "live" / "metrics.jsonl"
    train = subprocess.Popen(
        train_command(file, 2), env=single_threaded_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(train, lambda: metrics.is_file() and metrics.read_text().count("\n") > 4)
        with watch_server(run) as address:
            browser.requested_urls.clear()
            browser.open(address)
            browser.set_viewport(1280)
            step = "JSON.parse(document.getElementById('facts').textContent).runs[0].run.step"
            first = browser.evaluate(step)
            browser.evaluate("void (window.place = document.getElementById('curves-0'))")
            browser.wait_until(f"{step} > {first + 5}")
            browser.wait_until(f"document.getElementById('curves-0').data[0].x.at(-1) > {first + 5}")
            assert browser.evaluate("window.place === document.getElementById('curves-0')")
            assert browser.evaluate("document.documentElement.scrollWidth") <= 1280
            assert browser.evaluate(f"{step} === document.getElementById('curves-0').data[0].x.at(-1)")
            assert {f"{address}main.html"} <= set(browser.requested_urls)
            assert all(url.startswith((address, "data:")) for url in browser.requested_urls)
    finally:
        train.terminate()
        train.wait(60)
