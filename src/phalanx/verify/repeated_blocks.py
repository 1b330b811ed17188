"""Trace equal blocks of a stage once: the first two and the last two of each kind run, and the others repeat them.

A repeated block creates tensors for its output, its input, their gradients, and the gradients of its parameters, one
after the other as in the traced block. Everything around a block therefore really runs: the hooks of FSDP on modules,
and the hooks of ZeRO and DDP on gradients. All other tensors of the block, its collectives and its FLOPs are only
counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from phalanx.model.transformer import Transformer
from phalanx.parallel.data.ddp import DDP
from phalanx.parallel.pipeline.stage_module import StageModule
from phalanx.schedule.registry import representative_schedule
from phalanx.spec.precision import BF16_PRECISIONS
from phalanx.train.learner import Learner
from phalanx.train.profiling.memory_meter import MemoryChange, MemoryMeter
from phalanx.train.profiling.step_profiler import StepRecorders
from phalanx.verify.repeated_work import RepeatedWork, Work

NUM_TRACED = 2
"""Number of traced blocks of a kind at either end of a stage, because the outermost block has other neighbors."""
MAX_DEPTH = 8
"""Maximum depth to which attributes of blocks are compared, because functions and objects may refer to each other."""
OUTPUT_GRADIENTS = ("output gradient", "auxiliary gradient")


@dataclass(frozen=True)
class _TensorShape:
    """Size, strides and dtype of a tensor, from which an empty tensor is created."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    part: str | None = None
    """Part of the memory to which the tensor counts; None if it is not known."""

    @classmethod
    def of(cls, tensor: Tensor, part: str | None = None) -> _TensorShape:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, part=part)

    def empty(self, meter: MemoryMeter | None) -> Tensor:
        if meter is None or self.part is None:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        part_before, meter.part_of_new = meter.part_of_new, self.part
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        meter.part_of_new = part_before
        return tensor


@dataclass(kw_only=True)
class _PassPart:
    """A section of a block's forward or backward pass, which ends with its results."""

    results: list[_TensorShape]
    """Shapes of the block's outputs, of the gradient of a parameter, or of the gradient of the input."""
    parameter: int | None = None
    """Index of the parameter whose gradient is the result."""
    work: Work | None = None
    """Recorded collectives and FLOPs; None for a placeholder in the first step, before any part was recorded."""
    memory: MemoryChange = field(default_factory=MemoryChange)
    """Change of memory by all tensors except the results and the tensors outside the block."""
    released: Sequence[str] = ()
    """Names of the tensors outside the block that this part reads last."""
    moved_to: Mapping[str, str] = field(default_factory=dict)
    """New memory parts by name of tensors outside the block, such as communication for a collective's operand."""
    moves_others: bool = False
    """True if a collective in the block made gradients of parameters count as gradients."""
    buffers: Sequence[int] = ()
    """Indices of the block's buffers to which this part writes; the meter counts buffers from the first write on."""


@dataclass
class _EqualBlocks:
    """Equal blocks of one stage, in their order."""

    blocks: list[nn.Module]
    forward: _PassPart | None = None
    """The forward pass that was recorded last."""
    backward: list[_PassPart] = field(default_factory=list)
    """The parts of the backward pass that was recorded last."""
    input: ref[torch.UntypedStorage] | None = None
    """The input of the recorded forward pass."""


class RepeatedBlocks:
    """The blocks of a model, most of which repeat a recorded equal block."""

    def __init__(self, learner: Learner) -> None:
        """Replace the forward passes of blocks that are not traced, and of the blocks that they repeat."""
        self.learner = learner
        self.meter: MemoryMeter | None = None
        self.work = RepeatedWork(learner.strategy, None)
        self.num_repeated = 0
        """Number of blocks that are not traced."""
        for stage in _repeatable_stages(learner):
            by_signature = defaultdict[object, list[nn.Module]](list)
            for block in stage:
                by_signature[_structural_signature(block)].append(block)
            for blocks in by_signature.values():
                if len(blocks) > 2 * NUM_TRACED:
                    self.num_repeated += len(blocks) - 2 * NUM_TRACED
                    self._replace_forward_passes(_EqualBlocks(blocks))

    def record_with(self, recorders: StepRecorders | None) -> None:
        """Use these recorders in the next step; None if the step is not recorded."""
        self.meter = None if recorders is None else recorders.memory
        self.work = RepeatedWork(self.learner.strategy, recorders)

    @property
    def num_created(self) -> int:
        """Number of the next tensor that the meter sees; 0 in a step that is not recorded."""
        return 0 if self.meter is None else self.meter.num_created

    def _replace_forward_passes(self, equal_blocks: _EqualBlocks) -> None:
        for index, block in enumerate(equal_blocks.blocks):
            if index == NUM_TRACED - 1:
                forward = partial(self._record_forward, equal_blocks, block, block.forward)
            elif index == len(equal_blocks.blocks) - NUM_TRACED:
                forward = partial(self._record_backward, equal_blocks, block, block.forward)
            elif NUM_TRACED <= index < len(equal_blocks.blocks) - NUM_TRACED:
                forward = partial(self._repeat_forward, equal_blocks, block, block.forward)
            else:
                continue
            block.forward = forward

    def _record_forward(self, equal_blocks: _EqualBlocks, block: nn.Module, forward: Any, x: Tensor, *args: Any) -> Any:
        recording = _Recording(self, {"input": ref(x.untyped_storage())}, is_own=lambda _: False)
        outputs = forward(x, *args)
        equal_blocks.forward = recording.end(_present_tensors(outputs), buffers=list(block.buffers()))
        equal_blocks.input = ref(x.untyped_storage())
        return outputs

    def _record_backward(
        self, equal_blocks: _EqualBlocks, block: nn.Module, forward: Any, x: Tensor, *args: Any
    ) -> Any:
        recorder = _BackwardRecorder(self, equal_blocks, list(block.parameters()), x=x)
        (x,) = _CallOnGradient.apply(recorder.end, x)
        outputs = _present_tensors(forward(x, *args))
        recorder.end_forward()
        outputs = _CallOnGradient.apply(recorder.begin, *outputs)
        return outputs if len(outputs) == 2 else (*outputs, None)

    def _repeat_forward(self, equal_blocks: _EqualBlocks, block: nn.Module, forward: Any, x: Tensor, *args: Any) -> Any:
        parameters = list(block.parameters())
        parts = equal_blocks.backward
        if not parts:
            assert self.meter is None, "only the first step, which is not recorded, has unknown parts"
            # DDP creates its buckets in the order in which gradients become ready.
            if isinstance(self.learner.strategy, DDP):
                return forward(x, *args)
            trained = [index for index, parameter in enumerate(parameters) if parameter.requires_grad]
            parts = [_PassPart(results=[_TensorShape.of(parameters[index])], parameter=index) for index in trained]
            parts.append(_PassPart(results=[_TensorShape.of(x)]))
        assert equal_blocks.forward is not None
        assert equal_blocks.input is not None
        is_kept = equal_blocks.input() is not None
        repeated = _RepeatedBackward(blocks=self, equal_blocks=equal_blocks, parts=parts, outside={"input": x})
        repeated.count(equal_blocks.forward)
        if not is_kept:
            del repeated.outside["input"]
        buffers = list(block.buffers())
        for index in equal_blocks.forward.buffers:
            # The meter counts the result of any operation.
            buffers[index].view_as(buffers[index])
        token = x
        for index in reversed(range(len(parts))):
            parameter = parts[index].parameter
            token = _RepeatedPart.apply(token, None if parameter is None else parameters[parameter], repeated, index)
        outputs = _RepeatedOutputs.apply(token, repeated)
        return outputs if len(outputs) == 2 else (*outputs, None)


class _Recording:
    """The recording of one part of a block."""

    def __init__(
        self, blocks: RepeatedBlocks, outside: dict[str, ref[torch.UntypedStorage]], is_own: Callable[[int], bool]
    ) -> None:
        """Start to record.

        `outside` has the storages of tensors outside the block by name. `is_own` returns whether the tensor of a number
        was created in the block.
        """
        self.meter = blocks.meter
        self.work = blocks.work
        self.mark = self.work.mark()
        self.outside = outside
        self.outside_bytes = {name: self._bytes_by_part(storage()) for name, storage in outside.items()}
        self.is_own = is_own
        self.stack = ExitStack()
        self.change = MemoryChange()
        self.first_number = blocks.num_created
        if self.meter is not None:
            self.change = self.stack.enter_context(self.meter.recording_change())

    def end(self, results: Sequence[Tensor], parameter: int | None = None, buffers: Sequence[Tensor] = ()) -> _PassPart:
        """Stop to record, and return the part with these results."""
        self.stack.close()
        net = self.change.net
        moves = [moved for number, moved in self.change.moves if number < self.first_number and not self.is_own(number)]
        result_bytes = [self._bytes_by_part(result.untyped_storage()) for result in results]
        numbers = self.meter.numbers if self.meter is not None else {}
        written = [
            index
            for index, buffer in enumerate(buffers)
            if numbers.get(buffer.untyped_storage()._cdata, -1) >= self.first_number
        ]
        for by_part in (*moves, *result_bytes, *(self._bytes_by_part(buffers[i].untyped_storage()) for i in written)):
            net.subtract(by_part)
        released = [name for name, storage in self.outside.items() if storage() is None]
        for name in released:
            del self.outside[name]
            net.update(self.outside_bytes[name])
        after = {name: self._bytes_by_part(storage()) for name, storage in self.outside.items()}
        return _PassPart(
            results=[
                _TensorShape.of(result, part=next(iter(by_part), None))
                for result, by_part in zip(results, result_bytes, strict=True)
            ],
            parameter=parameter,
            work=self.work.since(self.mark),
            memory=self.change,
            released=released,
            moved_to={name: part for name in after for part in after[name].keys() - self.outside_bytes[name].keys()},
            moves_others=bool(moves),
            buffers=written,
        )

    def _bytes_by_part(self, storage: torch.UntypedStorage | None) -> Counter[str]:
        key = None if storage is None else storage._cdata
        if self.meter is None or key not in self.meter.part_by_storage:
            return Counter()
        return Counter({self.meter.part_by_storage[key]: self.meter.bytes_by_storage[key]})


class _BackwardRecorder:
    """Recorder of the parts of a block's backward pass.

    The hooks of strategies on a gradient run between two parts, and are not recorded.
    """

    def __init__(
        self, blocks: RepeatedBlocks, equal_blocks: _EqualBlocks, parameters: Sequence[Tensor], x: Tensor
    ) -> None:
        """Create the recorder before the forward pass of `x`, whose backward pass it will record."""
        self.blocks = blocks
        self.equal_blocks = equal_blocks
        self.parameters = parameters
        self.outside = {"input": ref(x.untyped_storage())}
        self.first_number = blocks.num_created
        self.own: list[range] = []
        """Numbers of the tensors of the forward pass, and of each part."""
        self.results: set[int] = set()
        """Numbers of the gradients of parameters."""
        self.parts: list[_PassPart] = []
        self.recording: _Recording | None = None
        self.hooks = ExitStack()

    def end_forward(self) -> None:
        """Note the end of the forward pass."""
        self.own.append(range(self.first_number, self.blocks.num_created))

    def begin(self, *output_gradients: Tensor) -> None:
        """Start to record with the gradients of the block's outputs."""
        for name, gradient in zip(OUTPUT_GRADIENTS, output_gradients, strict=False):
            self.outside[name] = ref(gradient.untyped_storage())
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                # DDP's hooks, which were registered before, are on the same node.
                node = get_gradient_edge(parameter).node
                self.hooks.callback(node.register_prehook(partial(self._end_part, index)).remove)
                self.hooks.callback(node.register_hook(self._begin_part).remove)
        self._begin_part()

    def _begin_part(self, *_: Any) -> None:
        self.recording = _Recording(self.blocks, self.outside, self._is_block_tensor)

    def _is_block_tensor(self, number: int) -> bool:
        return number not in self.results and any(number in numbers for numbers in self.own)

    def _end_part(self, parameter: int | None, gradients: Sequence[Tensor]) -> None:
        assert self.recording is not None
        self.parts.append(self.recording.end(gradients[:1], parameter))
        self.own.append(range(self.recording.first_number, self.blocks.num_created))
        self.recording = None
        storage = gradients[0].untyped_storage()
        # Autograd may drop the gradient in the next part.
        self.outside["parameter gradient"] = ref(storage)
        if self.blocks.meter is not None:
            self.results.add(self.blocks.meter.numbers.get(storage._cdata, -1))

    def end(self, input_gradient: Tensor) -> None:
        """Record the last part, which ends with the gradient of the block's input."""
        self._end_part(None, [input_gradient])
        self.equal_blocks.backward = self.parts
        self.hooks.close()


@dataclass(eq=False, kw_only=True)
class _RepeatedBackward:
    """The backward pass of a block that repeats the recorded pass of an equal block."""

    blocks: RepeatedBlocks
    equal_blocks: _EqualBlocks
    parts: list[_PassPart]
    """The parts known in the forward pass, in the order of the backward pass."""
    outside: dict[str, Tensor]
    """Tensors outside the block that it still keeps: its input, and the gradients of its outputs."""
    saved: Counter[str] = field(default_factory=Counter)
    """Bytes of the block's own tensors, by part.

    Tensors that autograd functions keep after their pass live until the graph is dropped, and this object with it.
    """

    def __post_init__(self) -> None:
        """Subtract the remaining bytes from the meter when this object is dropped."""
        if self.blocks.meter is not None:
            finalize(self, self.blocks.meter.bytes_by_part.subtract, self.saved)

    def count(self, part: _PassPart) -> None:
        """Count the work and the memory of a recorded part again, except its results."""
        blocks = self.blocks
        if part.work is not None:
            blocks.work.repeat(part.work)
        if blocks.meter is not None:
            blocks.meter.repeat_change(part.memory)
            self.saved.update(part.memory.net)
        for name in part.released:
            self.outside.pop(name, None)
        if blocks.meter is not None:
            for name, part_of_memory in part.moved_to.items():
                if name in self.outside:
                    blocks.meter.move(self.outside[name], part_of_memory)
            if part.moves_others:
                blocks.meter.reclassify_after_collective()

    def run_part(self, index: int) -> Tensor:
        """Count a part of the backward pass, and return its result."""
        part = self.parts[index]
        if part.work is not None:
            # The forward pass may have seen the parts of an earlier micro-batch.
            part = self.equal_blocks.backward[index]
            assert part.parameter == self.parts[index].parameter
        self.count(part)
        is_last_part = part.parameter is None
        if is_last_part:
            for name in OUTPUT_GRADIENTS:
                self.outside.pop(name, None)
        return part.results[0].empty(self.blocks.meter)


class _CallOnGradient(torch.autograd.Function):
    """Identity whose backward pass calls a function with the gradients."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        # Views would make FSDP2 warn.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.callback(*gradients)
        return None, *gradients


class _RepeatedPart(torch.autograd.Function):
    """A part of a backward pass. A chain of empty forward tensors keeps the parts in their order."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, parameter: Tensor | None, repeated: _RepeatedBackward, index: int) -> Tensor:
        ctx.run_part = partial(repeated.run_part, index)
        ctx.is_of_parameter = parameter is not None
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        result = ctx.run_part()
        return (gradient, result, None, None) if ctx.is_of_parameter else (result, None, None, None)


class _RepeatedOutputs(torch.autograd.Function):
    """The outputs of a repeated block, whose gradients start the backward pass."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, repeated: _RepeatedBackward) -> tuple[Tensor, ...]:
        ctx.outside = repeated.outside
        assert repeated.equal_blocks.forward is not None
        return tuple(shape.empty(repeated.blocks.meter) for shape in repeated.equal_blocks.forward.results)

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor, None]:
        ctx.outside.update(zip(OUTPUT_GRADIENTS, output_gradients, strict=False))
        return output_gradients[0].new_empty(0), None


def _present_tensors(outputs: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Return the output of a block, and its auxiliary loss if it has one."""
    return [tensor for tensor in outputs if tensor is not None]


def _repeatable_stages(learner: Learner) -> list[list[nn.Module]]:
    """Return the blocks of each of this rank's stages; none if blocks cannot be repeated.

    Blocks that read tensors of others are traced. Four options prevent repetition, too. Activation offload fetches the
    input of another block. FSDP units inside blocks gather their parameters there. Split backward passes continue a
    block's graph later. If blocks recompute under autocast, the cast copies of weights outlive the block until the end
    of the forward pass.
    """
    module = learner.module
    layout = learner.run.layout
    if not isinstance(module, Transformer) or layout.activation_checkpointing == "offload":
        return []
    if module.kv_sources or module.spec.per_layer_input_size:
        return []
    is_autocast = learner.strategy.data_parallel.autocast and learner.run.training.precision in BF16_PRECISIONS
    if is_autocast and layout.activation_checkpointing != "none":
        return []
    if layout.pp > 1 and representative_schedule(layout).splits_backward:
        return []
    blocks = dict(module.blocks.named_children())
    if any(isinstance(part, FSDPModule) for block in blocks.values() for part in [*block.modules()][1:]):
        return []
    if not isinstance(module, StageModule):
        return [list(blocks.values())]
    return [[blocks[str(layer)] for layer in layers] for layers in module.layers.values()]


def _structural_signature(block: nn.Module) -> object:
    """Return a value that is equal for equal blocks: their modules with attributes, and the shapes of their tensors."""
    attributes = [{name: _describe_attribute(value) for name, value in vars(part).items()} for part in block.modules()]
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
    return repr(block), repr(attributes), repr(shapes)


def _describe_attribute(value: object, depth: int = MAX_DEPTH) -> object:
    """Return a value that is equal for equal attributes: numbers, and the names of functions with their closures."""
    if isinstance(value, bool | int | float | str | None | Enum | torch.dtype):
        return value
    parts: Sequence[object] = ()
    if isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, Mapping):
        # Hooks have a different key in each block.
        parts = list(value.values())
    elif isinstance(value, partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, MethodType):
        parts = value.__func__, value.__self__
    elif isinstance(value, FunctionType):
        parts = value.__module__, value.__qualname__, [cell.cell_contents for cell in value.__closure__ or ()]
    elif is_dataclass(value):
        parts = [getattr(value, dataclass_field.name) for dataclass_field in fields(value)]
    return type(value).__qualname__, [_describe_attribute(part, depth - 1) for part in parts] if depth else "..."
