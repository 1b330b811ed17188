"""Default of `optimizer.learning_rate`: the peak of published runs with AdamW, of a model of about the same size."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, NamedTuple

from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.model import model_parameters

if TYPE_CHECKING:
    from phalanx.spec.run import RunSpec


class PublishedRate(NamedTuple):
    """Peak learning rate of a published run."""

    parameters: float
    """Parameters of its model, with all experts."""
    learning_rate: float
    source: str


SMALL_MODELS = PublishedRate(2e6, 3e-3, "Phalanx's default for small models")
DENSE_MODELS = (
    SMALL_MODELS,
    PublishedRate(70e6, 1e-3, "Pythia 70M (arXiv 2304.01373)"),
    PublishedRate(125e6, 6e-4, "GPT-3 125M (arXiv 2005.14165, table 2.1)"),
    PublishedRate(410e6, 3e-4, "Pythia 410M (arXiv 2304.01373)"),
    PublishedRate(1.1e9, 4e-4, "TinyLlama 1.1B (arXiv 2401.02385)"),
    PublishedRate(8e9, 3e-4, "Llama 3 8B (arXiv 2407.21783, table 3)"),
    PublishedRate(13e9, 3e-4, "Llama 2 13B (arXiv 2307.09288, table 1)"),
    PublishedRate(34e9, 1.5e-4, "Llama 2 34B (arXiv 2307.09288, table 1)"),
    PublishedRate(70e9, 1.5e-4, "Llama 3 70B (arXiv 2407.21783, table 3)"),
    PublishedRate(175e9, 6e-5, "GPT-3 175B (arXiv 2005.14165, table 2.1)"),
    PublishedRate(405e9, 8e-5, "Llama 3 405B (arXiv 2407.21783, table 3)"),
)
EXPERT_MODELS = (
    *DENSE_MODELS[:5],  # no published rate of a mixture of experts below 6.9e9 parameters is known
    PublishedRate(6.9e9, 4e-4, "OLMoE 1B-7B (arXiv 2409.02060)"),
    PublishedRate(16e9, 4.2e-4, "DeepSeekMoE 16B (arXiv 2401.06066)"),
    PublishedRate(236e9, 2.4e-4, "DeepSeek-V2 (arXiv 2405.04434)"),
    PublishedRate(671e9, 2.2e-4, "DeepSeek-V3 (arXiv 2412.19437)"),
)
FINE_TUNING = (2e-5, "fine-tuning of Llama 2, 7B to 70B (arXiv 2307.09288, section 3.1)")
"""Peak learning rate for the weights of `model.from_hf`, and its source."""


def default_learning_rate(model: ModelSpec) -> tuple[float, str]:
    """Return the peak learning rate of the published run whose size is the nearest, and its source."""
    if model.from_hf is not None:
        return FINE_TUNING
    size = log(sum(parameter.numbers for parameter in model_parameters(model).values()))
    rows = EXPERT_MODELS if model.moe else DENSE_MODELS
    nearest = min(rows, key=lambda row: abs(log(row.parameters) - size))
    return nearest.learning_rate, nearest.source


def describe_learning_rate(run: RunSpec) -> str:
    """Return the learning rate of a run and its origin on one line."""
    is_set = "learning_rate" in run.optimizer.model_fields_set
    _, source = default_learning_rate(run.model)
    origin = "as set" if is_set else f"not set; the default is that of {source}"
    return f"optimizer.learning_rate = {run.optimizer.learning_rate}: {origin}"


def is_small_model(model: ModelSpec) -> bool:
    """Return whether Phalanx's defaults for small models apply."""
    return default_learning_rate(model)[1] == SMALL_MODELS.source


def learning_rate_note(run: RunSpec) -> str | None:
    """Return the line that names a published default; None if the rate is set, or that of small models."""
    is_set = "learning_rate" in run.optimizer.model_fields_set
    return None if is_set or is_small_model(run.model) else describe_learning_rate(run)
