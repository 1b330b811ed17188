"""Activations of a part of a model on one rank, without a run."""

from __future__ import annotations

from phalanx.cost.exact import activation_memory
from phalanx.cost.exact.activation_bytes import ActivationBytes
from phalanx.cost.exact.activation_memory import StageBlocks
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.precision import BF16_PRECISIONS, Precision

ONE_RANK = Layout()


def activation_bytes(
    spec: ModelSpec,
    batch: int,
    seq_len: int,
    precision: Precision,
    layout: Layout = ONE_RANK,
    autocast: bool = False,
    masked: bool = False,
    stage: StageBlocks | None = None,
    on_cuda: bool = False,
) -> ActivationBytes:
    """Return the activations of a micro-batch; autocast has no effect on fp32 and fp64."""
    shape = ForwardShape(
        batch=batch,
        sequence=seq_len,
        precision=precision,
        layout=layout,
        autocast=autocast and precision in BF16_PRECISIONS,
        masked=masked,
        on_cuda=on_cuda,
    )
    return activation_memory.activation_bytes(spec, shape, stage)
