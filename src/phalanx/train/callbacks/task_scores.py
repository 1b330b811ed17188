"""A callback that scores the model by tasks of lm-eval while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.parallel.apply import autocast_context
from phalanx.runs.metrics import MetricsRecord
from phalanx.runs.scores import add_scores
from phalanx.spec.errors import UserError
from phalanx.spec.extras import missing_package
from phalanx.train.callbacks.callback import Callback
from phalanx.train.callbacks.guards import is_due

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer


class TaskScores(Callback):
    """Scores the model by tasks of EleutherAI's lm-eval every `every` steps, and after the last one.

    The options are those of `phalanx evaluate`. Files of tasks may name Python functions, so a run file that names
    some is code: as for every callback, one that only a run directory names needs `--trust`."""

    def __init__(
        self,
        tasks: Sequence[str],
        every: int = 0,
        include_path: str | None = None,
        num_fewshot: int | None = None,
        limit: int | None = None,
        chat: bool = False,
        batch_size: int = 8,
    ) -> None:
        """Check that lm-eval is installed. Raises UserError if it is not, or for values that are no such options."""
        if isinstance(tasks, str) or not tasks:
            raise UserError("tasks", tasks, "is not a list of tasks", 'name some, such as tasks = ["hellaswag"]')
        for field, value, lowest in (
            ("every", every, 0),
            ("num_fewshot", num_fewshot, 0),
            ("limit", limit, 1),
            ("batch_size", batch_size, 1),
        ):
            if value is not None and value < lowest:
                raise UserError(field, value, f"is less than {lowest}", f"use {lowest} or more, or remove it")
        try:
            import lm_eval  # noqa: F401
        except ImportError:
            raise missing_package("tasks", tasks, "lm_eval") from None
        self.tasks = tasks
        self.every = every
        self.include_path = include_path
        self.num_fewshot = num_fewshot
        self.limit = limit
        self.chat = chat
        self.batch_size = batch_size

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether the model is scored after this step."""
        return trainer.is_complete or is_due(trainer.step, self.every)

    def on_train_start(self, trainer: Trainer) -> None:
        """Raise UserError for tasks that do not exist, and for layouts that cannot be scored."""
        from phalanx.train.lm_eval_model import check_chat, check_scored_run, find_tasks

        check_scored_run(trainer.run)
        check_chat(trainer.corpus.tokenizer, self.chat, "chat")
        find_tasks(self.tasks, self.include_path)

    def on_step_end(self, trainer: Trainer, record: MetricsRecord) -> None:
        """Score the model, and record the scores in the run directory."""
        from phalanx.train.lm_eval_model import evaluate_tasks, model_of_trainer

        with (
            trainer.record_pause("tasks"),
            trainer.evaluating(),
            autocast_context(trainer.strategy, trainer.run.training.precision, trainer.device),
        ):
            model = model_of_trainer(trainer, self.batch_size)
            results = evaluate_tasks(model, self.tasks, self.include_path, self.num_fewshot, self.limit, self.chat)
        if trainer.is_main:
            options = {"num_fewshot": self.num_fewshot, "limit": self.limit}
            scores = add_scores(trainer.directory, trainer.step, results, **options)
            values = (f"{score.task} {score.metric} {score.value:.4g}" for score in scores)
            trainer.progress.log(f"scores after step {trainer.step}: {', '.join(values)}")
