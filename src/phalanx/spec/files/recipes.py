"""Run files of `phalanx init --task`: short, with values of published runs and their sources."""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.model import model_parameters

Task = Literal["pretrain", "continue", "sft", "lora", "dpo"]


class Rates(NamedTuple):
    """Peak learning rates by the size of the model, and their source."""

    by_size: tuple[tuple[float, float], ...]
    """Largest number of parameters, and the rate up to it."""
    source: str

    def of(self, parameters: float) -> float:
        """Return the rate for a number of parameters; that of the largest models beyond."""
        return next((rate for limit, rate in self.by_size if parameters <= limit), self.by_size[-1][1])


TULU = "Tulu 3 (arXiv 2411.15124)"
RATES: dict[Task, Rates] = {
    "continue": Rates(((14e9, 3e-4), (1e12, 1.5e-4)), "the peak of pre-training, to which the rate returns"),
    "sft": Rates(((2e9, 2e-5), (40e9, 5e-6), (1e12, 2e-6)), f"{TULU}; for small models: Alpaca"),
    "lora": Rates(((14e9, 2e-4), (1e12, 1e-4)), "QLoRA (arXiv 2305.14314)"),
    "dpo": Rates(((40e9, 5e-7), (1e12, 2e-7)), TULU),
}
UNKNOWN_PARAMETERS = 8e9
"""Size for which a file without a model has its rates."""
HEADER = """\
#:schema {schema}
#
# {title}
#
#   phalanx data inspect {path} --rows 2     # what is trained on
#   phalanx memory {path}                    # whether it fits
#   phalanx train {path}
#
# All keys: phalanx init, or docs/reference/config.md.

name = "{task}"

[model]
from_hf = {model}      # a directory, or a model on the hub
"""
CHAT_DATA = """
[data]
train = [{data}]
format = "chat"                  # a list "messages" in each record; "prompt" for prompt and completion
tokenizer = {model}    # its chat template renders conversations
# chat_template = "chatml"       # for a base model without one: a Jinja file, "chatml" or "plain"
too_long = "drop"                # or "truncate", or raise training.seq_len
"""
TRAINING = """
[training]
epochs = {epochs}                       # {epochs_source}
seq_len = {seq_len}
tokens_per_step = {tokens}         # {sequences} sequences, {batch_source}
"""
OPTIMIZER = """
[optimizer]
learning_rate = {rate}             # {rate_source}
lr_schedule = "{schedule}"
min_lr_ratio = 0.0
warmup_steps = {warmup}                # {warmup_source}
weight_decay = 0.0
betas = [0.9, 0.999]
"""
CONTINUE = """
[data]
tokenizer = {model}

[[data.source]]
name = "new"
path = [{data}]
weight = 0.95

[[data.source]]
name = "replay"                  # text like that of the first training, against forgetting
path = ["replay.jsonl"]
weight = 0.05                    # 5 % (Ibrahim et al., arXiv 2403.08763, section 6)

[training]
steps = 1000
seq_len = 4096
tokens_per_step = 524288         # 128 sequences

[optimizer]
learning_rate = {rate}           # {rate_source}
lr_schedule = "cosine"           # warm-up again, and decay again (arXiv 2403.08763)
warmup_steps = 10                # 1 %
"""
ADAPTER = """
[adapter]
rank = 64                        # QLoRA (arXiv 2305.14314)
alpha = 16
targets = "linear"               # all products of blocks; attention alone learns less (same paper)
# base_dtype = "nf4"             # the frozen matrices in 4 bits, as in the paper: a fourth of their memory in bf16
"""
PREFERENCE_DATA = """
[data]
train = [{data}]
format = "preference"            # prompt, chosen and rejected of each record
tokenizer = {model}
too_long = "drop"

[preference]
beta = 5.0                       # with lengths; 0.1 without (DPO, arXiv 2305.18290)
length_normalized = true
"""
EVALUATION = """
[evaluation]
every = 100
tokens = 262144

[checkpoint]
every = 100
"""


def recipe(task: Task, path: str, schema: str, model: str | None, spec: ModelSpec | None, data: str | None) -> str:
    """Return the run file of a task other than "pretrain", named by `path`.

    `model` is the name or directory of the model, whose description is `spec`; `data` is the text to train on. Without
    them, the file has names to replace."""
    parameters = (
        UNKNOWN_PARAMETERS if spec is None else sum(parameter.numbers for parameter in model_parameters(spec).values())
    )
    values = {
        "schema": schema,
        "path": path,
        "task": task,
        "model": json.dumps(model or "path/to/model"),
        "data": json.dumps(data or ("pairs.jsonl" if task == "dpo" else "data.jsonl")),
        "rate": f"{RATES[task].of(parameters):g}",
        "rate_source": RATES[task].source,
    }
    titles = {
        "continue": "Continued pre-training on new text, with some of the old.",
        "sft": "Supervised fine-tuning on conversations: only answers are trained on.",
        "lora": "Low-rank adapters of a frozen model, trained on conversations.",
        "dpo": "Direct preference optimization on pairs of answers.",
    }
    parts = {
        "continue": (CONTINUE,),
        "sft": (CHAT_DATA, TRAINING, OPTIMIZER),
        "lora": (CHAT_DATA, ADAPTER, TRAINING, OPTIMIZER),
        "dpo": (PREFERENCE_DATA, TRAINING, OPTIMIZER),
    }[task]
    values |= {
        "sft": _steps(2, TULU, 4096, 128, "linear", 20, "about 3 %"),
        "lora": _steps(3, "as Alpaca; stop earlier if the held-out loss rises", 2048, 16, "none", 10, "QLoRA: 3 %"),
        "dpo": _steps(1, TULU, 2048, 128, "linear", 20, "about 10 %"),
    }.get(task, {})
    return "".join((HEADER, *parts, EVALUATION)).format(title=titles[task], **values)


def _steps(
    epochs: int, epochs_source: str, seq_len: int, sequences: int, schedule: str, warmup: int, warmup_source: str
) -> dict[str, str]:
    """Return the values of the length and the schedule of a recipe."""
    return {
        "epochs": str(epochs),
        "epochs_source": epochs_source,
        "seq_len": str(seq_len),
        "tokens": str(seq_len * sequences),
        "sequences": str(sequences),
        "batch_source": "as QLoRA" if schedule == "none" else "as Tulu 3",
        "schedule": schedule,
        "warmup": str(warmup),
        "warmup_source": warmup_source,
    }
