"""Processes of a node (`phalanx swarm join`).

The first process gets the run from the coordinator, prepares the text, and starts the ranks:
`torchrun -m phalanx.swarm.join DIR`.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch

from phalanx.cost.exact.swarm import node_share, state_bytes
from phalanx.data.prepare import PreparedData
from phalanx.launch.elastic_agent import launch_ranks
from phalanx.launch.failures import report_and_exit_code
from phalanx.launch.process import exit_rank, keep_freed_memory, select_device, select_nproc, set_worker_environment
from phalanx.launch.warm_process import start_warm_process
from phalanx.parallel.comm.device_memory import device_memory_bytes
from phalanx.runs.checkpoints import sha256
from phalanx.runs.create import claim_run_directory, read_run_directory
from phalanx.runs.lock import check_not_running
from phalanx.runs.metrics import METRICS_FILE
from phalanx.runs.swarm_records import (
    LINK_FILE,
    LOCAL_WEIGHTS_FILE,
    SHARED_WEIGHTS_FILE,
    SWARM_RUN_FILE,
    JoinMessage,
    LinkRecord,
)
from phalanx.spec.errors import UserError
from phalanx.spec.files.load import load_run
from phalanx.spec.files.replace import replace_file
from phalanx.spec.formatting import plural
from phalanx.spec.log import log_to_stderr
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import RunSpec
from phalanx.spec.swarm import EXPERT_SPLIT_METHODS, SwarmSpec
from phalanx.swarm.coordinator.update_checks import UpdateRejected
from phalanx.swarm.rpc.certificates import certificate_member
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.rpc.link_errors import rejection_error
from phalanx.swarm.worker.exchange import RoundExchange
from phalanx.swarm.worker.node_rank import NodeRank
from phalanx.train.create_run import create_run

logger = logging.getLogger(__name__)


def join_swarm(address: str, certificates: Path, nproc: int | None, out: Path, overrides: Sequence[str]) -> int:
    """Join a swarm with local ranks, and return the exit code.

    `out` is the folder for the node's directory, `overrides` are its settings (`--set`). Without `nproc`, ranks are
    those of the run. Raises UserError if the coordinator cannot be reached or has another version, the memory is too
    small, or the text differs; nothing has been received by then.
    """
    name = certificate_member(certificates)
    directory = out / name
    # Fork the warm process before the link starts threads.
    warm_process = start_warm_process() if nproc != 1 else None
    link = SwarmClient(address, certificates)
    try:
        run = _receive_run(link, out, name, overrides)
        ranks = select_nproc(run, nproc)
        join_message = _prepare_node(run, ranks, directory)
        link.join(**join_message, begin=False)
        # The node receives the weights before it is a member, because that may take long.
        logger.info("%s receives the weights from %s", name, address)
        version = RoundExchange(run, directory, name, link).download_model()
    except UpdateRejected as refused:
        raise rejection_error(address, refused) from None
    finally:
        link.close()
    link_record: LinkRecord = {
        "address": address,
        "certificates": str(certificates.resolve()),
        "node": name,
        "place": join_message,
        "version": version,
        "received_bytes": link.received_bytes,
    }
    replace_file(directory / LINK_FILE, json.dumps(link_record))
    assert run.swarm is not None
    described = f"{run.swarm.method}, {plural(ranks, 'rank', one='one')}"
    logger.info("%s joined %s: %s, in %s", name, address, described, directory)
    # A single rank runs in this process.
    if ranks == 1:
        if warm_process is not None:
            warm_process.close()
        keep_freed_memory()
        exit_rank(rank_main(directory))
    set_worker_environment(ranks)
    report = partial(report_and_exit_code, directory)
    return launch_ranks(ranks, ("phalanx.swarm.join", str(directory)), report, warm_process)


def _receive_run(link: SwarmClient, out: Path, name: str, overrides: Sequence[str]) -> RunSpec:
    """Receive the run into the node's directory, and return it with the settings of the node."""
    greeting = link.join()
    directory = out / name
    check_not_running(directory)
    claim_run_directory(directory)
    file = directory / SWARM_RUN_FILE
    replace_file(file, greeting["run"])
    local_overrides = [f"output_dir={json.dumps(str(out.resolve()))}", f"name={json.dumps(name)}"]
    # Weights come from the coordinator; the path exists only there.
    cleared_overrides = ["model.from_hf=", "model.upcycle_reinit_fraction="]
    run = load_run(file, [*local_overrides, *cleared_overrides, *overrides])
    if run.swarm is None:
        raise UserError("swarm", None, "is missing in the coordinator's run", "join another coordinator")
    # The node's settings must not change the training.
    coordinator_run = load_run(file, cleared_overrides)
    training_fields = "training.tokens_per_step", "training.seq_len", "training.steps", "training.seed"
    fields = "model", "optimizer", "swarm", *training_fields
    differing = [field for field in fields if attrgetter(field)(run) != attrgetter(field)(coordinator_run)]
    if differing:
        fix = "remove it; a node sets only its layout, data, cluster and logging"
        raise UserError("--set", differing[0], "is set by the coordinator", fix)
    return run


def _prepare_node(run: RunSpec, ranks: int, directory: Path) -> JoinMessage:
    """Prepare the text and the node's directory, and return the message with which the node joins."""
    assert run.swarm is not None
    memory_bytes = rank_memory_bytes(run, select_device(run))
    capacity = max_trained_experts(run.model, run.swarm, memory_bytes, run.layout.tp * run.layout.ep)
    for stale_file in (SHARED_WEIGHTS_FILE, LOCAL_WEIGHTS_FILE, METRICS_FILE):
        (directory / stale_file).unlink(missing_ok=True)
    create_run(run, ranks, resume=False)
    return {"capacity": capacity, "text": data_fingerprint(read_run_directory(directory)[1])}


def max_trained_experts(model: ModelSpec, swarm: SwarmSpec, memory_bytes: float, model_parallel_size: int = 1) -> int:
    """Return how many experts of each layer a node has memory to train; 1 if nodes train all.

    Activations are not counted. `model_parallel_size` is the number of ranks that share an expert. Raises UserError if
    the memory is too small for one expert.
    """
    experts = model.moe.num_experts if model.moe is not None and swarm.method in EXPERT_SPLIT_METHODS else 0
    state_sizes = [
        state_bytes(node_share(model, swarm.method, num_experts), swarm.frozen_expert_codec)
        for num_experts in range(experts + 1)
    ]
    rank_sizes = [state_sizes[0] + (size - state_sizes[0]) / model_parallel_size for size in state_sizes]
    num_fitting = sum(size <= memory_bytes for size in rank_sizes) - 1
    if num_fitting < min(1, experts):
        min_gb = rank_sizes[min(1, experts)] / 1e9
        problem = f"is less than the {min_gb:.2f} GB that the state of a node needs"
        other_method = "or another swarm.method: spes needs less memory than diloco"
        fix = f'use a machine with more memory, or swarm.frozen_expert_codec = "int8", {other_method}'
        raise UserError("memory", f"{memory_bytes / 1e9:.2f} GB", problem, fix)
    return max(1, num_fitting)


def rank_memory_bytes(run: RunSpec, device: str) -> float:
    """Return the memory of one rank's device, from the run file or as measured."""
    return float(run.cluster.memory_bytes or device_memory_bytes(torch.device(device)))


def data_fingerprint(data: PreparedData) -> str:
    """Return a checksum of the tokens' index and of the tokenizer, which identifies the text."""
    return "-".join(sha256(Path(file))[:16] for file in (f"{data.train}.idx", data.tokenizer))


def rank_main(directory: Path) -> int:
    """Participate on this rank, and return the exit code."""
    rank = NodeRank(directory)
    try:
        rank.run()
    except BaseException as error:
        return rank.fail(error)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser("phalanx.swarm.join", description="Take part in a swarm on this rank.")
    parser.add_argument("directory", type=Path, help="the node's directory, which phalanx swarm join creates")
    log_to_stderr()
    exit_rank(rank_main(parser.parse_args().directory))
