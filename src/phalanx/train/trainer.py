"""The training loop: steps and the hooks of callbacks."""

from __future__ import annotations

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
from phalanx.runs.checkpoints import step_name
from phalanx.runs.errors import CallbackError, DivergenceError
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.step_records import PauseRecord
from phalanx.spec.errors import UserError
from phalanx.spec.run import RunSpec
from phalanx.train.callbacks.callback import Callback
from phalanx.train.evaluator import evaluate
from phalanx.train.loggers import Logger
from phalanx.train.progress import ProgressDisplay
from phalanx.train.step_metrics import LaunchedStep
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
        self.launched: deque[LaunchedStep] = deque()
        """Steps whose records are not read yet."""
        self.rank_log: Logger | None = None
        """Log of this rank's records, while it trains."""

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(
        self,
        callbacks: Mapping[str, Callback],
        progress: ProgressDisplay,
        step: Callable[[Iterator[Batch]], LaunchedStep] | None = None,
    ) -> MetricsRecord:
        """Train to the last step or until a stop request, and return the last evaluation.

        Args:
            callbacks: Callbacks by name, in the order in which their hooks run.
            progress: Display of the progress.
            step: Replacement of `launch_step`.
        """
        self.callbacks = callbacks
        self.progress = progress
        for name, state in self.callback_states.items():
            if name in callbacks:
                callbacks[name].load_state_dict(state)
        step = step or self.launch_step
        batches = prefetch(self.loader, self.step, self.run.training.steps)
        try:
            self.call_hook("on_train_start")
            while not (self.is_complete or self.should_stop):
                self.launched.append(step(batches))
                self.end_steps(max_launched=0 if self.is_read_due else 1)
            self.end_steps(max_launched=0)
        except BaseException as error:
            self.call_hook("on_exception", error)
            raise
        finally:
            batches.close()
        self.finish_checkpoint()
        self.call_hook("on_train_end", self.evaluation)
        return self.evaluation

    @property
    def is_read_due(self) -> bool:
        """True if the results of the last step must be read before the next step is launched."""
        reads_weights = any(each.reads_weights and each.is_due(self) for each in self.callbacks.values())
        return not self.reads_late or reads_weights

    def end_steps(self, max_launched: int) -> None:
        """Read the results of launched steps, and call `on_step_end`, until at most `max_launched` are left.

        A callback that reads weights is called only if they are those after its step."""
        while len(self.launched) > max_launched:
            record = self.launched.popleft()()
            if not self.has_pending_saves:  # on any rank, so all ranks report after the same step
                self._report_checkpoint()
            self.call_hook("on_step_end", record)

    def call_hook(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all callbacks.

        Raises:
            CallbackError: A callback of the user raised an error, other than one that Phalanx handles.
        """
        for name, callback in self.callbacks.items():
            if hook == "on_step_end" and callback.reads_weights and self.launched:
                continue
            try:
                getattr(callback, hook)(self, *arguments)
            except (UserError, DivergenceError):
                raise
            except Exception as error:
                if name not in self.run.callbacks:
                    raise
                raise CallbackError(f"callbacks.{name}: {hook} raised {type(error).__name__}: {error}") from error

    def finish(self, reason: str) -> None:
        """Request that the run ends after the next step, as if that were its last step.

        One rank is enough. The run evaluates and saves as at its end, and records the reduced number of steps.

        Args:
            reason: The reason to print.
        """
        if self.finish_reason is None:
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
        """Wait until the last checkpoint is complete, and report it."""
        self.checkpointer.wait()
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
