"""Work of one node in a swarm on each of its ranks: train, send an update, receive the result.

Rank 0 communicates with the coordinator, and broadcasts to the other ranks. Additional files in a node's directory:

    swarm.jsonl          bytes and seconds of each round (`runs.swarm_records`)
    base.safetensors, live.safetensors, update, down (`swarm.worker.exchange`)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import isfinite
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.data.loader import prefetch
from phalanx.data.packing import Batch
from phalanx.parallel.comm.objects import broadcast_from_rank0
from phalanx.parallel.expert.partial_experts import set_local_choice_weight
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.swarm_records import RoundRecord, format_round
from phalanx.spec.parameter_shapes import parameter_shapes
from phalanx.spec.run import RunSpec
from phalanx.swarm.coordinator.node_task import NodeTask
from phalanx.swarm.rpc.client import SwarmClient
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.worker.exchange import RoundExchange
from phalanx.swarm.worker.node_trainer import build_node_trainer
from phalanx.swarm.worker.optimizer_state import optimizer_moments, transfer_moments
from phalanx.swarm.worker.replica import blend_factors, read_weights, resident_bytes, write_weights
from phalanx.swarm.worker.round_plan import RoundPlan, plan_round, plan_steps
from phalanx.train.loggers import Logger
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData

logger = logging.getLogger(__name__)

DEADLINE_MARGIN_SECONDS = 2.0
"""Time reserved before a round closes, in addition to the duration of the last upload."""


class SwarmWorker:
    """The training of a node on one of its ranks. With several ranks, torch.distributed must be initialized."""

    def __init__(
        self,
        run: RunSpec,
        corpus: TrainingData,
        directory: Path,
        device: torch.device,
        name: str,
        link: SwarmClient | None,
    ) -> None:
        """Prepare the rank. Only rank 0 has a link to the coordinator."""
        assert run.swarm is not None
        self.run = run
        self.swarm = run.swarm
        self.corpus = corpus
        self.directory = directory
        self.device = device
        self.link = link
        self.exchange = RoundExchange(run, directory, name, link)
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
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="swarm exchange")
        self._stopped = threading.Event()

    def leave(self) -> None:
        """Leave after the present round, or at once if the coordinator is unreachable."""
        self.leaving = True
        if self.link is not None:
            self.link.leaving = True

    # -- the loop ----------------------------------------------------------------------------------------------------

    def participate(self, loggers: list[Logger], round_logger: Logger | None) -> MetricsRecord:
        """Participate until the last round is done or the node must leave, and return the last evaluation."""
        if self.link is not None:
            threading.Thread(target=self._send_heartbeats, daemon=True).start()
        try:
            task = self._wait_for(round=0)
            while task is not None and not task.done:
                # A restarted node may have already sent this round.
                if not task.already_sent:
                    record = RoundRecord(round=task.round)
                    start = time.perf_counter()
                    self._prepare_round(task, record)
                    self._run_round(task, record, loggers)
                    record.seconds = time.perf_counter() - start
                    record.held_bytes = self.state_bytes
                    if round_logger is not None:
                        round_logger.write({"step": self.trainer.step if self.trainer else 0, **vars(record)})
                        logger.info("%s", format_round(record))
                task = self._wait_for(round=task.round + 1)
            if self.trainer is None:
                return {}
            if task is not None:
                self._receive_rounds(
                    plan_round(self.exchange, task.committed, final=True), RoundRecord(round=task.round)
                )
            self.trainer.experts.start_interval()
            return self.trainer.evaluate()
        except BaseException:
            # Background threads would otherwise wait for the end of the round.
            self.leave()
            raise
        finally:
            self._stopped.set()
            self._executor.shutdown()

    def _prepare_round(self, task: NodeTask, round_record: RoundRecord) -> None:
        """Prepare the weights, the trained experts and the text of a round."""
        assert task.first_step is not None
        self.current_round = task.round
        self._set_deadline(task)
        round_record.initial_bytes = self.exchange.initial_download_bytes
        round_record.received_bytes = self.exchange.initial_download_bytes
        round_record.experts = len(task.owned)
        self.exchange.initial_download_bytes = 0
        if self.exchange.version != task.committed:
            self._receive_rounds(plan_round(self.exchange, task.committed), round_record)
        if self.trainer is None or task.owned != self.exchange.local_experts:
            self._rebuild_trainer(task.owned)
        assert self.trainer is not None
        # The file starts with zeros, because a parameter that a step does not use has no gradient.
        if self.swarm.sends_gradients:
            shapes = parameter_shapes(self.run.model)
            broadcast_from_rank0(lambda: TensorFile.create(self.exchange.local_weights, shapes).close())
        if self.batches is not None:
            self.batches.close()
        self.batches = prefetch(self.trainer.loader, task.first_step, task.first_step + task.steps)
        self.trainer.step = task.round * self.swarm.steps_per_round + self.steps_ahead

    def _rebuild_trainer(self, experts: tuple[int, ...]) -> None:
        """Build a trainer for these experts, with the optimizer state of the present one."""
        old_experts = self.exchange.local_experts
        moments = optimizer_moments(self.trainer) if self.trainer else {}
        # Two trainers would need twice the memory.
        self.trainer = None
        self.exchange.local_experts = experts
        trainer = build_node_trainer(self.exchange, self.corpus, self.device)

        def record_state_bytes(*_: object) -> None:
            self.state_bytes = resident_bytes(trainer.strategy, trainer.optimizers)

        # When the last optimizer has stepped, all gradients and moments exist.
        for last_optimizer in trainer.optimizers[-1:]:
            last_optimizer.register_step_post_hook(record_state_bytes)
        self.trainer = trainer
        transfer_moments(moments, old_experts, trainer, experts)

    def _run_round(self, task: NodeTask, round_record: RoundRecord, loggers: list[Logger]) -> None:
        """Train, send the update, and receive the result.

        With `swarm.delay`, the exchange overlaps with the first steps of the next round:

            this thread       steps of round n | write update | steps of round n+1 | wait | blend | rest of round n+1
            exchange thread                                   | upload |      | download |
            coordinator                                                | merge |
        """
        steps = plan_steps(self.run, task, self.steps_ahead)
        self._train_steps(steps.before_update, round_record, loggers, in_time=True)
        upload = self._send_update(task, round_record)
        download = None
        if steps.during_exchange and upload:
            download = self._executor.submit(self.exchange.prefetch_round, task.round, upload, round_record)
        self.steps_ahead = self._train_steps(steps.during_exchange, round_record, loggers)
        was_accepted = broadcast_from_rank0(lambda: upload.result() if upload else None)
        start = time.perf_counter()
        next_task = self._wait_for(committed=task.round + 1)
        round_record.wait_seconds += time.perf_counter() - start
        if download is not None:
            download.result()
        if next_task is not None:
            accepted_round = task.round if was_accepted else None
            self._receive_rounds(plan_round(self.exchange, next_task.committed, accepted_round), round_record)

    def _train_steps(self, steps: int, round_record: RoundRecord, loggers: list[Logger], in_time: bool = False) -> int:
        """Train for `steps` steps, or at least one to meet the deadline (`in_time`); return their number."""
        assert self.trainer is not None
        assert self.batches is not None
        trainer = self.trainer
        trainer.stop_requested = False
        trainer.stop_after_step = None
        start = time.perf_counter()
        steps_done = 0
        for _ in range(steps):
            seconds_per_step = (time.perf_counter() - start) / max(1, steps_done)
            second_step_ends = time.monotonic() + 2 * seconds_per_step
            if in_time and self.deadline is not None and second_step_ends > self.deadline:
                # All ranks receive the request in this step.
                trainer.stop_requested = True
            if self.swarm.balance.local_expert_weight < 1:
                set_local_choice_weight(trainer.module, self.swarm.balance.ratio(trainer.step, self.run.training.steps))
            targets_before = trainer.targets
            record = trainer.train_step(self.batches)
            steps_done += 1
            for metrics_logger in loggers:
                metrics_logger.write(record)
            is_skipped = self.swarm.sends_gradients and not isfinite(record["grad_norm"])
            if not is_skipped:
                round_record.tokens += trainer.targets - targets_before
            if trainer.should_stop:
                break
        round_record.steps += steps_done
        round_record.train_seconds += time.perf_counter() - start
        return steps_done

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send_update(self, task: NodeTask, round_record: RoundRecord) -> Future[bool] | None:
        """Write the update and start its upload; on rank 0 return whether the coordinator accepts it."""
        assert self.trainer is not None
        start = time.perf_counter()
        # Gradients have already been written (`replica.GradientCapture`).
        if not self.swarm.sends_gradients:
            with TensorFile(self.exchange.local_weights, writable=True) as local_file:
                experts = self.exchange.trained_experts
                write_weights(self.trainer.strategy, self.trainer.mesh, experts, self.total_experts, local_file)
        if dist.is_initialized():
            dist.barrier()
        round_record.code_seconds += time.perf_counter() - start
        if self.link is None:
            return None
        # The numbers of this moment: training continues during the upload.
        steps = round_record.steps
        tokens = round_record.tokens
        return self._executor.submit(self.exchange.send_update, task, steps, tokens, round_record)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _receive_rounds(self, plan: RoundPlan, round_record: RoundRecord) -> None:
        """Update the shared weights by the results of rounds, and blend them into the trained weights."""
        exchange = self.exchange
        old_version = exchange.version
        arguments = plan.committed, round_record, plan.accepted_round
        exchange.version = broadcast_from_rank0(lambda: exchange.catch_up(*arguments))
        if self.trainer is None:
            return
        if plan.keeps_local_experts:
            exchange.reset_expert_feedback(plan.committed - 1)
        start = time.perf_counter()
        factors = {} if plan.final else blend_factors(self.run, range(old_version, exchange.version), plan)
        adds_local_steps = plan.keeps_local_steps and self.swarm.mixing is None
        with TensorFile(exchange.base) as base, TensorFile(exchange.local_weights) as sent_file:
            sent_weights = sent_file.read if adds_local_steps else None
            strategy = self.trainer.strategy
            read_weights(strategy, exchange.trained_experts, self.total_experts, base.read, factors, sent_weights)
        round_record.code_seconds += time.perf_counter() - start

    # -- communication between ranks ---------------------------------------------------------------------------------

    def _wait_for(self, round: int | None = None, committed: int | None = None) -> NodeTask | None:
        """Wait for a round or a number of committed rounds; return the task, or None if the node leaves."""

        def poll_coordinator() -> tuple[bool, NodeTask | None]:
            assert self.link is not None
            return self.leaving, None if self.leaving else self.link.poll(round, committed)

        while True:
            leaving, task = broadcast_from_rank0(poll_coordinator)
            if leaving or task is not None:
                return None if leaving else task

    def _send_heartbeats(self) -> None:
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
