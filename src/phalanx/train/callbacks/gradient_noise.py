"""Gradient noise scale: the batch from which more tokens in a step bring little, also called critical batch size.

Source: S. McCandlish et al., An empirical model of large-batch training (arXiv 1812.06162), appendix A.1. The gradient
of B examples is the true one, G, and noise of covariance Σ / B: its squared norm is |G|² + tr Σ / B on average. The
norms at two sizes B therefore give |G|² and tr Σ. Both are noisy, so that their running means are divided, not the
estimates of a step. The noise scale is tr Σ / |G|².

An example is a row: tokens of one row are not independent. The large batch is that of the step. The small one is its
first rows: the step is run with the other targets ignored, and its gradients are dropped. The shapes, and so kernels
and messages, are those of a step in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from phalanx.data.loader import rank_rows
from phalanx.data.packing import IGNORE_INDEX, Batch
from phalanx.runs.metrics import MetricsRecord
from phalanx.spec.phases import phase_at
from phalanx.train.callbacks.callback import Callback
from phalanx.train.checkpoint.state import rng_state, set_rng_state
from phalanx.train.step_metrics import ReadRecord

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

SMALL_SHARE = 8
"""The small batch is this part of the rows of a step: the smaller, the less do both norms have in common."""
DECAY = 0.9
"""Decay rate of the running means, per measurement."""


def estimate_signal_and_noise(small_square: float, large_square: float, small: int, large: int) -> tuple[float, float]:
    """Return unbiased estimates of |G|² and tr Σ from the squared norms of the mean gradients of two batches.

    `small` and `large` are their sizes (equations A.2 and A.3)."""
    signal = (large * large_square - small * small_square) / (large - small)
    noise = (small_square - large_square) / (1 / small - 1 / large)
    return signal, noise


class GradientNoise(Callback):
    """Records `gradient_noise_scale`, in tokens, every `metrics.gradient_noise_every` steps."""

    reads_weights = False

    def __init__(self, every: int) -> None:
        self.every = every
        self.signal = 0.0
        self.noise = 0.0
        """Running means of |G|² and tr Σ, both times the same factor, which their ratio does not have."""
        self.seq_len = 0
        """Tokens of the rows of the means (0: none yet). They start again with another length, which has another Σ."""

    def around(
        self, trainer: Trainer, step: Callable[[Iterator[Batch]], ReadRecord]
    ) -> Callable[[Iterator[Batch]], ReadRecord]:
        """Return a step that measures the noise, when it is due, before it trains on the same rows."""

        def run_step(batches: Iterator[Batch]) -> ReadRecord:
            if (trainer.step + 1) % self.every:
                return step(batches)
            batch = next(batches)
            trainer.enter_phase(phase_at(trainer.phases, trainer.step))
            rows = trainer.batch.global_batch_size
            small = max(1, rows // SMALL_SHARE)
            with trainer.record_pause("gradient noise"):
                small_norm = gradient_norm_of_rows(trainer, batch, small)
            read = step(iter([batch]))
            seq_len = trainer.phase.run.training.seq_len
            return lambda: self._with_scale(read(), float(small_norm), small, rows, seq_len)

        return run_step

    def _with_scale(
        self, record: MetricsRecord, small_norm: float, small: int, rows: int, seq_len: int
    ) -> MetricsRecord:
        """Return the record of a step with the noise scale, unless no norm is finite, or noise hides the gradient."""
        if not (math.isfinite(small_norm) and math.isfinite(record["grad_norm"])):
            return record
        signal, noise = estimate_signal_and_noise(small_norm**2, record["grad_norm"] ** 2, small, rows)
        if seq_len != self.seq_len:
            self.signal = self.noise = 0.0
            self.seq_len = seq_len
        self.signal = DECAY * self.signal + (1 - DECAY) * signal
        self.noise = DECAY * self.noise + (1 - DECAY) * noise
        if self.signal <= 0 or self.noise <= 0:
            return record
        return record | {"gradient_noise_scale": self.noise / self.signal * seq_len}

    def state_dict(self) -> dict[str, Any]:
        """Return the running means."""
        return {"signal": self.signal, "noise": self.noise, "seq_len": self.seq_len}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running means."""
        self.signal = state["signal"]
        self.noise = state["noise"]
        self.seq_len = state.get("seq_len", 0)  # not in checkpoints of earlier versions


def gradient_norm_of_rows(trainer: Trainer, batch: Batch, rows: int) -> Tensor:
    """Return the norm of the mean gradient of the first rows of a global batch, of which this rank has `batch`.

    Weights, gradients and random state are unchanged."""
    own_rows = rank_rows(trainer.batch.global_batch_size, trainer.mesh.dp_rank, trainer.batch.dp_size)
    targets = np.where((own_rows < rows)[:, None], batch.targets, IGNORE_INDEX)
    random_state = rng_state()
    sums = trainer.forward_backward(trainer.micro_batches(replace(batch, targets=targets)))
    norm = trainer.strategy.reduce(sums.packed).norm
    trainer.strategy.zero_grad()
    set_rng_state(random_state)
    return norm
