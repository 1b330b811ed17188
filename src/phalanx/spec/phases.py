"""Phases of a run: parts with other lengths, batches, mixtures, learning rates or rotary embeddings, from a step on.

Why: `docs/design/decisions/phases.md`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from phalanx.spec.base import Spec, did_you_mean, require
from phalanx.spec.errors import UserError, UserErrorGroup
from phalanx.spec.mixture import shares_of_weights
from phalanx.spec.model import RopeSpec

if TYPE_CHECKING:
    from phalanx.spec.run import OptimizerSpec, RunSpec

START_FIELDS = ("from_step", "from_tokens", "from_share")
RATE_FIELDS = ("learning_rate", "lr_schedule", "warmup_steps", "min_lr_ratio", "lr_decay_fraction")
"""Fields that begin a new learning-rate schedule, which are those of `[optimizer]`."""
BATCH_FIELDS = ("seq_len", "tokens_per_step", "micro_batch_size", "weights")
"""Fields that change the batches of a phase."""


class PhaseSpec(Spec):
    """A part of a run with other settings, from a step on; what it leaves out is as in the phase before."""

    from_step: int | None = Field(None, ge=0, examples=[8000])
    """Completed steps after which it starts."""
    from_tokens: int | None = Field(None, ge=0, examples=[900_000_000])
    """Tokens of training after which it starts, in place of `from_step`."""
    from_share: float | None = Field(None, ge=0, lt=1, examples=[0.8])
    """Share of `training.steps` after which it starts, in place of `from_step`."""
    seq_len: int | None = Field(None, gt=1, examples=[32_768])
    """Tokens in a sequence. Sources start a new epoch, because what they have read was cut into other sequences."""
    tokens_per_step: int | None = Field(None, gt=0, examples=[4_194_304])
    """Tokens in one optimizer update over all ranks."""
    ramp_steps: int = Field(0, ge=0, examples=[1000])
    """Steps in which `tokens_per_step` grows or falls from that of the phase before, by `ramp_tokens` at a time."""
    ramp_tokens: int | None = Field(None, gt=0, examples=[524_288])
    """Difference of consecutive batches of the ramp, in tokens."""
    micro_batch_size: int | None = Field(None, gt=0, examples=[1])
    """Sequences per rank in one forward pass. By default as many tokens as in the phase before, if that is set."""
    weights: dict[str, float] | None = Field(None, examples=[{"code": 0.2, "prose": 0.8}])
    """Weights of the sources by name, in place of those in `data.source`. Sources that it leaves out are not read."""
    learning_rate: float | None = Field(None, gt=0, examples=[1e-4])
    """Peak of a learning-rate schedule that starts with this phase, and lasts until a phase with another one. By
    default the rate of the step before, if another field of the schedule is set. Muon's rate changes in proportion."""
    lr_schedule: Literal["cosine", "linear", "wsd", "none"] | None = Field(None, examples=["linear"])
    """Its shape, in place of `optimizer.lr_schedule`."""
    warmup_steps: int | None = Field(None, ge=0, examples=[100])
    """Steps in which the rate changes linearly from that of the step before to the peak; by default 0."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1, examples=[0.0])
    """Learning rate at its end as a share of its peak, in place of `optimizer.min_lr_ratio`."""
    lr_decay_fraction: float | None = Field(None, gt=0, le=1, examples=[0.5])
    """Share of its steps in which wsd decays, in place of `optimizer.lr_decay_fraction`."""
    rope: RopeSpec | None = None
    """Parameters of the rotary embedding, in place of all of `[model.rope]`, such as for longer sequences."""

    @property
    def has_schedule(self) -> bool:
        """True if a new learning-rate schedule starts with this phase."""
        return any(getattr(self, field) is not None for field in RATE_FIELDS)

    @property
    def changes_batches(self) -> bool:
        """True if batches of this phase may differ from those before."""
        return any(getattr(self, field) is not None for field in BATCH_FIELDS)

    @model_validator(mode="after")
    def _check(self) -> PhaseSpec:
        starts = [name for name in START_FIELDS if getattr(self, name) is not None]
        if len(starts) != 1:
            problem = f"is not the only start: {', '.join(starts)} are set" if starts else "is missing"
            fix = "set one of from_step, from_tokens and from_share"
            raise UserError("from_step", self.from_step, problem, fix)
        if not (self.has_schedule or self.changes_batches or self.rope is not None):
            raise UserError("", None, "changes nothing", "set what differs from here on, or remove it")
        if bool(self.ramp_steps) != (self.ramp_tokens is not None):
            fix = "set both ramp_steps and ramp_tokens, or neither"
            raise UserError("ramp_steps", self.ramp_steps, "is only half of a ramp", fix)
        if self.ramp_steps and self.tokens_per_step is None:
            raise UserError("ramp_steps", self.ramp_steps, "has no batch to reach", "set tokens_per_step")
        return self


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of a run with the same settings."""

    number: int | None
    """The number of the `[[phase]]` in the file, from 0 as in errors; None for the settings of the run itself."""
    first_step: int
    """Steps before it."""
    end: int
    """Steps of the run at its end."""
    run: RunSpec
    """The run with these settings throughout, without phases."""

    @property
    def steps(self) -> int:
        """Number of its steps."""
        return self.end - self.first_step

    @property
    def name(self) -> str:
        """Its name in messages."""
        start = f"from step {self.first_step + 1}"
        return f"the run's own settings ({start})" if self.number is None else f"phase[{self.number}] ({start})"


@dataclass(frozen=True)
class RateSpan:
    """Consecutive steps with one learning-rate schedule."""

    first_step: int
    end: int
    optimizer: OptimizerSpec
    """The schedule, as that of a run of these steps."""
    peak: float | None
    """Its peak as a share of that of the run; None: the rate of the step before."""


def phases_of(run: RunSpec) -> list[Phase]:
    """Return the phases of a run in order, a ramp as one phase for each batch size.

    Raises UserError if a phase does not start within the run, or after the one before, or its settings are invalid."""
    base = run.replace(phase=[])
    starts = [0]
    runs = [base]
    numbers: list[int | None] = [None]
    tokens = 0
    for index, spec in enumerate(run.phase):
        field = f"phase[{index}]"
        before = runs[-1]
        start = _first_step(spec, run.training.steps, starts[-1], tokens, before.training.tokens_per_step)
        _check_start(field, spec, start, starts[-1], run.training.steps, is_first=index == 0)
        changed = _with_settings(field, before, spec)
        for first_step, tokens_per_step in _ramp(field, spec, start, before.training.tokens_per_step):
            tokens += (first_step - starts[-1]) * runs[-1].training.tokens_per_step
            training = changed.training.model_copy(update={"tokens_per_step": tokens_per_step})
            if tokens_per_step % training.seq_len:
                problem = (
                    f"makes batches of {tokens_per_step} tokens, not a multiple of the {training.seq_len} of a sequence"
                )
                raise UserError(
                    f"{field}.ramp_tokens", spec.ramp_tokens, problem, f"use a multiple of {training.seq_len}"
                )
            if first_step == starts[-1]:  # a ramp from the first step on starts with the batch of the run itself
                del starts[-1], runs[-1], numbers[-1]
            starts.append(first_step)
            runs.append(changed.model_copy(update={"training": training}))
            numbers.append(index)
    # A ramp may be longer than the run.
    steps = run.training.steps
    ends = [min(start, steps) for start in (*starts[1:], steps)]
    pieces = zip(numbers, starts, ends, runs, strict=True)
    return [Phase(number, start, end, own) for number, start, end, own in pieces if start < steps]


def phase_at(run_phases: list[Phase], step: int) -> Phase:
    """Return the phase of a step, counted from 0; after the last step, the last phase."""
    return next(phase for phase in reversed(run_phases) if phase.first_step <= step)


def run_after(run: RunSpec, step: int) -> RunSpec:
    """Return the run as it is after `step` completed steps, with the settings of the last one."""
    return phase_at(phases_of(run), max(0, step - 1)).run if run.phase else run


def distinct_phases(run: RunSpec) -> list[Phase]:
    """Return the first phase of each set of lengths, batches and layouts."""
    distinct: list[Phase] = []
    for phase in phases_of(run):
        if all(_sizes(phase.run) != _sizes(other.run) for other in distinct):
            distinct.append(phase)
    return distinct


def other_phases(run: RunSpec) -> list[Phase]:
    """Return the phases of `distinct_phases` that differ from the run's own settings."""
    return [phase for phase in distinct_phases(run) if _sizes(phase.run) != _sizes(run)] if run.phase else []


def phases_to_show(run: RunSpec) -> list[Phase]:
    """Return the phases of `other_phases`, of a ramp only that of its last batch, which needs most."""
    last = {phase.number: phase for phase in phases_of(run)} if run.phase else {}
    return [phase for phase in other_phases(run) if last[phase.number] == phase]


def describe_phases(run: RunSpec) -> dict[int, str]:
    """Return what each `[[phase]]` within a run changes, as a line by its number."""
    parts: dict[int, list[Phase]] = {}
    for phase in phases_of(run):
        if phase.number is not None:
            parts.setdefault(phase.number, []).append(phase)
    return {
        number: f"{phases[0].name}: {'; '.join(_describe_changes(run.phase[number], phases))}"
        for number, phases in parts.items()
    }


def _describe_changes(spec: PhaseSpec, phases: list[Phase]) -> Iterator[str]:
    """Yield what a `[[phase]]` changes, of a ramp the first and the last batch."""
    first, last = (phase.run.training for phase in (phases[0], phases[-1]))
    if spec.tokens_per_step is not None or spec.seq_len is not None:
        sizes = dict.fromkeys(f"{training.tokens_per_step:,}" for training in (first, last))
        yield f"{' to '.join(sizes)} tokens per update in sequences of {last.seq_len:,}"
    if spec.micro_batch_size is not None:
        yield f"micro-batches of {spec.micro_batch_size}"
    if spec.weights is not None:
        sources = phases[0].run.data.source
        shares = shares_of_weights([source.weight for source in sources])
        named = (f"{source.name} {float(share):.4g}" for source, share in zip(sources, shares, strict=True))
        yield f"shares {', '.join(named)}"
    if spec.has_schedule:
        peak = "of the step before" if spec.learning_rate is None else f"{spec.learning_rate:g}"
        others = (f"{field} {value}" for field in RATE_FIELDS[1:] if (value := getattr(spec, field)) is not None)
        yield ", ".join([f"learning rate {peak}", *others])
    if spec.rope is not None:
        yield "another rotary embedding"


def _sizes(run: RunSpec) -> tuple[object, ...]:
    return run.training, run.layout, run.model


@contextmanager
def errors_of_phase(phase: Phase) -> Iterator[None]:
    """Say in errors in which phase of the run they are."""
    try:
        yield
    except UserError as error:
        if phase.number is not None:
            error.problem += f" in {phase.name}"
        raise


def source_shares(run: RunSpec) -> list[Fraction]:
    """Return the share of each source in the tokens of a run, over all of its phases."""
    run_phases = phases_of(run)
    tokens = [phase.steps * phase.run.training.tokens_per_step for phase in run_phases]
    by_phase = [shares_of_weights([source.weight for source in phase.run.data.source]) for phase in run_phases]
    return [
        sum(size * share for size, share in zip(tokens, shares, strict=True)) / Fraction(sum(tokens))
        for shares in zip(*by_phase, strict=True)
    ]


def rate_spans(run: RunSpec) -> list[RateSpan]:
    """Return the learning-rate schedules of a run in order: its own, and those of its phases."""
    spans = [RateSpan(0, run.training.steps, run.optimizer, 1.0)]
    if not run.phase:
        return spans
    first_steps = {phase.number: phase.first_step for phase in reversed(phases_of(run))}
    for number, spec in enumerate(run.phase):
        if not spec.has_schedule:
            continue
        start = first_steps[number]
        changes = {field: value for field in RATE_FIELDS if (value := getattr(spec, field)) is not None}
        peak = None if spec.learning_rate is None else spec.learning_rate / run.optimizer.learning_rate
        optimizer = run.optimizer.replace(**{"warmup_steps": 0, "lr_function": None} | changes)
        last = spans.pop()
        if last.first_step < start:
            spans.append(RateSpan(last.first_step, start, last.optimizer, last.peak))
        spans.append(RateSpan(start, run.training.steps, optimizer, peak))
    return spans


def with_fixed_starts(run: RunSpec, steps: int) -> list[PhaseSpec]:
    """Return the phases that start in the first `steps` steps, which are the same steps if the run becomes shorter."""
    first_steps = {phase.number: phase.first_step for phase in reversed(phases_of(run))}
    no_start = dict.fromkeys(START_FIELDS)
    return [
        spec.replace(**no_start | {"from_step": first_steps[number]})
        for number, spec in enumerate(run.phase)
        if number in first_steps and first_steps[number] < steps
    ]


def check_phases(run: RunSpec) -> None:
    """Raise UserError if the phases of a run are invalid."""
    if not run.phase:
        return
    if not run.training.has_decided_steps:
        problem = f"cannot be combined with {run.training.length_field[0]}, because phases need the number of steps"
        raise UserError("phase", None, problem, "set training.steps instead")
    if run.swarm is not None:
        raise UserError("phase", None, "cannot be combined with [swarm]", "remove one of the two")
    if run.layout.max_staleness is not None:
        problem = "cannot be combined with layout.max_staleness, because ranks are at different steps"
        raise UserError("phase", None, problem, "remove one of the two")
    for index, spec in enumerate(run.phase):
        for field, is_set in (("streaming", run.data.streaming), ("dataset", run.data.dataset is not None)):
            if is_set and spec.changes_batches:
                name = next(name for name in BATCH_FIELDS if getattr(spec, name) is not None)
                fix = f"remove it, or data.{field}"
                problem = f"cannot be combined with data.{field}"
                raise UserError(f"phase[{index}].{name}", getattr(spec, name), problem, fix)
    rate_spans(run)


def _first_step(spec: PhaseSpec, steps: int, previous_start: int, tokens: int, tokens_per_step: int) -> int:
    """Return the step from which a phase starts, if `tokens` were read before the previous phase's first step."""
    if spec.from_step is not None:
        return spec.from_step
    if spec.from_share is not None:
        return round(Fraction(str(spec.from_share)) * steps)
    assert spec.from_tokens is not None
    return previous_start + max(0, math.ceil((spec.from_tokens - tokens) / tokens_per_step))


def _check_start(field: str, spec: PhaseSpec, start: int, previous: int, steps: int, is_first: bool) -> None:
    """Raise UserError if a phase does not start within the run, or after the one before."""
    name = next(name for name in START_FIELDS if getattr(spec, name) is not None)
    value = getattr(spec, name)
    text = "" if name == "from_step" else f" (step {start})"
    if start >= steps:
        fix = "start it earlier, raise training.steps, or remove it"
        raise UserError(f"{field}.{name}", value, f"begins after the end{text}: the run has {steps} steps", fix)
    if is_first and start == 0 and not spec.ramp_steps:
        fix = "set what it changes in the tables of the run, and remove it"
        raise UserError(f"{field}.{name}", value, f"is the start of the run{text}", fix)
    if start < previous or (start == previous and not is_first):
        problem = f"is not after the phase before it{text}, whose last batch size or settings begin at step {previous}"
        raise UserError(f"{field}.{name}", value, problem, "order phases by their start")


def _with_settings(field: str, before: RunSpec, spec: PhaseSpec) -> RunSpec:
    """Return the run of the phase before with the settings of a phase."""
    training = {name: value for name in ("seq_len", "tokens_per_step") if (value := getattr(spec, name)) is not None}
    changes: dict[str, Any] = {"training": before.training.replace(**training)}
    layout: dict[str, Any] = {}
    if spec.seq_len is not None and before.layout.pp > 1 and before.layout.split_seq_len is None:
        layout["split_seq_len"] = before.training.seq_len
    micro_batch_size = spec.micro_batch_size
    if micro_batch_size is None and spec.seq_len is not None and before.layout.micro_batch_size is not None:
        micro_batch_size = max(1, before.layout.micro_batch_size * before.training.seq_len // spec.seq_len)
    if micro_batch_size is not None:
        layout["micro_batch_size"] = micro_batch_size
    if layout:
        changes["layout"] = before.layout.replace(**layout)
    if spec.rope is not None:
        if before.model.implementation is not None:
            raise UserError(f"{field}.rope", None, "has no effect on a network of your own", "remove it")
        require(
            before.model.position_embedding == "rope",
            f"{field}.rope",
            None,
            f'has no effect on a model with position_embedding = "{before.model.position_embedding}"',
            "remove it",
        )
        changes["model"] = before.model.replace(rope=spec.rope)
    if spec.weights is not None:
        changes["data"] = before.data.replace(source=_with_weights(field, before, spec.weights))
    try:
        return before.replace(**changes)
    except UserErrorGroup as group:
        raise UserErrorGroup([_of_phase(field, error) for error in group.errors]) from None
    except UserError as error:
        raise _of_phase(field, error) from None


def _of_phase(field: str, error: UserError) -> UserError:
    """Return an error in the run of a phase as one in the phase."""
    name = error.field.rpartition(".")[2]
    is_of_phase = name in PhaseSpec.model_fields
    return UserError(f"{field}.{name}" if is_of_phase else error.field, error.value, error.problem, error.fix)


def _with_weights(field: str, run: RunSpec, weights: dict[str, float]) -> list[Any]:
    names = [source.name for source in run.data.source]
    require(bool(names), f"{field}.weights", weights, "has no sources to weigh", "name them in [[data.source]]")
    for name, weight in weights.items():
        fix = did_you_mean(name, names)
        require(name in names, f"{field}.weights.{name}", weight, "is not a source of data.source", fix)
        require(weight >= 0, f"{field}.weights.{name}", weight, "is negative", "use 0 to leave it out")
    require(any(weights.values()), f"{field}.weights", weights, "leaves no source to read", "give one a weight")
    return [source.replace(weight=float(weights.get(source.name, 0))) for source in run.data.source]


def _ramp(field: str, spec: PhaseSpec, start: int, batch_before: int) -> Iterator[tuple[int, int]]:
    """Yield the first step and the batch of each size in a phase, in tokens: one unless it has a ramp."""
    batch = spec.tokens_per_step or batch_before
    if spec.ramp_tokens is not None:
        difference = batch - batch_before
        problem = f"does not divide the difference of {abs(difference):,} tokens to the batch before"
        require(
            difference != 0 and difference % spec.ramp_tokens == 0,
            f"{field}.ramp_tokens",
            spec.ramp_tokens,
            problem,
            "use a divisor of it",
        )
        increments = abs(difference) // spec.ramp_tokens
        problem = f"are fewer than the {increments} increments of the ramp"
        fix = f"raise ramp_tokens, or use {increments} steps or more"
        require(increments <= spec.ramp_steps, f"{field}.ramp_steps", spec.ramp_steps, problem, fix)
        for increment in range(increments):
            added = increment * math.copysign(spec.ramp_tokens, difference)
            yield start + increment * spec.ramp_steps // increments, batch_before + int(added)
    yield start + spec.ramp_steps, batch
