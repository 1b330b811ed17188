"""Bytes of parameters, gradients and optimizer state under each strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.cost.exact.parameters import ParameterCount, count_parameters
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.precision import COMPUTE_BYTES, STATE_BYTES, Precision
from phalanx.spec.layout import MAX_BF16_SUMS
from phalanx.spec.run import OptimizerSpec, RunSpec

Optimizer = Literal["sgd", "sgd-momentum", "adamw", "muon"]


NUM_OPTIMIZER_STATES: dict[Optimizer, int] = {"sgd": 0, "sgd-momentum": 1, "adamw": 2, "muon": 1}
"""Numbers that an optimizer keeps per parameter: none, a momentum, Adam's two moments, Muon's momentum."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state by part: of one parameter, or times a count, of a whole model."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes that training holds from step to step."""
        return self.parameters + self.gradients + self.optimizer

    def __mul__(self, count: int) -> StateBytes:
        return StateBytes(self.parameters * count, self.gradients * count, self.optimizer * count)

    def __add__(self, other: StateBytes) -> StateBytes:
        optimizer = self.optimizer + other.optimizer
        return StateBytes(self.parameters + other.parameters, self.gradients + other.gradients, optimizer)


PUBLISHED_MIXED_PRECISION_ADAM = StateBytes(parameters=2, gradients=2, optimizer=12)
"""The 16 bytes of the literature (ZeRO, arXiv 1910.02054, section 3.1): half-precision parameters and
gradients, and an fp32 master copy among the optimizer's state. Phalanx's bf16 has 16 too, cut otherwise."""


def state_bytes(optimizer: Optimizer, precision: Precision) -> StateBytes:
    """Bytes per parameter that Phalanx keeps; multiply by a count of parameters.

    Parameters, gradients and state are fp32 for bf16 and fp32 alike: the bf16 copies that the products read
    are made when needed and dropped. fp64 doubles everything. "muon" is a parameter that Muon itself trains.
    """
    bytes_per_element = STATE_BYTES[precision]
    return StateBytes(bytes_per_element, bytes_per_element, NUM_OPTIMIZER_STATES[optimizer] * bytes_per_element)


def model_state_bytes(count: ParameterCount, optimizer: Optimizer, precision: Precision) -> StateBytes:
    """Bytes of a model's whole state. With muon, AdamW trains what is not a matrix inside a block."""
    if optimizer != "muon":
        return state_bytes(optimizer, precision) * count.total
    adamw_parameters = count.total - count.block_matrices
    return state_bytes("muon", precision) * count.block_matrices + state_bytes("adamw", precision) * adamw_parameters


def checkpoint_bytes(run: RunSpec) -> int:
    """Bytes of one checkpoint: parameters and optimizer state."""
    state = model_state_bytes(count_parameters(run.model), optimizer_kind(run.optimizer), run.training.precision)
    return state.parameters + state.optimizer


def checkpoint_space_needed_bytes(run: RunSpec, existing: int) -> int:
    """Bytes that the checkpoints of a run still need beside those that are there: the oldest goes when a new one has
    come."""
    return max(1, run.checkpoint.keep + 1 - existing) * checkpoint_bytes(run)


def optimizer_kind(spec: OptimizerSpec) -> Optimizer:
    """What a run's optimizer is called here."""
    if spec.name == "sgd":
        return "sgd-momentum" if spec.momentum else "sgd"
    return spec.name


def sharded_state_bytes(
    strategy: Strategy, precision: Precision, total: int, owned: int, states: int, micro_batches: int = 1
) -> StateBytes:
    """Return the state that one rank keeps of a model of `total` parameters, of which it owns `owned`, and keeps
    `states` numbers of optimizer state, with so many micro-batches a step.

    Bytes per parameter with Adam on N ranks (`total` 1, `owned` 1/N, `states` 2/N; of ddp 2):

        |              | bf16      | fp32      |
        |--------------|-----------|-----------|
        | ddp          | 16        | 16        |
        | zero1        | 4 + 12/N  | 8 + 8/N   |
        | zero2        | 2 + 14/N  | 4 + 12/N  |
        | zero3, hsdp  | 16/N      | 16/N      |

    In bf16, zero1 and zero2 keep model and gradients in bf16, and fp32 rows, which they train, among the optimizer's
    state: the published figures (ZeRO, arXiv 1910.02054, section 3.1 and figure 1). In fp32 and fp64 those rows are
    the model's own. Where micro-batches are many, both add up bf16 gradients in fp32: 2 bytes more of each.
    """
    compute_size = COMPUTE_BYTES[precision]
    state_size = STATE_BYTES[precision]
    gradient_size = state_size if micro_batches > MAX_BF16_SUMS else compute_size
    master_row_bytes = state_size * owned if precision == "bf16" else 0
    match strategy:
        case "zero1":
            return StateBytes(compute_size * total, gradient_size * total, master_row_bytes + state_size * states)
        case "zero2":
            return StateBytes(compute_size * total, gradient_size * owned, master_row_bytes + state_size * states)
        case "zero3" | "hsdp":
            return StateBytes(state_size * owned, state_size * owned, state_size * states)
        case "ddp" | "parameter_server":
            return StateBytes(state_size * total, state_size * total, state_size * states)
