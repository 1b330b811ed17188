"""Slurm batch script."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from phalanx.launch.jobs.job import SAVING_SECONDS, ClusterJob, shell_join
from phalanx.spec.base import require
from phalanx.spec.errors import EXIT_STOPPED

CHECK_MINUTES = 5
"""Time limit in minutes for `phalanx doctor --quick`, which takes at most one unless something hangs."""
STARTING_SECONDS = 60 * (CHECK_MINUTES + 1)
"""Maximum seconds before the first step: the check, and a minute for PyTorch and a checkpoint."""
LEGEND = """\
# Submit it with sbatch, where `phalanx` is on the PATH, from the directory that the paths of the run file start at.
# `output_dir` and `data.cache` of the run file must be on a disk that all nodes share.
"""

CORES_SCRIPT = """
# The cores that this job was given of every node, where nodes differ ("16(x2),8") those of the smallest, and of these
# a rank's share for its threads.
cores=$(sed 's/([^)]*)//g; s/,/\\n/g' <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS-$((cores > nproc ? cores / nproc : 1))}
"""

SRUN_SCRIPT = """
# One task on each node. The death of a task or of a node ends none of the others: `phalanx train` continues without it.
each=(srun --cpus-per-task="$cores" --no-kill --kill-on-bad-exit=0 --wait=0)
mapfile -t given < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""

CHECK_SCRIPT = """
[ -r "$run" ] || { echo "phalanx: $run is not here, $PWD: submit this from where that path starts" >&2; exit 2; }
# A mistake in the run file is not a fault of the nodes: exit with 2.
phalanx train "$run" OPTIONS --print-config --resume > /dev/null || { code=$?; [ $code -eq 1 ] || exit $code; }

# Nodes in which `phalanx doctor` finds no failure (it exits with 2 for failures), and that answer in these minutes.
mapfile -t well < <("${each[@]}" --time=MINUTES --nodes="${#given[@]}" --ntasks="${#given[@]}" \\
    bash -c 'phalanx doctor "$@" >&2; [ $? -eq 2 ] || echo "$SLURMD_NODENAME"' bash "$run" --quick OPTIONS | sort -V)
sick=$(printf '%s\\n' "${given[@]}" | grep -vxFf <(printf '%s\\n' "${well[@]}") | paste -sd,)
[ -z "$sick" ] || echo "phalanx: not well, or silent, and left out: $sick" >&2
if [ "${#well[@]}" -lt "$least" ]; then
    echo "phalanx: ${#well[@]} nodes are well, and it takes $least: see above, and submit with --exclude=$sick" >&2
    exit 1
fi
""".replace("MINUTES", str(CHECK_MINUTES))

NO_CHECK_SCRIPT = 'well=("${given[@]}")\n'

RENDEZVOUS_SCRIPT = """
# They meet at the first of them, on a port that no other job there has.
together=(--nodes "$least:${#well[@]}" --rendezvous "${well[0]}:$((20000 + SLURM_JOB_ID % 10000))")
"""

TRAIN_SCRIPT = """
# A job that was stopped is requeued if it made progress.
newest() { ls "$directory/checkpoints" 2> /dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1; }
before=$(newest)

# Slurm signals every process of a task, and this shell is to outlive `phalanx train`, whose exit code it tells: srun's
# own is the highest of all, which a node that died decides. (The script itself has no trap: `scancel` is to end it.)
codes=$("${each[@]}" --nodes="${#well[@]}" --ntasks="${#well[@]}" --nodelist="$(IFS=,; echo "${well[*]}")" \\
    bash -c 'trap : TERM; phalanx train "$@" >&2; echo $?' bash "$run" OPTIONS)
"""

EXIT_SCRIPT = f"""
case " ${{codes//$'\\n'/ }} " in
    *" 0 "*) exit 0 ;;  # the last step is reached
    *" {EXIT_STOPPED} "*)  # stopped in order, whatever ended other nodes before
        [ "$(newest)" = "$before" ] || exec scontrol requeue "$SLURM_JOB_ID"
        echo "phalanx: it was stopped before it saved anything new, and would be for ever: is --time enough?" >&2 ;;
    *" 2 "*) exit 2 ;;  # something is to be changed first: see above
esac
exit 1
"""


def slurm(job: ClusterJob, time: str | None = None, partition: str | None = None, account: str | None = None) -> str:
    """Return the batch script for Slurm.

    Args:
        job: The run and its machines.
        time: The time limit.
        partition: The Slurm partition.
        account: The Slurm account.

    Raises:
        UserError: The time limit leaves no time between the start and the last checkpoint.
    """
    if time is not None:
        require(
            parse_time_limit(time) > STARTING_SECONDS + SAVING_SECONDS,
            "--time",
            time,
            problem=f"leaves nothing to train: the first {STARTING_SECONDS // 60} minutes are for starting, the last "
            f"{SAVING_SECONDS // 60} for saving",
            fix="give more",
        )
    settings = [  # without --ntasks-per-node, with which Slurm assigns the minimum of a node range, not the maximum
        f"--job-name={job.run.name}",
        "--output=%x-%j.log",
        "--open-mode=append",
        f"--nodes={job.min_nodes}" + (f"-{job.max_nodes}" if job.max_nodes > job.min_nodes else ""),
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        f"--cpus-per-task={job.cpus}" if job.cpus else "--exclusive",
        *([f"--mem={job.memory}G"] if job.memory else [] if job.cpus else ["--mem=0"]),
        *([f"--time={time}"] if time else []),
        *([f"--partition={partition}"] if partition else []),
        *([f"--account={account}"] if account else []),
        f"--signal=TERM@{SAVING_SECONDS}",
        "--requeue",
        "--no-kill",
    ]
    directory = str(Path(job.run.output_dir).expanduser() / job.run.name)
    exports = [
        f"export {name}=${{{name}-{shlex.quote(value)}}}  # {comment}\n"
        for name, (value, comment) in job.environment(directory).items()
    ]
    is_multi_node = job.max_nodes > 1
    rendezvous_args = '"${together[@]}"' if is_multi_node else shell_join(job.rendezvous_args(""))
    return "".join(
        [
            f"#!/bin/bash\n# Written by: {job.command}\n{LEGEND}",
            *(f"#SBATCH {setting}\n" for setting in settings),
            "set -uo pipefail\n",
            f"run={shlex.quote(str(job.file))} directory={shlex.quote(directory)}\n",
            f"nproc={job.nproc} least={job.min_nodes}\n",
            *exports,
            CORES_SCRIPT,
            SRUN_SCRIPT,
            CHECK_SCRIPT.replace("OPTIONS", shell_join(job.check_args)) if job.check else NO_CHECK_SCRIPT,
            *([RENDEZVOUS_SCRIPT] if is_multi_node else []),
            TRAIN_SCRIPT.replace("OPTIONS", f"{rendezvous_args} {shell_join(job.train_args)}".strip()),
            EXIT_SCRIPT,
        ]
    )


def parse_time_limit(time: str) -> int:
    """Return the minutes of a Slurm time limit.

    Formats: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS (sbatch(1), --time).

    Raises:
        UserError: The text has another format.
    """
    match = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})", time)
    require(match is not None, "--time", time, problem="is not a time limit", fix="write HH:MM:SS, or D-HH:MM:SS")
    assert match is not None
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"]:
        hours, minutes, secs = (*parts, 0, 0)[:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + secs
    hours, minutes, secs = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return (hours * 60 + minutes) * 60 + secs
