"""Scores by EleutherAI's lm-eval of a model as it is trained: in one process, or in the ranks of a layout.

All ranks run the same tasks and call the model in the same order. Ranks that have a replica or shards of the data
parallelism score different rows, and exchange the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lm_eval
import torch
import torch.distributed as dist
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from torch import nn

from phalanx.data.chat_template import ConversationError
from phalanx.data.tokenizer import Tokenizer
from phalanx.model.generation import Predictor, stream_tokens
from phalanx.model.sampling import Sampling
from phalanx.parallel.comm.objects import all_gather_objects
from phalanx.parallel.inference import SharedModel
from phalanx.parallel.mesh import Mesh
from phalanx.spec.base import did_you_mean
from phalanx.spec.errors import UserError
from phalanx.spec.layout import Layout
from phalanx.spec.run import RunSpec
from phalanx.train.checkpoint.load_in_ranks import load_in_ranks
from phalanx.train.checkpoint.load_model import TrainedWeights

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

FEWSHOT_SEED = 1234
"""Seed of the examples before questions, as lm-eval has it by default."""


class LmEvalModel(TemplateLM):  # type: ignore[misc]
    """A model of Phalanx for lm-eval."""

    def __init__(
        self,
        predictor: Predictor,
        tokenizer: Tokenizer,
        context: int,
        batch_size: int = 8,
        device: torch.device | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        """Score and generate with a predictor of texts of at most `context` tokens."""
        super().__init__()
        self.predictor = predictor
        self.own_tokenizer = tokenizer
        self.context = context
        self.batch_size = batch_size
        self.on_device = device or torch.device("cpu")
        self.dp_rank = dp_rank
        self.dp_size = dp_size

    @property
    def eot_token_id(self) -> int:
        """Id of the end token."""
        return self.own_tokenizer.end

    @property
    def max_length(self) -> int:
        """Tokens that the model sees."""
        return self.context

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for caches of requests."""
        return self.own_tokenizer.fingerprint()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Return the ids of a text, in which special tokens are tokens, as in transformers."""
        ((ids, _),) = self.own_tokenizer.encode_with_offsets([string], has_special=True)
        return [int(token) for token in ids]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template of the tokenizer, for the records of lm-eval."""
        return self.own_tokenizer.chat.source if chat_template and self.own_tokenizer.chat else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation by the tokenizer's template."""
        assert self.own_tokenizer.chat is not None
        try:
            return self.own_tokenizer.chat.render(chat_history, add_generation_prompt=add_generation_prompt)
        except ConversationError as error:
            raise UserError("--chat", None, f"cannot be used: a question {error}", "remove --chat") from None

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the most likely one.

        Of a long context the end counts, as in lm-eval's own model of transformers."""
        rows = [
            ((given + continuation)[-(self.context + 1) :], min(len(continuation), self.context))
            for _, given, continuation in requests
        ]
        return self._score(rows)

    def _score(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Return the score of the last `count` tokens of each row of (tokens, count)."""
        longest_first = sorted(range(len(rows)), key=lambda number: -len(rows[number][0]))
        batches = [longest_first[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        scores: dict[int, tuple[float, bool]] = {}
        # Every rank runs equally many batches, because ranks with shards of the weights gather them together.
        for round_start in range(0, len(batches), self.dp_size):
            own = min(round_start + self.dp_rank, len(batches) - 1)
            scores |= self._score_batch(rows, batches[own])
        for others in all_gather_objects(scores) if self.dp_size > 1 else ():
            scores |= others
        return [scores[number] for number in range(len(rows))]

    @torch.no_grad()
    def _score_batch(
        self, rows: Sequence[tuple[list[int], int]], numbers: Sequence[int]
    ) -> dict[int, tuple[float, bool]]:
        inputs = [torch.tensor(rows[number][0][:-1], device=self.on_device) for number in numbers]
        counts = [rows[number][1] for number in numbers]
        targets = torch.tensor([token for number in numbers for token in rows[number][0][-rows[number][1] :]])
        row = torch.arange(len(numbers)).repeat_interleave(torch.tensor(counts))
        position = torch.cat(
            [torch.arange(len(own) - count, len(own)) for own, count in zip(inputs, counts, strict=True)]
        )
        # Padding is later than all tokens of its row, which do not see it.
        tokens_BT = nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        places = row.to(self.on_device), position.to(self.on_device)
        scores_N2 = self.predictor.score_targets(
            tokens_BT, places, targets.to(self.on_device), self.own_tokenizer.vocab
        )
        of_rows = zip(numbers, scores_N2.cpu().split(counts), strict=True)
        return {number: (float(scores[:, 0].sum()), bool(scores[:, 1].all())) for number, scores in of_rows}

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of the model's context."""
        windows: list[tuple[list[int], int]] = []
        owners = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            rolling = utils.get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.context, 1)
            for given, continuation in map(utils.make_disjoint_window, rolling):
                windows.append(((given + continuation), len(continuation)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(owners, self._score(windows), strict=True):
            totals[owner] += log_probability
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to one of its stop texts."""
        results: list[str] = []
        end = self.own_tokenizer.end_text
        for request in requests:
            text, options = request.args
            settings = normalize_gen_kwargs(options, 256)
            stops = handle_stop_sequences(settings.pop("until", None), eos=end)
            # The prompt stays, as far as the context is large enough, and the answer has the rest.
            prompt = self.tok_encode(text)[-(self.context - 1) :]
            limit = min(settings["max_gen_toks"], self.context - len(prompt))
            temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
            sampling = Sampling(temperature, top_p=settings.get("top_p", 1.0), top_k=settings.get("top_k", 0))
            results.append(self._continue(prompt, limit, sampling, stops))
        return results

    def _continue(self, prompt: list[int], limit: int, sampling: Sampling, stops: Sequence[str]) -> str:
        generator = torch.Generator(self.on_device).manual_seed(0)
        tokens = torch.tensor(prompt, device=self.on_device)
        vocab = self.own_tokenizer.vocab
        stream = stream_tokens(self.predictor, [tokens], sampling, generator, self.context, vocab)
        new: list[int] = []
        text = ""
        for _, token in zip(range(limit), stream, strict=False):
            if int(token[0]) == self.eot_token_id:
                break
            new.append(int(token[0]))
            text = self.own_tokenizer.decode(new)
            if any(stop in text for stop in stops if stop):
                break
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text


def model_in_one_process(found: TrainedWeights, tokenizer: Tokenizer, batch_size: int) -> LmEvalModel:
    """Return the model of a checkpoint on the CPU, in fp32."""
    return LmEvalModel(Predictor(found.load_module()), tokenizer, found.run.model.max_seq_len, batch_size)


def model_in_ranks(
    found: TrainedWeights, tokenizer: Tokenizer, layout: Layout, device: torch.device, batch_size: int
) -> LmEvalModel:
    """Return the model of a checkpoint under a layout, in fp32. A collective: every rank must call it.

    Raises UserError as `inference_run` does."""
    shared, mesh = load_in_ranks(found, layout, device)
    return _shared_lm_eval_model(shared, mesh, tokenizer, found.run.model.max_seq_len, batch_size, device)


def model_of_trainer(trainer: Trainer, batch_size: int) -> LmEvalModel:
    """Return the model that a trainer trains, in its layout and precision."""
    context = trainer.run.model.max_seq_len
    shared = SharedModel(trainer.strategy, agreeing=dist.group.WORLD)
    return _shared_lm_eval_model(shared, trainer.mesh, trainer.corpus.tokenizer, context, batch_size, trainer.device)


def _shared_lm_eval_model(
    shared: SharedModel, mesh: Mesh, tokenizer: Tokenizer, context: int, batch_size: int, device: torch.device
) -> LmEvalModel:
    share = (device, mesh.dp_rank, mesh.dims.dp_size)
    return LmEvalModel(shared, tokenizer, context, batch_size, *share)


def check_scored_run(run: RunSpec) -> None:
    """Raise UserError for a run whose ranks cannot score its model while they train it."""
    layout = run.layout
    fix = "score its checkpoints: phalanx evaluate"
    if layout.cp > 1:
        raise UserError("layout.cp", layout.cp, "has ranks that compute parts of a text, while tasks need all", fix)
    if layout.data_parallel == "parameter_server":
        problem = "has ranks that do not run the model, while tasks need all"
        raise UserError("layout.data_parallel", "parameter_server", problem, fix)
    if run.model.implementation is not None:
        problem = "is a network of its own, whose tokens ranks do not share"
        raise UserError("model.implementation", run.model.implementation.class_path, problem, fix)


def evaluate_tasks(
    model: LmEvalModel,
    tasks: Sequence[str],
    include_path: str | None,
    num_fewshot: int | None,
    limit: int | None,
    chat: bool,
) -> dict[str, dict[str, Any]]:
    """Return the metrics of each task by name. Raises UserError for unknown tasks."""
    loaded = find_tasks(tasks, include_path).load(list(tasks))
    check_chat(model.own_tokenizer, chat)
    for task in loaded["tasks"].values():
        # As `lm_eval.simple_evaluate` does, which also runs pip and other programs to describe the machine: a task that
        # sets 0 itself cannot have examples.
        if task.get_config("num_fewshot") is None or (num_fewshot is not None and task.get_config("num_fewshot") != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    results = lm_eval.evaluate(
        model, loaded, limit=limit, apply_chat_template=chat, log_samples=False, bootstrap_iters=0
    )
    return {task: dict(metrics) for task, metrics in results["results"].items()}


def check_chat(tokenizer: Tokenizer, chat: bool, field: str = "--chat") -> None:
    """Raise UserError if questions are to be rendered by a template that a tokenizer does not have."""
    if chat and tokenizer.chat is None:
        raise UserError(field, None, "needs a chat template, which the tokenizer does not have", f"remove {field}")


def find_tasks(tasks: Sequence[str], include_path: str | None) -> TaskManager:
    """Return lm-eval's tasks, with those of a folder. Raises UserError for unknown ones among `tasks`."""
    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        fix = "see `lm-eval ls tasks`, or give the folder of its file with --include-path"
        fix = did_you_mean(unknown[0], manager.all_tasks, fix)
        raise UserError("--tasks", unknown[0], "is not a task of lm-eval", fix)
    return manager
