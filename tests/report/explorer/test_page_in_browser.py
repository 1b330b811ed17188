"""The explorer in Chromium: it names layouts as the planner does, a click shows the planner's numbers, no other
address is requested, and texts fit and are readable in the dark."""

from __future__ import annotations

import json

import pytest

from phalanx.plan.search.evaluate import layout_to_text
from phalanx.report.explorer.page import PageContext, details_of, packed_details, page, page_facts
from phalanx.spec.files.write import to_toml
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.explorations import small_exploration
from tests.helpers.page_checks import FIND_LOW_CONTRAST_TEXT, FIND_OVERFLOWING_ELEMENTS
from tests.helpers.planned_runs import make_run
from tests.helpers.watch_server import serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
READY = "document.body.dataset.ready === 'true'"
CONTEXT = PageContext(
    {
        "compare": "phalanx plan compare 'my run.toml'",
        "explore": "phalanx plan explore 'my run.toml'",
        "train": "phalanx train 'my run.toml'",
    },
    ["assumed: nothing"],
)


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened_browser:
        yield opened_browser


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    exploration = small_exploration()
    facts = page_facts(exploration, CONTEXT) | {"details": packed_details(exploration), "web": False}
    file = tmp_path_factory.mktemp("explorer") / "plan.html"
    file.write_text(page(facts), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def opened(browser, address):
    browser.requested_urls.clear()
    browser.errors.clear()
    browser.set_viewport(1280)
    browser.navigate(address, READY)
    return browser


def texts(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)")


def click_layout(browser, row):
    """Click a visible point of a layout with the mouse."""
    browser.evaluate("scrollTo(0, 0)")
    x, y = browser.evaluate(
        "(() => { const box = scatter.marks.getBoundingClientRect(); "
        f"const [x, y] = scatter.place({row}); return [box.left + x, box.top + y]; }})()"
    )
    browser.click(x, y)


def test_explorer_names_every_layout_as_the_planner_does(opened):
    layouts = small_exploration().layouts
    rows = "Array.from({length: state.layouts.rows}, (_, row) => row)"
    assert opened.evaluate(f"{rows}.map(row => state.layouts.name(row))") == [str(layout) for layout in layouts]
    fields = f"{rows}.map(row => state.layouts.fields(row).map(([name, value]) => `${{name}}=${{value}}`).join(','))"
    assert opened.evaluate(fields) == [layout_to_text(layout.layout()) for layout in layouts]


def test_explorer_shows_details_of_clicked_layout(opened):
    exploration = small_exploration()
    row = list(exploration.front)[-1]
    assert texts(opened, "#details h3") == [str(exploration.layouts[next(iter(exploration.ranked))])]
    opened.evaluate("setView('all')")
    click_layout(opened, row)
    opened.wait_until(
        f"document.querySelector('#details h3').textContent === {json.dumps(str(exploration.layouts[row]))}"
    )
    details = details_of(exploration, row)
    assert texts(opened, "#details .memory .total")[0] == opened.evaluate(
        f"gib({next(iter(details['memory'].values()))['peak_bytes']})"
    )
    parts = [seconds for seconds in details["parts"].values() if seconds > details["step_seconds"] / 10_000]
    assert texts(opened, "#details .parts td:nth-child(2)") == [
        opened.evaluate(f"seconds({seconds})") for seconds in parts
    ]
    assert len(texts(opened, "#details .traffic tbody tr")) >= len(details["traffic"])
    (command,) = texts(opened, "#details .command:first-child code")
    assert command.startswith("phalanx train 'my run.toml' --set layout= --set layout.")
    assert opened.errors == []


def test_explorer_says_what_a_file_does_not_have(opened):
    exploration = small_exploration()
    row = next(
        row for row in range(len(exploration.layouts)) if row not in exploration.ranked and row not in exploration.front
    )
    opened.evaluate(f"select({row})")
    opened.wait_until(
        f"document.querySelector('#details h3').textContent === {json.dumps(str(exploration.layouts[row]))}"
    )
    assert "phalanx plan explore" in texts(opened, "#details .brief")[0]
    assert texts(opened, "#details .memory") == []


def test_explorer_compares_two_layouts(opened):
    exploration = small_exploration()
    first, second = list(exploration.ranked)[:2]
    opened.evaluate("document.querySelector('.compare').click()")
    opened.wait_until("document.querySelectorAll('#details article').length === 2")
    assert texts(opened, "#details .empty h3") == ["Click a second layout"]
    opened.evaluate("document.querySelectorAll('#choices-list button')[1].click()")
    opened.wait_until("document.querySelector('#comparison table') !== null")
    assert texts(opened, "#details h3") == [str(exploration.layouts[row]) for row in (first, second)]
    difference = exploration.ranked[second].step_seconds - exploration.ranked[first].step_seconds
    assert texts(opened, "#comparison .sum td:last-child") == [opened.evaluate(f"seconds({difference}, true)")]


def test_explorer_hides_categories_and_says_when_none_is_left(opened):
    buttons = "document.querySelectorAll('#legend button')"
    for index in range(opened.evaluate(f"{buttons}.length")):
        opened.evaluate(f"{buttons}[{index}].click()")
    assert opened.evaluate("scatter.order.length") == 0
    assert opened.evaluate("document.getElementById('empty').checkVisibility()")


def test_explorer_file_fetches_nothing(opened):
    assert [url for url in opened.requested_urls if not url.startswith(("file:", "data:", "blob:"))] == []
    assert opened.errors == []


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_explorer_fits_viewport_with_readable_contrast(opened, width, dark):
    opened.set_viewport(width, dark)
    opened.evaluate("document.querySelector('.compare').click()")
    opened.evaluate("document.querySelectorAll('#choices-list button')[1].click()")
    opened.wait_until("document.querySelector('#comparison table') !== null")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.evaluate(FIND_OVERFLOWING_ELEMENTS) == []
    assert opened.evaluate(FIND_LOW_CONTRAST_TEXT) == []


def test_explorer_web_plans_for_new_choices(browser, tmp_path):

    file = tmp_path / "run.toml"
    file.write_text(to_toml(make_run(sequences=16)))
    with serving("plan", "explore", file) as address:
        browser.requested_urls.clear()
        browser.errors.clear()
        browser.navigate(address, READY)
        browser.set_viewport(1280)
        form = "document.getElementById('choices').elements"
        browser.evaluate(f"{form}.nodes.value = '2'; {form}.plan.click()")
        browser.wait_until("document.getElementById('title').textContent.includes('on 16 x h100')")
        browser.evaluate("select(0)")
        browser.wait_until("document.querySelector('#details h3').textContent === state.layouts.name(0)")
        assert texts(browser, "#details .memory") != []
        browser.evaluate(f"{form}.nodes.value = '10007'; {form}.plan.click()")
        browser.wait_until("!document.getElementById('problem').hidden")
        assert "has no layout that divides this model and this batch" in texts(browser, "#problem")[0]
        assert all(url.startswith((address, "data:", "blob:")) for url in browser.requested_urls)
        assert browser.errors == []
