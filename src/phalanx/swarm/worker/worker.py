"""Work of one node in a swarm on each of its ranks: train, send an update, receive the result.

Rank 0 communicates with the coordinator, and broadcasts to the other ranks. Additional files in a node's directory:

    swarm.jsonl          bytes and seconds of each round (`runs.swarm_records`)
    base.safetensors, live.safetensors, update, down (`swarm.worker.exchange`)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import isfinite
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.cost.exact.parameter_shapes import parameter_shapes
from phalanx.data.loader import prefetch
from phalanx.data.packing import Batch
from phalanx.parallel.comm.objects import broadcast_from_rank0
from phalanx.parallel.expert.partial_experts import set_local_choice_weight
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.swarm_records import RoundRecord
from phalanx.spec.run import RunSpec
from phalanx.swarm.coordinator.node_task import NodeTask
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.worker.exchange import RoundExchange
from phalanx.swarm.worker.node_trainer import build_node_trainer
from phalanx.swarm.worker.optimizer_state import optimizer_moments, transfer_moments
from phalanx.swarm.worker.replica import blend_factors, read_weights, resident_bytes, write_weights
from phalanx.train.loggers import Logger
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData

DEADLINE_MARGIN_SECONDS = 2.0
"""Time reserved before a round closes, in addition to the duration of the last upload."""


class SwarmWorker:
    """A rank of a node. With several ranks, torch.distributed must be initialized."""

    def __init__(
        self,
        run: RunSpec,
        corpus: TrainingData,
        directory: Path,
        device: torch.device,
        name: str,
        link: SwarmClient | None,
    ) -> None:
        """Prepare the rank.

        Args:
            run: The run.
            corpus: The text of the node.
            directory: Directory of the node.
            device: Device of the rank.
            name: Name of the node in the swarm.
            link: Connection to the coordinator; None on ranks other than 0.
        """
        assert run.swarm is not None
        self.run = run
        self.swarm = run.swarm
        self.corpus = corpus
        self.directory = directory
        self.device = device
        self.link = link
        self.exchange = RoundExchange(run, directory, name, link=link)
        self.total_experts = run.model.moe.num_experts if run.model.moe else 0
        self.trainer: Trainer | None = None
        self.batches: Generator[Batch] | None = None
        """Batches of the round's steps."""
        self.steps_ahead = 0
        """Number of steps of the next round that are already done."""
        self.state_bytes = 0
        """Resident state at the last optimizer step."""
        self.current_round = -1
        """The round that the node is in."""
        self.deadline: float | None = None
        """Deadline of the round's steps by time.monotonic(), on rank 0."""
        self.leaving = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="telling")
        self._stopped = threading.Event()

    def leave(self) -> None:
        """Leave after the present round, or at once if the coordinator is unreachable."""
        self.leaving = True
        if self.link is not None:
            self.link.leaving = True

    # -- the loop ----------------------------------------------------------------------------------------------------

    def participate(
        self, loggers: list[Logger], round_logger: Logger | None, log: Callable[[str], None]
    ) -> MetricsRecord:
        """Participate until the last round is done or the node must leave, and return the last evaluation.

        Args:
            loggers: Loggers of steps.
            round_logger: Logger of rounds, on rank 0.
            log: Prints a line about each round.
        """
        heartbeat = threading.Thread(target=self._heartbeat_loop, daemon=True) if self.link else None
        if heartbeat:
            heartbeat.start()
        try:
            task = self._wait_for(round=0)
            while task is not None and not task.done:
                if not task.already_sent:  # otherwise a restarted node has already sent this round
                    round_record = RoundRecord(task.round)
                    start = time.perf_counter()
                    self._prepare(task, round_record)
                    self._run_round(task, round_record, loggers)
                    round_record.seconds = time.perf_counter() - start
                    round_record.held_bytes = self.state_bytes
                    if round_logger is not None:
                        round_logger.write({"step": self.trainer.step if self.trainer else 0, **vars(round_record)})
                        log(_format_round(round_record))
                task = self._wait_for(round=task.round + 1)
            if self.trainer is None:
                return {}
            if task is not None:
                self._catch_up(task.committed, RoundRecord(task.round), is_final=True)
            self.trainer.experts.start_interval()
            return self.trainer.evaluate()
        except BaseException:
            self.leave()  # otherwise background threads would wait for the round's end
            raise
        finally:
            self._stopped.set()
            self._executor.shutdown()

    def _prepare(self, task: NodeTask, round_record: RoundRecord) -> None:
        """Prepare the weights, the trained experts and the text of a round."""
        self.current_round = task.round
        self._set_deadline(task)
        round_record.whole_bytes = self.exchange.initial_download_bytes
        round_record.received_bytes = self.exchange.initial_download_bytes
        self.exchange.initial_download_bytes = 0
        if self.exchange.version != task.committed:
            self._catch_up(task.committed, round_record)
        if self.trainer is None or task.owned != self.exchange.local_experts:
            moments = optimizer_moments(self.trainer) if self.trainer else {}
            old_experts = self.exchange.local_experts
            self.trainer = None
            self.exchange.local_experts = task.owned  # two trainers would need twice the memory
            self.trainer = self._build_trainer()
            transfer_moments(moments, old_experts, self.trainer, new_experts=task.owned)
        round_record.experts = len(task.owned)
        if self.swarm.sends_gradients:  # a parameter that a step does not use has no gradient
            broadcast_from_rank0(
                lambda: TensorFile.create(self.exchange.local_weights, parameter_shapes(self.run.model)).close()
            )
        assert task.first_step is not None
        if self.batches is not None:
            self.batches.close()
        self.batches = prefetch(self.trainer.loader, task.first_step, task.first_step + task.steps)
        self.trainer.step = task.round * self.swarm.steps_per_round + self.steps_ahead

    def _run_round(self, task: NodeTask, round_record: RoundRecord, loggers: list[Logger]) -> None:
        """Train, send the update, and receive the result."""
        is_last_round = (task.round + 1) * self.swarm.steps_per_round >= self.run.training.steps
        steps = self.swarm.steps_per_round - self.steps_ahead
        self._train_steps(steps, round_record, loggers, in_time=True)
        upload = self._send_update(task, round_record)
        # a node in its first round has more text
        extra_steps = 0 if is_last_round else min(self.swarm.delay, task.steps - steps)
        download = (
            self._executor.submit(self.exchange.prefetch_round, task.round, upload, round_record)
            if extra_steps and upload
            else None
        )
        self.steps_ahead = self._train_steps(extra_steps, round_record, loggers)
        accepted = broadcast_from_rank0(lambda: upload.result() if upload else None)
        start = time.perf_counter()
        next_task = self._wait_for(committed=task.round + 1)
        round_record.wait_seconds += time.perf_counter() - start
        if download is not None:
            download.result()
        if next_task is not None:
            self._catch_up(next_task.committed, round_record, task.round if accepted else None)

    def _train_steps(self, steps: int, round_record: RoundRecord, loggers: list[Logger], in_time: bool = False) -> int:
        """Train for `steps` steps, or at least one to meet the deadline (`in_time`); return their number."""
        assert self.trainer is not None
        assert self.batches is not None
        trainer = self.trainer
        start = time.perf_counter()
        steps_before = round_record.steps
        trainer.stop_requested = False
        trainer.stop_after_step = None
        for _ in range(steps):
            step_seconds = (time.perf_counter() - start) / max(1, round_record.steps - steps_before)
            tokens = trainer.tokens
            if in_time and self.deadline is not None and time.monotonic() + 2 * step_seconds > self.deadline:
                trainer.stop_requested = True  # all ranks receive the request in this step
            if self.swarm.balance.local_expert_weight < 1:
                set_local_choice_weight(trainer.module, self.swarm.balance.ratio(trainer.step, self.run.training.steps))
            record = trainer.train_step(self.batches)
            for logger in loggers:
                logger.write(record)
            is_skipped = self.swarm.sends_gradients and not isfinite(record["grad_norm"])
            learned_tokens = 0 if is_skipped else trainer.tokens - tokens
            round_record.steps, round_record.tokens = round_record.steps + 1, round_record.tokens + learned_tokens
            if trainer.should_stop:
                break
        round_record.train_seconds += time.perf_counter() - start
        return round_record.steps - steps_before

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send_update(self, task: NodeTask, round_record: RoundRecord) -> Future[bool] | None:
        """Write the update and start its upload; on rank 0 return whether the coordinator accepts it."""
        assert self.trainer is not None
        start = time.perf_counter()
        if not self.swarm.sends_gradients:  # gradients are already written (`replica.GradientCapture`)
            with TensorFile(self.exchange.local_weights, writable=True) as local_file:
                write_weights(
                    self.trainer.strategy,
                    self.trainer.mesh,
                    self.exchange.trained_experts,
                    num_experts=self.total_experts,
                    file=local_file,
                )
        if dist.is_initialized():
            dist.barrier()
        round_record.code_seconds += time.perf_counter() - start
        steps = round_record.steps
        tokens = round_record.tokens
        return (
            self._executor.submit(self.exchange.send_update, task, steps, tokens, round_record) if self.link else None
        )

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _catch_up(
        self, committed: int, round_record: RoundRecord, accepted_round: int | None = None, is_final: bool = False
    ) -> None:
        """Update the shared weights to `committed` rounds, and continue from them.

        With `is_final`, no local changes remain. `accepted_round` is the last round that accepted this node's update.
        """
        exchange = self.exchange
        old_version = exchange.version
        blends = self.swarm.delay > 0 and accepted_round == exchange.version == committed - 1
        exchange.version = broadcast_from_rank0(lambda: exchange.catch_up(committed, round_record, accepted_round))
        if self.trainer is None:
            return
        adds_local_change = blends and self.swarm.mixing is None and not is_final
        keeps_local_experts = accepted_round is not None and blends and exchange.local_experts_are_final(accepted_round)
        if keeps_local_experts:  # the encoding error of these is still in the weights
            for piece in exchange.local_expert_pieces(committed - 1):
                exchange.feedback.pop(piece.key, None)
        updated_rounds = range(old_version, exchange.version)
        start = time.perf_counter()
        factors = {}
        if not is_final:
            factors = blend_factors(self.run, updated_rounds, blends, keeps_local_experts=keeps_local_experts)
        with TensorFile(exchange.base) as base, TensorFile(exchange.local_weights) as local_file:
            sent_weights = local_file.read if adds_local_change else None
            read_weights(
                self.trainer.strategy,
                self.exchange.trained_experts,
                self.total_experts,
                weights=base.read,
                blend_factors=factors,
                sent_weights=sent_weights,
            )
        round_record.code_seconds += time.perf_counter() - start

    # -- communication between ranks ---------------------------------------------------------------------------------

    def _wait_for(self, round: int | None = None, committed: int | None = None) -> NodeTask | None:
        """Wait for a round or a number of committed rounds; return the task, or None if the node leaves."""
        while True:
            leaving, task = broadcast_from_rank0(lambda: self._poll_coordinator(round, committed))
            if leaving or task is not None:
                return None if leaving else task

    def _poll_coordinator(self, round: int | None, committed: int | None) -> tuple[bool, NodeTask | None]:
        assert self.link is not None
        return self.leaving, None if self.leaving else self.link.poll(round, committed)

    def _heartbeat_loop(self) -> None:
        """Send heartbeats periodically."""
        assert self.link is not None
        while not self._stopped.wait(min(5.0, self.swarm.round.lease_seconds / 6)):
            with suppress(Exception):
                self._set_deadline(self.link.heartbeat())

    def _set_deadline(self, task: NodeTask) -> None:
        """Set the deadline of the round's steps, if the task is of this round."""
        if task.round != self.current_round:
            return
        closes_in_seconds = None if task.already_sent or self.link is None else task.closes_in_seconds
        margin = self.exchange.upload_seconds + DEADLINE_MARGIN_SECONDS
        self.deadline = None if closes_in_seconds is None else time.monotonic() + closes_in_seconds - margin

    def _build_trainer(self) -> Trainer:
        trainer = build_node_trainer(self.exchange, self.corpus, self.device)

        def record_state_bytes(*_: object) -> None:
            self.state_bytes = resident_bytes(trainer.strategy, trainer.optimizers)

        for last_optimizer in trainer.optimizers[-1:]:  # at this point gradients and moments exist
            last_optimizer.register_step_post_hook(record_state_bytes)
        return trainer


def _format_round(round_record: RoundRecord) -> str:
    """Return a round in a line."""
    megabytes = f"{round_record.sent_bytes / 1e6:.3g} MB up, {round_record.received_bytes / 1e6:.3g} MB down"
    train_share = round_record.train_seconds / round_record.seconds if round_record.seconds else 0.0
    refused = f"; refused: {round_record.refused}" if round_record.refused else ""
    train_text = f"{train_share:.0%} of {round_record.seconds:.3g} s training"
    return f"round {round_record.round}: {round_record.steps} steps, {megabytes}, {train_text}{refused}"
