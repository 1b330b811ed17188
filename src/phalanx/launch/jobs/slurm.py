"""Slurm batch script."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from phalanx.launch.jobs.job import SAVING_SECONDS, ClusterJob, shell_join
from phalanx.spec.errors import EXIT_STOPPED, UserError

CHECK_MINUTES = 5
"""Time limit in minutes for `phalanx doctor --quick`, which takes at most one unless something hangs."""
STARTING_SECONDS = 60 * (CHECK_MINUTES + 1)
"""Maximum seconds before the first step: the check, and a minute for PyTorch and a checkpoint."""
LEGEND = """\
# Submit this script with sbatch from the directory that relative paths in the run file start at. `phalanx` must be on
# the PATH. `output_dir` and `data.cache` of the run file must be on storage that all nodes share.
"""

CORES_SCRIPT = """
# The number of cores per node that Slurm has allocated; the minimum if nodes differ, as in "16(x2),8". The ranks of a
# node share the cores equally.
cores=$(sed 's/([^)]*)//g; s/,/\\n/g' <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS-$((cores > nproc ? cores / nproc : 1))}
"""

SRUN_SCRIPT = """
# One task per node. The other tasks keep running if a task or a node fails: `phalanx train` continues without it.
srun_all=(srun --cpus-per-task="$cores" --no-kill --kill-on-bad-exit=0 --wait=0)
mapfile -t allocated < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
"""

CHECK_SCRIPT = """
if [ ! -r "$run" ]; then
    echo "phalanx: cannot read $run in $PWD: submit this script from the directory where phalanx launch ran" >&2
    exit 2
fi
# An error in the run file is not a fault of the nodes: exit with 2.
phalanx train "$run" OPTIONS CONFIG > /dev/null || { code=$?; [ $code -eq 1 ] || exit $code; }

# Healthy nodes: `phalanx doctor` finishes within MINUTES minutes and does not exit with 2, the code for a failed check.
mapfile -t healthy < <("${srun_all[@]}" --time=MINUTES --nodes="${#allocated[@]}" --ntasks="${#allocated[@]}" \\
    bash -c 'phalanx doctor "$@" >&2; [ $? -eq 2 ] || echo "$SLURMD_NODENAME"' bash "$run" --quick OPTIONS | sort -V)
unhealthy=$(printf '%s\\n' "${allocated[@]}" | grep -vxFf <(printf '%s\\n' "${healthy[@]}") | paste -sd,)
[ -z "$unhealthy" ] || echo "phalanx: excluded nodes, which failed phalanx doctor or did not answer: $unhealthy" >&2
if [ "${#healthy[@]}" -lt "$min_nodes" ]; then
    echo "phalanx: healthy nodes: ${#healthy[@]}, required: $min_nodes. Submit with --exclude=$unhealthy" >&2
    exit 1
fi
""".replace("MINUTES", str(CHECK_MINUTES))

NO_CHECK_SCRIPT = 'healthy=("${allocated[@]}")\n'

RENDEZVOUS_SCRIPT = """
# The rendezvous is on the first healthy node, on a port that depends on the job, so that jobs do not share one.
rendezvous=(--nodes "$min_nodes:${#healthy[@]}" --rendezvous "${healthy[0]}:$((20000 + SLURM_JOB_ID % 10000))")
"""

TRAIN_SCRIPT = """
# A stopped job is requeued if it has saved a new checkpoint.
newest_checkpoint() { ls "$directory/checkpoints" 2> /dev/null | grep -E '^step-[0-9]+$' | sort | tail -n 1; }
first_checkpoint=$(newest_checkpoint)

# Each task prints the exit code of `phalanx train`, because srun returns only the maximum, to which a failed node
# contributes too. Slurm signals every process of a task; the trap keeps the shell alive to print the code. The script
# itself has no trap, so that `scancel` ends it.
nodelist=$(IFS=,; echo "${healthy[*]}")
codes=$("${srun_all[@]}" --nodes="${#healthy[@]}" --ntasks="${#healthy[@]}" --nodelist="$nodelist" \\
    bash -c 'trap : TERM; phalanx train "$@" >&2; echo $?' bash "$run" OPTIONS)
"""

EXIT_SCRIPT = f"""
case " ${{codes//$'\\n'/ }} " in
    *" 0 "*) exit 0 ;;  # the last step was reached
    *" {EXIT_STOPPED} "*)  # stopped by a signal after a checkpoint; other codes are of nodes that failed before
        [ "$(newest_checkpoint)" = "$first_checkpoint" ] || exec scontrol requeue "$SLURM_JOB_ID"
        echo "phalanx: not requeued: the job was stopped before it saved a new checkpoint. Increase --time" >&2 ;;
    *" 2 "*) exit 2 ;;  # an error in the run, which a restart does not fix: see above
esac
exit 1
"""


def slurm(job: ClusterJob, time: str | None = None, partition: str | None = None, account: str | None = None) -> str:
    """Return the batch script for Slurm.

    Raises UserError if the time limit leaves no time between the start and the last checkpoint.
    """
    if time is not None and parse_time_limit(time) <= STARTING_SECONDS + SAVING_SECONDS:
        last = f"the last {SAVING_SECONDS // 60} for saving a checkpoint"
        problem = f"leaves no time to train: the first {STARTING_SECONDS // 60} minutes are for starting, {last}"
        raise UserError("--time", time, problem, "increase --time")
    # Without --ntasks-per-node, with which Slurm assigns the minimum of a node range, not the maximum.
    settings = [
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
    rendezvous_args = '"${rendezvous[@]}"' if is_multi_node else shell_join(job.rendezvous_args(""))
    check = CHECK_SCRIPT.replace("CONFIG", shell_join(job.config_args)).replace("OPTIONS", shell_join(job.check_args))
    parts = [
        f"#!/bin/bash\n# Written by: {job.command}\n{LEGEND}",
        *(f"#SBATCH {setting}\n" for setting in settings),
        "set -uo pipefail\n",
        f"run={shlex.quote(str(job.file))} directory={shlex.quote(directory)}\n",
        f"nproc={job.nproc} min_nodes={job.min_nodes}\n",
        *exports,
        CORES_SCRIPT,
        SRUN_SCRIPT,
        check if job.check else NO_CHECK_SCRIPT,
        RENDEZVOUS_SCRIPT if is_multi_node else "",
        TRAIN_SCRIPT.replace("OPTIONS", f"{rendezvous_args} {shell_join(job.train_args)}".strip()),
        EXIT_SCRIPT,
    ]
    return "".join(parts)


def parse_time_limit(time: str) -> int:
    """Return the seconds of a Slurm time limit.

    Formats: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS (sbatch(1), --time). Raises UserError if the text has
    another format.
    """
    match = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})", time)
    if match is None:
        raise UserError("--time", time, "is not a valid time limit", "write HH:MM:SS or D-HH:MM:SS")
    numbers = [int(number) for number in match["rest"].split(":")]
    if match["days"]:
        hours, minutes, secs = (*numbers, 0, 0)[:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + secs
    hours, minutes, secs = numbers if len(numbers) == 3 else (0, *numbers, 0)[:3]
    return (hours * 60 + minutes) * 60 + secs
