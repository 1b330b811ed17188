"""Requirements of a run for each of its nodes, from its run file."""

from __future__ import annotations

from pathlib import Path

from phalanx.cost.exact.model_state import checkpoint_bytes, checkpoint_space_needed_bytes
from phalanx.cost.exact.rank_memory import rank_memory
from phalanx.doctor.expectations import Expectations
from phalanx.runs.checkpoints import CHECKPOINTS_DIR
from phalanx.spec.resolved_run import ResolvedRun
from phalanx.spec.run import RunSpec


def expectations_from_run(run: RunSpec, nproc: int | None = None) -> Expectations:
    """Return the known requirements of a run, without reading other files.

    The memory is known if the layout and the number of ranks are given, the number of GPUs if the device is given.
    Raises UserError if the layout cannot run on the number of ranks.
    """
    cluster = run.cluster
    # The default of `phalanx train`.
    ranks = nproc or cluster.nproc_per_node or (1 if cluster.device == "cpu" else None)
    gpus = {"cuda": ranks or 1, "cpu": 0, "auto": None}[cluster.device]
    directory = Path(run.output_dir).expanduser().absolute()
    is_open = run.auto_layout or run.layout.auto_checkpointing
    memory_per_rank = rank_memory(ResolvedRun(run, ranks * cluster.nodes)) if ranks and not is_open else {}
    return Expectations(
        directory=str(directory),
        nodes=cluster.nodes,
        gpus=gpus,
        ranks=ranks,
        rank_bytes=max((memory.device for memory in memory_per_rank.values()), default=None),
        checkpoints=str(directory / run.name / CHECKPOINTS_DIR),
        checkpoints_bytes=checkpoint_space_needed_bytes(run, existing=0),
        checkpoint_bytes=checkpoint_bytes(run),
        precision=run.training.precision,
        network_bytes_per_second=cluster.network_bytes_per_second,
    )
