"""Bytes at the moments of a step at which a rank may hold most: parts of memory have their peaks at different times.

Gradients come while activations go, buffers of communication are there when they are used, and what the update needs
when activations are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.cost.exact.activation_memory import ActivationBytes, PeakInFlightBytes
from phalanx.cost.exact.comm_buffers import CommBufferPeak
from phalanx.cost.exact.parameter_shapes import Shape, is_muon_parameter, max_shard_elements
from phalanx.cost.exact.rank_tensors import RankTensors
from phalanx.cost.formulas.collectives import Strategy
from phalanx.cost.precision import STATE_BYTES
from phalanx.spec.run import RunSpec


@dataclass(frozen=True)
class PersistentMemory:
    """Bytes that stay while activations and buffers come and go."""

    always: int
    """Parameters and optimizer state."""
    gradients: int
    """Of a step, at its end."""
    before: int
    """Of gradients, what is there before the backward pass of a step's last micro-batch, and until the end."""
    summed: int
    """Of gradients, what micro-batches of a pipeline add up in, before the step's end."""
    update: int
    """What the optimizer needs beside its state."""


def memory_peaks(
    kept: PersistentMemory, activations: ActivationBytes, exchange: int, sent: list[CommBufferPeak]
) -> Iterator[int]:
    """When the backward pass begins, at every moment of sending, when it ends, and at the update. `exchange` is what
    ranks that share a model have on its way inside blocks."""
    begin = max(activations.at_backward_start, activations.within_blocks() + exchange)
    yield kept.always + kept.before + begin + _gathered(sent)
    for each in sent:
        there = max(kept.before, round(each.backward_fraction * kept.gradients))
        inside = activations.within_blocks(each.backward_fraction) + exchange
        yield (
            kept.always
            + there
            + (activations.between_blocks(each.backward_fraction) if each.between else inside)
            + each.bytes
        )
    last = max(kept.before, kept.gradients)
    yield kept.always + last + activations.within_blocks(1.0) + exchange
    yield kept.always + last + kept.update


def pipeline_memory_peaks(
    kept: PersistentMemory, passes: PeakInFlightBytes, links: int, sent: list[CommBufferPeak]
) -> Iterator[int]:
    """The same of a pipeline, of a rank's passes without and with gradients, and at the step's end. `links` is what is
    on its way between stages."""
    working = links + _gathered(sent)
    yield kept.always + passes.forward_only + working
    yield kept.always + kept.summed + passes.with_gradients + working
    for each in sent:
        yield kept.always + kept.summed + each.bytes
    yield kept.always + kept.gradients + kept.update


def optimizer_step_bytes(run: RunSpec, rank: RankTensors, strategy: Strategy) -> int:
    """What an optimizer needs while it steps: SGD with decay a copy of the gradients; Muon of the largest group of
    matrices of one shape the momenta that it makes, and about five copies in what it computes in (`train.muon`). Fused
    AdamW needs nothing."""
    if strategy == "parameter_server" or run.optimizer.name == "adamw":
        return 0
    kept, owned = STATE_BYTES[run.training.precision], dict[str, int]()
    for shapes, shards in ((rank.dense, rank.shards), (rank.expert, rank.expert_shards)):
        ranks = 1 if strategy == "ddp" else shards
        owned |= {name: max_shard_elements(shape, ranks) for name, shape in shapes.items()}
    if run.optimizer.name == "sgd":
        return kept * sum(owned.values()) if run.optimizer.weight_decay else 0
    groups = Counter[Shape]()
    for name, shape in {**rank.dense, **rank.expert}.items():
        groups[shape] += owned[name] if is_muon_parameter(name, shape) else 0
    computed = 8 if run.training.precision == "fp64" else 2
    return (kept + 5 * computed) * max(groups.values(), default=0)


def _gathered(sent: list[CommBufferPeak]) -> int:
    return max((each.bytes for each in sent if each.backward_fraction == 0), default=0)
