"""The training loop: steps and the hooks of callbacks."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from phalanx.data.loader import prefetch
from phalanx.data.packing import Batch
from phalanx.parallel.expert.partial_experts import TrainedExperts
from phalanx.runs.checkpoints import step_name, step_of
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.step_records import PauseRecord
from phalanx.spec.run import RunSpec
from phalanx.train.callbacks.callback import Callback
from phalanx.train.evaluator import evaluate
from phalanx.train.loggers import Logger
from phalanx.train.progress import ProgressDisplay
from phalanx.train.step_metrics import ReadRecord
from phalanx.train.step_runner import StepRunner
from phalanx.train.training_data import TrainingData


class Trainer(StepRunner):
    """A run on this rank: the loop around its steps, with the hooks of callbacks.

    torch.distributed must be initialized if there are several ranks."""

    def __init__(
        self,
        run: RunSpec,
        corpus: TrainingData,
        directory: Path,
        device: torch.device,
        peak_flops: float | None = None,
        trained_experts: TrainedExperts | None = None,
    ) -> None:
        super().__init__(run, corpus, directory, device, peak_flops=peak_flops, trained_experts=trained_experts)
        self.evaluation: MetricsRecord = {}
        """Record of the last evaluation."""
        self.unreported_checkpoint: Path | None = None
        """Directory of the checkpoint that is being saved."""
        self.launched: deque[ReadRecord] = deque()
        """Steps whose records are not read yet."""
        self.profiles_next_step = False
        """True if the next step is profiled, before which all records are read."""
        self.rank_log: Logger | None = None
        """Log of this rank's records, while it trains."""

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(
        self,
        callbacks: Mapping[str, Callback],
        progress: ProgressDisplay,
        step: Callable[[Iterator[Batch]], ReadRecord] | None = None,
    ) -> MetricsRecord:
        """Train to the last step or until a stop request, and return the last evaluation.

        Args:
            callbacks: Callbacks by name, in the order in which their hooks run.
            progress: Display of the progress.
            step: Replacement of `launch_step`.
        """
        self.callbacks = callbacks
        self.progress = progress
        step = step or self.launch_step
        batches = prefetch(self.loader, self.step, self.run.training.steps)
        try:
            self._load_callback_states()
            self.call_hook("on_train_start")
            while not (self.is_complete or self.should_stop):
                self.launched.append(step(batches))
                self.read_launched(keep=0 if self.must_read_before_next_launch else 1)
            self.read_launched(keep=0)
            self.finish_checkpoint()
            self.call_hook("on_train_end", self.evaluation)
        except BaseException as error:
            self._report_exception(error)
            raise
        finally:
            batches.close()
        return self.evaluation

    @property
    def must_read_before_next_launch(self) -> bool:
        """True if the record of the last step is read, and callbacks run, before another step changes weights."""
        if self.profiles_next_step or not self.reads_late:
            return True
        readers = {name: each for name, each in self.callbacks.items() if each.reads_weights}
        return any(self._call(name, each.is_due, self) for name, each in readers.items())

    def read_launched(self, keep: int) -> None:
        """Read the records of launched steps, and call `on_step_end`, until `keep` steps are left.

        A callback that reads weights is called if it is due, and no other step has been launched since."""
        while len(self.launched) > keep:
            record = self.launched.popleft()()
            self._report_checkpoint_before(record["step"])
            for name, callback in self.callbacks.items():
                if not callback.reads_weights or (not self.launched and self._call(name, callback.is_due, self)):
                    if callback.reads_weights:
                        self.strategy.wait_for_weights()
                    self._call(name, callback.on_step_end, self, record)

    def call_hook(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks; raises CallbackError if one of the user's fails."""
        self.strategy.wait_for_weights()
        for name, callback in self.callbacks.items():
            self._call(name, getattr(callback, hook), self, *arguments)

    def _load_callback_states(self) -> None:
        """Restore the states of callbacks in the checkpoint."""
        for name, state in self.callback_states.items():
            if name in self.callbacks:
                self._call(name, self.callbacks[name].load_state_dict, state)

    def _report_exception(self, error: BaseException) -> None:
        """Call `on_exception` of all callbacks. Errors in them are printed: they must not hide the first one."""
        for name, callback in self.callbacks.items():
            try:
                callback.on_exception(self, error)
            except Exception as second:
                text = f"{name}: on_exception raised {type(second).__name__}: {second}"
                print(f"phalanx: rank {self.mesh.rank}: {text}", file=sys.stderr)

    def finish(self, reason: str) -> None:
        """Request that the run ends soon, as if a step were its last: the next one, or on a GPU up to two later.

        One rank is enough. The run evaluates and saves as at its end, and records the reduced number of steps.

        Args:
            reason: The reason, which rank 0 prints if it is one of the ranks.
        """
        if self.finish_reason is None and not self.is_complete:
            self.progress.log(f"step {self.step}: finishing the run after the next step: {reason}")
        self.finish_reason = reason

    # -- evaluation and saving ---------------------------------------------------------------------------------------

    def evaluate(self) -> MetricsRecord:
        """Return the loss on the held-out text, and the expert counts of the last interval."""
        return evaluate(self, self.micro_batches)

    def start_checkpoint(self) -> None:
        """Start a checkpoint of this step. The previous one is complete then, and reported first."""
        self.save()
        self._report_checkpoint()
        self.unreported_checkpoint = self.checkpointer.directory / step_name(self.step)

    def finish_checkpoint(self) -> None:
        """Wait until all ranks have completed the last checkpoint, and report it."""
        self.checkpointer.wait_for_all_ranks()
        self._report_checkpoint()

    def _report_checkpoint_before(self, step: int) -> None:
        """Report the last checkpoint if the sums of a later step, equal on all ranks, have no pending save.

        An asynchronous worker may receive older sums after the save."""
        directory = self.unreported_checkpoint
        if directory is not None and step > step_of(directory) and not self.has_pending_saves:
            self._report_checkpoint()

    def _report_checkpoint(self) -> None:
        """Call `on_checkpoint_saved` for the checkpoint that all ranks have completed, unless that was done."""
        directory = self.unreported_checkpoint
        if directory is not None:
            self.unreported_checkpoint = None
            self.call_hook("on_checkpoint_saved", directory)

    @contextmanager
    def record_pause(self, pause: str) -> Iterator[None]:
        """Record the time of work between steps.

        Args:
            pause: Name of the work.
        """
        started_at = time.perf_counter()
        yield
        if self.rank_log is not None:
            record: PauseRecord = {
                "step": self.step,
                "pause": pause,
                "start": started_at,
                "seconds": time.perf_counter() - started_at,
            }
            self.rank_log.write(dict(record))
