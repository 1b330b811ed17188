"""Process of a coordinator (`phalanx swarm serve`), from the first node to the last round."""

from __future__ import annotations

import logging
import signal
import threading
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from phalanx.model.init import DrawnWeights
from phalanx.runs.create import RUN_FILE, claim_run_directory, keep_hf_files, run_directory
from phalanx.runs.lock import acquire_run_lock
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.files.replace import replace_file
from phalanx.spec.files.write import to_toml, with_absolute_paths
from phalanx.spec.malloc_tuning import tune_malloc
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.run import RunSpec
from phalanx.swarm.coordinator.coordinator import Coordinator
from phalanx.swarm.pieces import ModelPiece
from phalanx.swarm.rpc.server import serve
from phalanx.swarm.update_files import Weights
from phalanx.train.training_data import initial_weights

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
RETRY_SECONDS = 5.0
TRIM_THRESHOLD_BYTES = 2**26
MMAP_THRESHOLD_BYTES = 2**24
"""Limits of malloc: memory that remains allocated, and sizes allocated outside of it.

Both are more than the RPC server, or a piece of most models, needs.
"""


def swarm_directory(run: RunSpec) -> Path:
    """Write the run file to a swarm's directory, and return the directory.

    Raises UserError if the directory contains another run, or is not writable.
    """
    directory = run_directory(run)
    file = directory / RUN_FILE
    text = to_toml(with_absolute_paths(run))
    if file.exists() and load_run(file, environment={}) != with_absolute_paths(run):
        fix = "continue that run unchanged, or choose another name"
        raise UserError("name", run.name, f"belongs to another run, in {directory}", fix)
    claim_run_directory(directory)
    try:
        if not file.exists():
            keep_hf_files(run, directory)
        replace_file(file, text)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise UserError("output_dir", str(directory), problem, "set output_dir to another directory") from None
    return directory


def initial_pieces(run: RunSpec) -> Weights:
    """Return the initial weights of the model, as a function of the piece."""
    shapes = parameter_shapes(run.model)
    draw = initial_weights(run) or DrawnWeights(run.model, run.training.seed)

    @lru_cache(maxsize=1)
    def full_weight(name: str) -> Tensor:
        return draw(name, torch.Size(shapes[name]))

    def piece_weight(piece: ModelPiece) -> Tensor:
        if piece.first_row is not None:
            return full_weight(piece.name)[piece.first_row : piece.first_row + piece.shape[0]]
        return full_weight(piece.name) if piece.expert is None else full_weight(piece.name)[piece.expert]

    return piece_weight


def serve_swarm(run: RunSpec, address: str, certificates: Path) -> int:
    """Serve nodes until all rounds are done and nodes have left, or until a signal; return the exit code."""
    # Each thread that serves a node would retain freed memory, and pieces leave gaps: up to two models.
    tune_malloc(TRIM_THRESHOLD_BYTES, mmap_threshold_bytes=MMAP_THRESHOLD_BYTES, max_arenas=1)
    directory = swarm_directory(run)
    lock = acquire_run_lock(directory)
    coordinator = Coordinator(run, directory, initial_pieces(run))
    server, port = serve(coordinator, address, certificates, greeting={"run": to_toml(run)})
    stop = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop.set())
    host = address.rpartition(":")[0]
    logger.info("%s: %d rounds; nodes join %s:%d", run.name, coordinator.state.rounds, host, port)
    run_rounds(coordinator, stop)
    coordinator.shutdown()
    server.stop(grace=1.0).wait()
    if coordinator.state.done:
        logger.info("all rounds are done; run phalanx generate %s or phalanx export %s", directory, directory)
    else:
        logger.info("stopped; the same command continues with the same round")
    coordinator.journal.close()
    if lock is not None:
        lock.close()
    return 0


def run_rounds(coordinator: Coordinator, stop: threading.Event) -> None:
    """Open and close rounds until all are done and nodes have left, or until `stop` is set.

    No error ends the swarm, because nodes may have trained for days: a full disk is cleaned up, and a damaged file is
    restored from a copy.
    """
    reported_rounds = -1
    reported_problem = ""
    while not stop.wait(TICK_SECONDS):
        try:
            coordinator.tick()
            coordinator.problems["rounds"] = ""
        except Exception as error:
            coordinator.problems["rounds"] = f"a round cannot be opened or closed: {error!r}"
        if coordinator.problem != reported_problem:
            reported_problem = coordinator.problem
            if reported_problem:
                logger.warning("%s", reported_problem)
            else:
                logger.info("the problem is solved")
        if coordinator.state.committed > reported_rounds:
            reported_rounds = coordinator.state.committed
            logger.info("%s", _format_status(coordinator))
        if coordinator.problems["rounds"]:
            stop.wait(RETRY_SECONDS)
            coordinator.ticked_at = coordinator.clock()
        elif coordinator.state.done and not coordinator.state.members:
            return


def _format_status(coordinator: Coordinator) -> str:
    """Return the progress in a line."""
    status = coordinator.status()
    names = ", ".join(node["node"] for node in status["nodes"])
    waiting_text = f"; waiting for {status['waits_for']}" if status["waits_for"] else ""
    return f"round {status['round']} of {status['rounds']}: {names or 'no nodes'}{waiting_text}"
