"""Compare predicted and measured step times of recomputation on this machine: in no block, in some, and in all.

    python -m benchmarks.recomputation      # prints the table and writes docs/results/benchmarks/recomputation.md

`phalanx calibrate` uses the runs of FITTED, of which one per model recomputes all blocks. The runs of PREDICTED are
predicted, then compared. Finished runs are kept in --work, so that an interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.calibration import STEPS, ShortRun, train
from benchmarks.pages import write_results
from phalanx.plan.calibrate.calibrate import calibrate, detect_cpu, predict_run

PAGE = Path(__file__).parents[1] / "docs" / "results" / "benchmarks" / "recomputation.md"
MODELS = ("dense", "experts")
FULL = "micro_batch_size=4,activation_checkpointing=full"
FITTED = [
    ShortRun(model, 2, layout) for model in MODELS for layout in ("micro_batch_size=4", "micro_batch_size=2", FULL)
]
PREDICTED = [
    ShortRun(model, 2, layout)
    for model in MODELS
    for layout in (
        *(f"{FULL},recomputed_blocks={blocks}" for blocks in (2, 4)),
        "micro_batch_size=4,activation_checkpointing=selective",
        "micro_batch_size=4,activation_checkpointing=norms",
        "micro_batch_size=8,activation_checkpointing=full",
    )
]
TEXT = """# Recomputation, predicted and measured

| run | step time, s | predicted | error |
|---|---:|---:|---:|
{rows}

Two processes on two cores train a model of 8 layers (dense) or 6 layers (experts), width 256 and sequences of 256
tokens. Times are medians of {steps} steps without the first ones. The constants of the time model come from
`phalanx calibrate` on runs of the same models without recomputation, with micro-batches of 2 and 4, and on one that
recomputes all blocks.

Written by `python -m benchmarks.recomputation`.
"""


def main() -> None:
    """Train, calibrate and predict the runs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/recomputation"), help="folder of the runs")
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    runs = {}
    # In random order, because the speed of a machine that other programs use changes over time.
    for short in random.Random(0).sample([*FITTED, *PREDICTED], len(FITTED) + len(PREDICTED)):
        runs[short] = train(short, work)
        print(f"{short}: {runs[short].step_seconds:.3f} s", flush=True)
    machine = calibrate([runs[short] for short in FITTED], detect_cpu()).machine
    rows = []
    for short in PREDICTED:
        seconds, measured = predict_run(machine, runs[short])[0], runs[short].step_seconds
        rows.append(
            f"| {short.model}: {short.layout} | {measured:.3f} | {seconds:.3f} | {seconds / measured - 1:+.1%} |"
        )
    page = TEXT.format(rows="\n".join(rows), steps=STEPS)
    print(page)
    write_results(PAGE, page)


if __name__ == "__main__":
    main()
