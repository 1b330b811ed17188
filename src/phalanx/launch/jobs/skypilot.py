"""SkyPilot task."""

from __future__ import annotations

import json
import textwrap

from phalanx.launch.jobs.job import PORT, ClusterJob, shell_join
from phalanx.launch.jobs.volume import WORK, job_environment, require_options
from phalanx.spec.errors import EXIT_STOPPED, UserError

RUN_FILE = "~/phalanx/run.toml"

TEMPLATE = """\
# Written by: {command_line}
# Start the run with sky jobs launch FILE, in the directory where this file was written. The image must contain
# `phalanx`. Relative paths in the run file start at the root of the volume (create it with sky volumes apply).
name: {name}
num_nodes: {num_nodes}
resources:
  image_id: {image}
{resources}\
  job_recovery:
    recover_on_exit_codes: [{stopped_code}]  # stopped by a signal after a checkpoint
volumes:
  {work}: {volume}
file_mounts:
  {run_file}: {file}
{environment}\
run: |
{script}"""

RENDEZVOUS_SCRIPT = """\
# The rendezvous is on the first node.
head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
"""

CHECK_SCRIPT = """\
# An error in the run file is not a fault of the node: exit with 2.
phalanx train {run} {check_args} {config_args} > /dev/null || exit
# phalanx doctor exits with 2 for a node that must be repaired.
phalanx doctor {run} --quick {check_args}
[ $? -ne 2 ] || {{ echo "phalanx: this node failed phalanx doctor (see above)" >&2; exit 1; }}
"""


def skypilot(
    job: ClusterJob, image: str | None = None, volume: str | None = None, accelerator: str | None = None
) -> str:
    """Return the task file for SkyPilot.

    All nodes can write to `volume`; `accelerator` is SkyPilot's name of a GPU. Raises UserError if an option is
    missing, or a path is not on the volume.
    """
    required = {
        "--image": (image, "a container image that contains phalanx"),
        "--volume": (volume, "a SkyPilot volume for text and checkpoints"),
    }
    if job.gpus:
        required["--accelerator"] = (accelerator, "SkyPilot's name of the GPU (sky gpus list)")
    image, volume, *_ = require_options(required)
    if accelerator and not job.gpus:
        problem = 'cannot be combined with cluster.device = "cpu"'
        raise UserError("--accelerator", accelerator, problem, 'remove --accelerator, or set cluster.device = "cuda"')
    resources = {
        **({"accelerators": f"{accelerator}:{job.gpus}"} if job.gpus else {}),
        **({"cpus": f"{job.cpus}+"} if job.cpus else {}),
        **({"memory": f"{job.memory}+"} if job.memory else {}),
    }
    env_lines = "".join(
        f"  {key}: {json.dumps(value)}  # {comment}\n" for key, (value, comment) in job_environment(job).items()
    )
    options = shell_join(job.rendezvous_args("HEAD")).replace("HEAD", f'"$head:{PORT}"')
    script = [f"cd {WORK}\n"]
    if job.check:
        checking = shell_join(job.check_args)
        script.append(CHECK_SCRIPT.format(run=RUN_FILE, check_args=checking, config_args=shell_join(job.config_args)))
    if job.max_nodes > 1:
        script.append(RENDEZVOUS_SCRIPT)
    command = ("exec phalanx train", RUN_FILE, options, shell_join(job.train_args))
    script.append(" ".join(filter(None, command)) + "\n")
    return TEMPLATE.format(
        command_line=job.command,
        name=json.dumps(job.run.name),
        num_nodes=job.max_nodes,
        image=json.dumps(f"docker:{image}"),
        resources="".join(f"  {key}: {json.dumps(value)}\n" for key, value in resources.items()),
        stopped_code=EXIT_STOPPED,
        work=WORK,
        volume=json.dumps(volume),
        run_file=RUN_FILE,
        file=json.dumps(str(job.file)),
        environment=f"envs:\n{env_lines}" if env_lines else "",
        script=textwrap.indent("".join(script), "  "),
    )
