"""Paths on a shared volume, for schedulers that provide a container and such a volume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath

from phalanx.launch.jobs.job import ClusterJob
from phalanx.spec.errors import UserError, UserErrorGroup
from phalanx.spec.files.load import ENVIRONMENT_PREFIX
from phalanx.spec.log import LEVELS_VARIABLE

WORK = PurePosixPath("/work")
"""Mount point of the volume, and working directory of the job."""


def require_options(options: Mapping[str, tuple[str | None, str]]) -> list[str]:
    """Return the values of options without a default; each value comes with its description.

    Raises UserErrorGroup if some options are missing.
    """
    missing = [name for name, (value, _) in options.items() if not value]
    if missing:
        errors = [UserError(name, None, f"is required: {options[name][1]}", f"add {name}") for name in missing]
        raise UserErrorGroup(errors)
    return [value for value, _ in options.values() if value]


def job_environment(job: ClusterJob) -> dict[str, tuple[str, str]]:
    """Return variables by name, with their values and reasons.

    Raises UserError if the run directory is not on the volume.
    """
    out = WORK / job.run.output_dir
    if not out.is_relative_to(WORK) or ".." in out.parts or job.run.output_dir.startswith("~"):
        problem = f"is not on the volume, which is mounted at {WORK}: checkpoints would be lost with the machines"
        raise UserError("output_dir", job.run.output_dir, problem, 'set output_dir to a relative path such as "runs"')
    variables = job.environment(str(out / job.run.name))
    for name, text in sorted(os.environ.items()):
        if name == LEVELS_VARIABLE or (name.startswith(ENVIRONMENT_PREFIX) and "__" in name):
            variables[name] = (text, "copied from the environment of phalanx launch")
    if "cache" not in job.run.data.model_fields_set:
        reason = "one node prepares the tokens, all nodes read them"
        variables["PHALANX_DATA__CACHE"] = (str(WORK / ".cache" / "phalanx"), reason)
    if job.cpus:
        variables["OMP_NUM_THREADS"] = (str(max(1, job.cpus // job.nproc)), "cores per rank")
    return variables
