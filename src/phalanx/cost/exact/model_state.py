"""Bytes of parameters, gradients and optimizer state under each strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.cost.exact.parameters import ParameterCount, count_parameters
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES
from phalanx.spec.layout import MAX_BF16_SUMS
from phalanx.spec.parts.operations import NF4_BLOCK, NF4_BLOCK_BYTES
from phalanx.spec.precision import BF16_PRECISIONS, Precision
from phalanx.spec.run import OptimizerSpec, RunSpec

Optimizer = Literal["sgd", "sgd-momentum", "adamw", "muon"]


NUM_OPTIMIZER_STATES: dict[Optimizer, int] = {"sgd": 0, "sgd-momentum": 1, "adamw": 2, "muon": 1}
"""Numbers of optimizer state per parameter: none, a momentum, Adam's two moments, Muon's momentum."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state by part, of one parameter or of several."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes that training retains from step to step."""
        return self.parameters + self.gradients + self.optimizer

    def __mul__(self, count: int) -> StateBytes:
        return StateBytes(self.parameters * count, self.gradients * count, self.optimizer * count)

    def __add__(self, other: StateBytes) -> StateBytes:
        optimizer = self.optimizer + other.optimizer
        return StateBytes(self.parameters + other.parameters, self.gradients + other.gradients, optimizer)


PUBLISHED_MIXED_PRECISION_ADAM = StateBytes(parameters=2, gradients=2, optimizer=12)
"""The 16 bytes per parameter of the literature (ZeRO, arXiv 1910.02054, section 3.1).

Half-precision parameters and gradients, with an fp32 master copy in the optimizer state. Phalanx's bf16 also has 16
bytes, split differently.
"""


def state_bytes(optimizer: Optimizer, precision: Precision) -> StateBytes:
    """Return the bytes per parameter of Phalanx's training state, to be multiplied by a count.

    Parameters, gradients and optimizer state are fp32 for bf16 and fp32: the bf16 copies that products read are
    temporary. fp64 doubles everything. "muon" is for a parameter that Muon itself trains.
    """
    bytes_per_element = STATE_BYTES[precision]
    return StateBytes(bytes_per_element, bytes_per_element, NUM_OPTIMIZER_STATES[optimizer] * bytes_per_element)


def model_state_bytes(count: ParameterCount, optimizer: Optimizer, precision: Precision) -> StateBytes:
    """Return the bytes of a full model's state.

    With "muon", AdamW trains all parameters except matrices inside blocks. Carried and frozen ones have no gradients.

    Args:
        count: Parameters of the model.
    """
    quantized_bytes = count.quantized // NF4_BLOCK * NF4_BLOCK_BYTES
    in_floating_point = count.carried + count.frozen - count.quantized
    carried = StateBytes(STATE_BYTES[precision] * in_floating_point + quantized_bytes, 0, 0)
    if optimizer != "muon":
        return state_bytes(optimizer, precision) * count.trained + carried
    adamw = state_bytes("adamw", precision) * (count.trained - count.block_matrices)
    return state_bytes("muon", precision) * count.block_matrices + adamw + carried


def checkpoint_bytes(run: RunSpec) -> int:
    """Return the bytes of one checkpoint: parameters and optimizer state."""
    state = model_state_bytes(count_parameters(run.model), optimizer_kind(run.optimizer), run.training.precision)
    return state.parameters + state.optimizer


def checkpoint_space_needed_bytes(run: RunSpec, existing: int) -> int:
    """Return the disk bytes that a run's future checkpoints need, given `existing` checkpoints.

    Checkpoints that are not kept are deleted after a new one has been written. With an object store, the disk has the
    newest, the one that is being uploaded and the one that is being written.
    """
    if run.checkpoint.directory is not None:
        return 3 * checkpoint_bytes(run)
    keep = run.checkpoint.keep
    every = run.training.steps // keep.every if keep.every and run.training.has_decided_steps else 0
    kept = keep.last + keep.best + every
    return max(1, kept + 1 - existing) * checkpoint_bytes(run)


def optimizer_kind(spec: OptimizerSpec) -> Optimizer:
    """Return the optimizer kind of a run's optimizer settings."""
    if spec.name == "sgd":
        return "sgd-momentum" if spec.momentum else "sgd"
    return spec.name


def zero_gradient_bytes(precision: Precision, micro_batches: int) -> int:
    """Return the bytes of a gradient that ZeRO-1 or 2 accumulates: in fp32 if there are many micro-batches."""
    return (STATE_BYTES if micro_batches > MAX_BF16_SUMS else COMPUTE_BYTES)[precision]


def sharded_state_bytes(
    strategy: Strategy, precision: Precision, total: int, owned: int, states: int, micro_batches: int = 1
) -> StateBytes:
    """Return the state of one rank of a model.

    Bytes per parameter with Adam on N ranks (`total` 1, `owned` 1/N, `states` 2/N; for ddp 2):

        |              | bf16      | fp32      |
        |--------------|-----------|-----------|
        | ddp          | 16        | 16        |
        | zero1        | 4 + 12/N  | 8 + 8/N   |
        | zero2        | 2 + 14/N  | 4 + 12/N  |
        | zero3, hsdp  | 16/N      | 16/N      |

    In bf16, zero1 and zero2 keep the model and gradients in bf16, and the fp32 rows that they train in the optimizer
    state: the published figures (ZeRO, arXiv 1910.02054, section 3.1 and figure 1). In fp32 and fp64 those rows are the
    model's own. With more than `MAX_BF16_SUMS` micro-batches, both accumulate bf16 gradients in fp32: 2 more bytes per
    gradient.

    Args:
        strategy: Data-parallel strategy.
        total: Parameters of the model.
        owned: Parameters that the rank owns.
        states: Numbers of optimizer state on the rank.
        micro_batches: Micro-batches per step.
    """
    compute_size = COMPUTE_BYTES[precision]
    state_size = STATE_BYTES[precision]
    gradient_size = zero_gradient_bytes(precision, micro_batches)
    master_row_bytes = state_size * owned if precision in BF16_PRECISIONS else 0
    match strategy:
        case "zero1":
            return StateBytes(compute_size * total, gradient_size * total, master_row_bytes + state_size * states)
        case "zero2":
            return StateBytes(compute_size * total, gradient_size * owned, master_row_bytes + state_size * states)
        case "zero3" | "hsdp":
            return StateBytes(state_size * owned, state_size * owned, state_size * states)
        case "ddp" | "parameter_server":
            return StateBytes(state_size * total, state_size * total, state_size * states)
