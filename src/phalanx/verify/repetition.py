"""Trace equal work of a step once, and count it as often as the step repeats it.

Of the chunks of rows, the first two and the last are traced. Of the micro-batches, these are traced: the first, which
creates gradients, and some after it; the one that turns bf16 sums into fp32, and some after it; and the last, which may
reduce. Every other micro-batch counts like the one before it, with its collectives, FLOPs and changes of memory. In a
pipeline, this applies to each pass of a stage. All messages between ranks are traced, because the schedule determines
their order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest import mock
from weakref import ref

import torch
from torch import Tensor

from phalanx.parallel.pipeline.runtime import PipelineStrategy
from phalanx.parallel.pipeline.stage_passes import PipelineStepState, StagePasses
from phalanx.schedule.schedule import Action
from phalanx.spec.layout import MAX_BF16_SUMS
from phalanx.train.learner import Learner, MicroBatch
from phalanx.train.profiling.memory_meter import MemoryChange
from phalanx.train.profiling.step_profiler import StepRecorders
from phalanx.train.step_sums import StepSums
from phalanx.verify.repeated_work import RepeatedWork, Work

KEPT_FOR_WEIGHTS = frozenset({"input", "output gradient"})
"""Messages that the second half of a backward pass may read."""
NUM_TRACED = 3
"""Number of traced passes of a phase: the first differs from the others, and the second follows a different pass."""


@contextmanager
def few_chunks() -> Iterator[None]:
    """Compute only the first two chunks of rows and the last, because the others need as much memory as the second."""

    def first_two_and_last(total: int, rows: int) -> Sequence[int]:
        starts = range(0, total, rows)
        return starts if len(starts) <= 3 else [*starts[:2], starts[-1]]

    with mock.patch("phalanx.model.chunks.chunk_starts", first_two_and_last):
        yield


def phases(kinds: Sequence[str], widening: Sequence[int] = (MAX_BF16_SUMS,)) -> list[tuple[str, int]]:
    """Return the phase of each pass of a step. Passes of a phase are equal from the third one on.

    `widening` are the positions of passes in which sums become fp32, each a phase of its own."""
    bounds = sorted([*widening, *(position + 1 for position in widening), len(kinds) - 1])
    return [(kind, bisect_right(bounds, position)) for position, kind in enumerate(kinds)]


def first_of_phases(kinds: Sequence[str], widening: Sequence[int] = (MAX_BF16_SUMS,)) -> set[int]:
    """Return the positions of passes that need to be traced. The arguments are those of `phases`."""
    earlier = Counter[tuple[str, int]]()
    positions = set()
    for position, phase in enumerate(phases(kinds, widening)):
        if earlier[phase] < NUM_TRACED:
            positions.add(position)
        earlier[phase] += 1
    return positions


def traced_actions(actions: Sequence[Action], embedding_stages: Collection[int] = ()) -> dict[Action, Action]:
    """Return for each action of a rank the action that is traced in its place: itself, or an equal one before it.

    Either all actions of a stage and micro-batch are traced, or none. Weight halves and full backward passes form one
    sequence, because both change the sums of gradients. Forward passes and input halves are sequences of their own. If
    several `embedding_stages` add to the gradient of one embedding, its sum becomes fp32 in an earlier pass.
    """
    of_embedding = [action for action in actions if action.stage in embedding_stages and action.kind in "BI"]
    widens_embedding = of_embedding[MAX_BF16_SUMS : MAX_BF16_SUMS + 1]
    sequences = defaultdict[tuple[int, str], list[Action]](list)
    for action in actions:
        sequences[action.stage, "BW" if action.kind in "BW" else action.kind].append(action)
    widening = {
        key: [MAX_BF16_SUMS, *(sequence.index(action) for action in widens_embedding if action in sequence)]
        for key, sequence in sequences.items()
    }
    needed = {
        (key[0], sequence[position].micro)
        for key, sequence in sequences.items()
        for position in first_of_phases([action.kind for action in sequence], widening[key])
    }
    traced: dict[Action, Action] = {}
    for key, sequence in sequences.items():
        newest: dict[tuple[str, int], Action] = {}
        kinds = [action.kind for action in sequence]
        for action, phase in zip(sequence, phases(kinds, widening[key]), strict=True):
            if (key[0], action.micro) in needed:
                newest[phase] = action
            traced[action] = newest[phase]
    return traced


def embedding_stages(strategy: PipelineStrategy) -> set[int]:
    """Return the stages of this rank that add to the gradient of the embedding, if there are several."""
    stages = strategy.stages
    ends = {0, stages.last}
    return ends if stages.spec.reuses_embedding and ends <= stages.layers.keys() else set()


def num_traced_micro_batches(learner: Learner, count: int) -> int:
    """Return how many micro-batches of a step `forward_backward_once` runs, fully or in some of a rank's stages."""
    strategy = learner.strategy
    if not isinstance(strategy, PipelineStrategy):
        return len(first_of_phases(["FB"] * count))
    actions = list(strategy.schedule_of(count).actions(strategy.rank))
    traced = traced_actions(actions, embedding_stages(strategy))
    return len({action.micro for action, traced_action in traced.items() if action == traced_action})


def forward_backward_once(learner: Learner, micros: Sequence[MicroBatch], recorders: StepRecorders | None) -> StepSums:
    """Compute gradients like `Learner.forward_backward`, and run equal micro-batches once.

    The recorders, if any, count all micro-batches.
    """
    strategy = learner.strategy
    if isinstance(strategy, PipelineStrategy):
        schedule = strategy.schedule_of(len(micros))
        actions = traced_actions(list(schedule.actions(strategy.rank)), embedding_stages(strategy))
        passes = RepeatedPasses(strategy.passes, actions, recorders)
        with mock.patch.object(strategy, "passes", passes):
            return learner.forward_backward(micros)
    repeated = RepeatedMicroBatches(learner, micros, recorders)
    with mock.patch.object(learner, "compute_losses", repeated.compute_losses):
        return learner.forward_backward(repeated.traced)


# -- micro-batches without a pipeline ----------------------------------------------------------------------------------


class RepeatedMicroBatches:
    """The micro-batches of a step that are traced. Skipped micro-batches are counted when the next one starts."""

    def __init__(self, learner: Learner, micros: Sequence[MicroBatch], recorders: StepRecorders | None) -> None:
        indices = sorted(first_of_phases(["FB"] * len(micros)))
        self.traced = [micros[index] for index in indices]
        self._left_out = [after - before - 1 for before, after in zip([-1, *indices], indices, strict=False)]
        self._compute_losses = learner.compute_losses
        self._work = RepeatedWork(learner.strategy, recorders)
        self._mark = self._work.mark()
        self._num_started = 0

    def compute_losses(self, model: object, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Count each micro-batch that was skipped before this one like its predecessor, and start this one."""
        self._work.repeat(self._work.since(self._mark), times=self._left_out[self._num_started])
        self._num_started += 1
        self._mark = self._work.mark()
        return self._compute_losses(model, micro)  # type: ignore[arg-type]


# -- passes of a pipeline ----------------------------------------------------------------------------------------------


@dataclass
class _TracedPass:
    """A traced pass of a stage, which other passes repeat."""

    work: Work
    memory: MemoryChange
    """Change of memory by all tensors except the messages between stages."""
    output: Callable[[], Tensor | None]
    """Return an empty tensor like the message to another stage, or like the loss."""
    losses: Callable[[], Tensor | None]
    """Return an empty tensor like the losses of a forward pass; None after other passes."""


class RepeatedPasses(StagePasses):
    """Passes of a pipeline rank: the passes of some micro-batches run, and the others repeat them.

    A repeated pass creates its messages as tensors, which live as long as those of the traced pass. Its other tensors
    are only counted.
    """

    def __init__(
        self, passes: StagePasses, traced_action: Mapping[Action, Action], recorders: StepRecorders | None
    ) -> None:
        super().__init__(passes.data_parallel, passes.stages, passes.forward_context)
        self._traced_action = traced_action
        self._meter = None if recorders is None else recorders.memory
        self._work = RepeatedWork(passes.data_parallel, recorders)
        self._traced: dict[Action, _TracedPass] = {}
        self._messages: dict[tuple[int, int], dict[str, Tensor | None]] = defaultdict(dict)
        """Messages of repeated passes, by stage and micro-batch: the input and output, and their gradients."""
        self._storages: dict[tuple[int, int], dict[str, ref[torch.UntypedStorage]]] = defaultdict(dict)
        """The messages of traced passes."""
        self._messages_left_to_weights: dict[tuple[int, int], Set[str]] = {}
        """Messages that a traced input half leaves to the weight half, by stage and micro-batch."""
        self._last_input_half: tuple[int, int] | None = None

    def execute(self, action: Action, received: Tensor | None, state: PipelineStepState) -> Tensor | None:
        """Run or repeat an action, and return its output for another stage, if any."""
        # Only at the next action has the caller dropped the gradient that it received.
        if self._last_input_half is not None:
            self._messages_left_to_weights[self._last_input_half] = (
                self._live_messages(self._last_input_half).keys() & KEPT_FOR_WEIGHTS
            )
            self._last_input_half = None
        traced_action = self._traced_action[action]
        if traced_action == action:
            return self._trace_action(action, received, state)
        return self._repeat_action(action, traced_action, received, state)

    def _trace_action(self, action: Action, received: Tensor | None, state: PipelineStepState) -> Tensor | None:
        key = action.stage, action.micro
        is_forward = action.kind == "F"
        self._remember_message(key, "input" if is_forward else "output gradient", received)
        mark = self._work.mark()
        messages = self._count_message_bytes(key)
        with nullcontext(MemoryChange()) if self._meter is None else self._meter.recording_change() as change:
            output = super().execute(action, received, state)
        self._remember_message(key, "output" if is_forward else "input gradient", output)
        losses = state.losses_by_micro_batch[action.micro][-1] if is_forward else None
        self._remember_message(key, "losses", losses)
        change.net.update(messages)
        change.net.subtract(self._count_message_bytes(key))
        self._traced[action] = _TracedPass(
            self._work.since(mark), change, _make_empty_like(output), _make_empty_like(losses)
        )
        if action.kind == "I":
            self._last_input_half = key
        return output

    def _repeat_action(
        self, action: Action, traced_action: Action, received: Tensor | None, state: PipelineStepState
    ) -> Tensor | None:
        traced = self._traced[traced_action]
        messages = self._messages[action.stage, action.micro]
        if self._meter is not None:
            self._meter.repeat_change(traced.memory)
        self._work.repeat(traced.work)
        output = traced.output()
        if (losses := traced.losses()) is not None:
            state.losses_by_micro_batch[action.micro].append(losses)
            messages.update(input=received, output=output)
            return output
        messages["output gradient"] = received
        kept_messages = (
            self._messages_left_to_weights.get((traced_action.stage, traced_action.micro), frozenset())
            if action.kind == "I"
            else set()
        )
        for name in messages.keys() - kept_messages:
            del messages[name]
        # The output of an input half is the attribute `grad` of its input.
        if "input" in kept_messages:
            messages["input gradient"] = output
        return output

    def _remember_message(self, key: tuple[int, int], name: str, message: Tensor | None) -> None:
        """Remember a message of a traced pass."""
        if message is not None:
            self._storages[key][name] = ref(message.untyped_storage())

    def _live_messages(self, key: tuple[int, int]) -> dict[str, torch.UntypedStorage]:
        """Return the messages of traced passes that are still in memory."""
        storages = {name: reference() for name, reference in self._storages[key].items()}
        return {name: storage for name, storage in storages.items() if storage is not None}

    def _count_message_bytes(self, key: tuple[int, int]) -> Counter[str]:
        """Return the recorded bytes of messages in memory, by part."""
        size_bytes = Counter[str]()
        if self._meter is not None:
            for storage in self._live_messages(key).values():
                if (part := self._meter.part_by_storage.get(storage._cdata)) is not None:
                    size_bytes[part] += self._meter.bytes_by_storage[storage._cdata]
        return size_bytes


def _make_empty_like(tensor: Tensor | None) -> Callable[[], Tensor | None]:
    """Return a function that creates a tensor like this one, without keeping it."""
    if tensor is None:
        return lambda: None
    return partial(torch.empty, tensor.shape, dtype=tensor.dtype)
