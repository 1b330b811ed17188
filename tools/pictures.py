"""Take the pictures of the documents, and screenshots for review, with Chromium (apt-get install chromium).

    python -m tools.pictures            # docs/report-*.png, docs/explorer-*.png and docs/course/images
    python -m tools.pictures --review   # into pictures/: the report, the explorer, and pages of `make docs`

Runs are trained once, into pictures/runs; remove a run to train it again."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.doc_commands import fenced_blocks
from tests.helpers.watch_server import serving

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLDER = ROOT / "pictures"
"""Runs and screenshots, which git ignores."""
RUNS = FOLDER / "runs"
SMALL_MODEL = "{preset='tiny',hidden_size=64,num_layers=2,num_heads=2,ffn_hidden_size=192}"
ONE_RANK = {
    "name": "one",
    "training.seconds": "",
    "training.steps": 40,
    "training.tokens_per_step": 1024,
    "training.seq_len": 64,
    "layout.micro_batch_size": 4,
    "model": SMALL_MODEL,
    "evaluation.every": 10,
    "evaluation.tokens": 2048,
    "evaluation.prompt": "",
}
"""Settings of a run of one rank, beside those of the demo."""
LONGER = {**ONE_RANK, "training.steps": 60, "optimizer.learning_rate": 0.01}
"""Settings with which the run of one rank is resumed, so that its curves have a mark."""
SITE_PAGES = ("index", "getting-started", "course/07-tensor-parallel", "results/accuracy", "reference/config")
READY = "document.body.dataset.ready === 'true'"


def phalanx(*arguments: object) -> None:
    """Run a command of this checkout; fail if it does."""
    subprocess.run([sys.executable, "-m", "phalanx", *map(str, arguments)], check=True)


def train_hybrid_run() -> Path:
    """Return the run of four ranks of the guide on reports, trained by the commands that stand there."""
    run = RUNS / "hybrid"
    if not (run / "metrics.jsonl").is_file():
        guide = (DOCS / "guides" / "reports-and-monitoring.md").read_text()
        block = next(block for block in fenced_blocks(guide) if "name=hybrid" in " ".join(block.body))
        for command in block.commands:
            if not command.startswith("phalanx report"):
                command = command.replace("phalanx ", f"{sys.executable} -m phalanx ")
                subprocess.run(command.replace("examples/", f"{ROOT}/examples/"), shell=True, check=True)
    return run


def train_one_rank_run() -> Path:
    """Return a run of one rank that was resumed with other settings."""
    run = RUNS / "one"
    if not (run / "metrics.jsonl").is_file():
        for settings, options in ((ONE_RANK, ()), (LONGER, ("--resume",))):
            overrides = [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
            phalanx("train", ROOT / "examples" / "demo.toml", "--nproc", 1, *overrides, *options)
    return run


def copy_runs(run: Path, count: int) -> list[Path]:
    """Return copies of a run whose records are edited: other learning rates and seeds, and losses that follow them."""
    copies = []
    for number in range(count):
        learning_rate, seed = 0.001 * 2 ** (number // 3), number % 3
        copy = RUNS / f"sweep-{number + 1:02d}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "tensorboard", "report.html"))
        table = tomllib.loads((copy / "run.toml").read_text())
        table["name"] = copy.name
        table["training"]["seed"] = seed
        table["optimizer"]["learning_rate"] = learning_rate
        (copy / "run.toml").write_text(tomli_w.dumps(table))
        records = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        slower = 1 + 0.03 * abs(math.log2(learning_rate / 0.01)) + 0.005 * seed
        for record in records:
            for field in record.keys() & {"loss", "held_out_loss"}:
                record[field] *= slower
            if "learning_rate" in record:
                record["learning_rate"] *= learning_rate / 0.01
        (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        copies.append(copy)
    return copies


def write_report(name: str, runs: Sequence[Path]) -> str:
    """Write a report, and return its address."""
    file = FOLDER / f"{name}.html"
    subprocess.run(
        [sys.executable, "-m", "phalanx", "report", *map(str, runs), "--html", str(file)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return file.as_uri()


def take_shots(browser: Browser, begin: str, shots: dict[str, tuple[int, bool]]) -> None:
    """Take a screenshot for each suffix of the file, width of the window and color scheme."""
    for suffix, (width, dark) in shots.items():
        browser.set_viewport(width, dark)
        file = Path(f"{begin}-{suffix}.png")
        browser.screenshot(file)
        scrolled = browser.evaluate("document.documentElement.scrollWidth")
        print(f"{file.relative_to(ROOT)}{f': {scrolled} pixels wide' if scrolled > width else ''}", flush=True)


def explore(browser: Browser, begin: str, shots: dict[str, tuple[int, bool]]) -> None:
    """Take pictures of the explorer with the run of its guide; in the dark ones, two layouts are compared."""
    guide = (DOCS / "guides" / "explorer.md").read_text()
    run = FOLDER / "llama3-8b.toml"
    run.write_text("\n".join(next(block.body for block in fenced_blocks(guide) if block.title == run.name)))
    with serving("plan", "explore", run.name, "--machine", "h100", "--nodes", 8, "--port", 0) as address:
        browser.navigate(address, READY)
        for suffix, (width, dark) in shots.items():
            if dark:
                browser.evaluate(
                    "state.comparing = true; select(state.facts.ranked[3]); "
                    "byId('color-by').value = 'data_parallel'; paint()"
                )
                browser.wait_until("document.getElementById('details').dataset.row === String(state.selected[1])")
            take_shots(browser, begin, {suffix: (width, dark)})


def main() -> None:
    """Take the pictures."""
    parser = ArgumentParser("tools.pictures")
    parser.add_argument("--review", action="store_true", help="take screenshots for review, into pictures/")
    is_review = parser.parse_args().review
    if CHROMIUM is None:
        parser.error("chromium is not installed: apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    os.chdir(FOLDER)
    hybrid = train_hybrid_run()
    with Browser() as browser:
        if not is_review:
            shots = {"wide": (1280, False), "narrow": (420, False), "dark": (1280, True)}
            browser.open(write_report("hybrid", [hybrid]))
            take_shots(browser, f"{DOCS}/report", shots)
            explore(browser, f"{DOCS}/explorer", shots)
            subprocess.run([sys.executable, DOCS / "course" / "images" / "make.py"], check=True)
            return
        shots = {"420": (420, False), "1280": (1280, False), "1280-dark": (1280, True)}
        one = train_one_rank_run()
        sweep = copy_runs(one, 21)
        reports = {"one-rank": [one], "four-ranks": [hybrid], "two-runs": [one, hybrid], "21-runs": sweep}
        for name, runs in reports.items():
            browser.open(write_report(name, runs))
            take_shots(browser, f"{FOLDER}/report-{name}", shots)
        explore(browser, f"{FOLDER}/explorer", shots)
        for page in SITE_PAGES if (ROOT / "site").is_dir() else ():
            file = ROOT / "site" / (f"{page}.html" if page == "index" else f"{page}/index.html")
            for suffix, (width, dark) in shots.items():
                browser.set_viewport(width, dark)
                # The theme chooses its palette when a page is opened, and remembers it.
                browser.navigate(file.as_uri(), "document.fonts.status === 'loaded'")
                browser.evaluate("localStorage.clear()")
                browser.navigate(f"{file.as_uri()}?again", "document.fonts.status === 'loaded'")
                take_shots(browser, f"{FOLDER}/site-{page.replace('/', '-')}", {suffix: (width, dark)})


if __name__ == "__main__":
    main()
