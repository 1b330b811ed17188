"""`torchrun -m phalanx.train RUN.toml [--set KEY=VALUE ...] [--resume [--step N|best]]`: one rank of a run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from phalanx.launch.process import exit_rank
from phalanx.runs.checkpoints import parse_step
from phalanx.runs.step_records import parse_step_range
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.log import log_to_stderr
from phalanx.train.rank_options import RankOptions, ReducedRanks
from phalanx.train.standby import run_standby_rank, wait_for_standby_ranks
from phalanx.train.worker import run_rank


def main() -> None:
    """Parse the command line, train on this rank, and exit."""
    parser = argparse.ArgumentParser(
        "phalanx.train", description="Train on this rank (started by torchrun, srun, mpirun or phalanx train)."
    )
    parser.add_argument("run", type=Path, help="a run file, or a run directory to continue")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a field of the run file"
    )
    parser.add_argument("--machine", metavar="NAME", help="machine description: a preset, or a file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    parser.add_argument("--step", type=parse_step, metavar="N|best", help="with --resume: go back to this checkpoint")
    parser.add_argument("--layout", metavar="JSON", help="the layout for these ranks, instead of the run's")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of training ranks; the others stand by")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="device to train on, instead of the detected one")
    parser.add_argument("--force", action="store_true", help="start even if the plan exceeds the available memory")
    parser.add_argument("--trust", action="store_true", help="run the code that a run directory names")
    parser.add_argument("--profile-memory", action="store_true", help="measure memory and collectives of one step")
    parser.add_argument("--profile-steps", metavar="FIRST:LAST", help="profile these steps")
    arguments = parser.parse_args()
    try:
        log_to_stderr()
        window = parse_step_range(arguments.profile_steps) if arguments.profile_steps else None
    except UserError as error:
        parser.error(str(error))
    layout = Layout.model_validate_json(arguments.layout) if arguments.layout else None
    if arguments.ranks is not None and int(os.environ["RANK"]) >= arguments.ranks:
        exit_rank(run_standby_rank(arguments.run))
    reduced = None if layout is None else ReducedRanks(layout, arguments.ranks)
    options = RankOptions(
        overrides=tuple(arguments.set),
        machine=arguments.machine,
        resume=arguments.resume,
        step=arguments.step,
        measure=arguments.profile_memory,
        window=window,
        reduced=reduced,
        device=arguments.device,
        force=arguments.force,
        trust=arguments.trust,
    )
    exit_code = run_rank(arguments.run, options)
    if exit_code == 0 and arguments.ranks is not None:
        wait_for_standby_ranks(arguments.ranks)
    exit_rank(exit_code)


if __name__ == "__main__":  # DCP's background processes import the main module again
    main()
