"""Training on preferences: the table [preference] of a run file, and what it cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from phalanx.spec.base import Spec, refuse_together, require
from phalanx.spec.errors import UserError

if TYPE_CHECKING:
    from phalanx.spec.run import RunSpec

PREFERENCE_FORMAT = "preference"


class PreferenceSpec(Spec):
    """Direct preference optimization (DPO): training on pairs of a chosen and a rejected answer."""

    beta: float = Field(0.1, gt=0)
    """Strength with which the model is kept near the reference, the initial weights: a reward is beta times the
    difference of their log-probabilities of an answer. With `loss = "ipo"` it is the tau of that paper."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair: "sigmoid" (DPO, arXiv 2305.18290), or "ipo" (arXiv 2310.12036), the squared distance of the
    rewards' difference per token from a margin."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that the label of a pair is wrong (conservative DPO); with `loss = "sigmoid"` only."""
    length_normalized: bool = False
    """Divide the log-probability of each answer by its number of tokens (length-normalized DPO, arXiv 2411.15124).
    IPO always does."""

    @model_validator(mode="after")
    def _check_variants(self) -> PreferenceSpec:
        if self.loss == "ipo":
            problem = 'has no effect with preference.loss = "ipo"'
            require(not self.label_smoothing, "label_smoothing", self.label_smoothing, problem, "remove it")
        return self


def check_preference(run: RunSpec) -> None:
    """Raise UserError if a run has pairs without [preference], or what its loss of pairs does not support."""
    data = run.data
    for number, source in enumerate(data.source):
        if source.format == PREFERENCE_FORMAT:
            fix = "list the files of all pairs in data.train"
            raise UserError(f"data.source[{number}].format", source.format, "is not supported in a mixture", fix)
    if run.preference is None:
        if data.format == PREFERENCE_FORMAT:
            fix = "add a table [preference], such as with beta = 0.1"
            raise UserError("data.format", data.format, "needs the settings of its loss", fix)
        return
    if data.source:
        problem = "cannot be combined with data.source: a step has pairs only, from one source"
        raise UserError("preference", None, problem, "list the files of all pairs in data.train")
    if data.format != PREFERENCE_FORMAT:
        problem = f"needs pairs of answers, but data.format is {data.format!r}"
        raise UserError("preference", None, problem, f'set data.format = "{PREFERENCE_FORMAT}"')
    layout = run.layout
    unsupported = (
        ("data.mask_documents", not data.mask_documents, "lets a rejected answer read the chosen one", "set it true"),
        ("data.held_out_sets", bool(data.held_out_sets), "is not supported", "use data.held_out"),
        ("data.dataset", data.dataset is not None, "provides no pairs", "remove it"),
        ("training.loss", run.training.loss is not None, "replaces the same loss", "remove one of the two"),
        ("model.implementation", run.model.implementation is not None, "is not supported", "use Phalanx's transformer"),
        ("model.mtp", run.model.mtp is not None, "would train on rejected answers", "remove model.mtp"),
        (
            "layout.data_parallel",
            layout.data_parallel == "parameter_server",
            "is not supported for parameter servers",
            "use another strategy, such as ddp or zero1",
        ),
        (
            "metrics.gradient_noise_every",
            run.metrics.gradient_noise_every > 0,
            "measures losses of tokens, not of pairs",
            "set it to 0",
        ),
        ("swarm", run.swarm is not None, "is not supported", "remove it"),
    )
    refuse_together("preference", unsupported)
    for number, phase in enumerate(run.phase):
        for field in ("seq_len", "rope"):
            if getattr(phase, field) is not None:
                problem = "cannot be combined with [preference], whose reference is computed once, before the run"
                raise UserError(f"phase[{number}].{field}", None, problem, "remove it")
