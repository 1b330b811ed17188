"""Gradient noise scale: its estimate on a linear model, and its norms in the layouts of the real trainer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.data.loader import prefetch
from phalanx.runs.metrics import read_metrics
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from phalanx.train import worker
from phalanx.train.callbacks.gradient_noise import GradientNoise, estimate_signal_and_noise, gradient_norm_of_rows
from phalanx.train.create_run import create_run
from phalanx.train.rank_options import RankOptions
from tests.helpers.small_runs import DENSE, make_trainer, small_run, training_trajectory
from tests.integration.test_phases import phased_run


def test_estimates_are_those_of_linear_regression() -> None:
    """With x ~ N(0, I) of d dimensions, y = x · w + s e, and weights off by u, the gradient is G = u, with
    tr Σ = (d + 1) |u|² + s² d (fourth moments of a Gaussian)."""
    dimensions, noise, draws, large, small = 12, 0.7, 20_000, 32, 4
    generator = torch.Generator().manual_seed(0)
    error = torch.linspace(-1, 1, dimensions, dtype=torch.float64)
    x = torch.randn(draws, large, dimensions, generator=generator, dtype=torch.float64)
    e = torch.randn(draws, large, generator=generator, dtype=torch.float64)
    gradients = x * (x @ error - noise * e)[..., None]
    squares = [gradients[:, :size].mean(1).square().sum(-1).tolist() for size in (small, large)]
    estimates = [estimate_signal_and_noise(*pair, small, large) for pair in zip(*squares, strict=True)]
    signal, trace = torch.tensor(estimates, dtype=torch.float64).mean(0).tolist()
    expected_signal = float(error.square().sum())
    expected_trace = (dimensions + 1) * expected_signal + noise**2 * dimensions
    assert signal == pytest.approx(expected_signal, rel=0.03)
    assert trace == pytest.approx(expected_trace, rel=0.03)


def test_means_start_again_with_another_length_also_after_a_resume() -> None:
    def scale_of(noise: GradientNoise, small_norm: float, seq_len: int) -> float:
        return noise._with_scale({"grad_norm": 1.0}, small_norm, 1, 8, seq_len)["gradient_noise_scale"]

    before = GradientNoise(every=1)
    scale_of(before, 2.0, seq_len=32)
    noise = GradientNoise(every=1)
    noise.load_state_dict(before.state_dict())
    assert scale_of(noise, 1.5, seq_len=32) != scale_of(GradientNoise(every=1), 1.5, seq_len=32)
    assert scale_of(noise, 1.5, seq_len=64) == scale_of(GradientNoise(every=1), 1.5, seq_len=64)


def train_with_noise(run: RunSpec) -> tuple[list[float], list[tuple[float, float]], list[float | None]]:
    """Train, and measure in every step; return norms of the first row, losses and norms, and noise scales."""
    trainer = make_trainer(run)
    batches = prefetch(trainer.loader, 0, run.training.steps)
    batch = trainer.loader.step(0)
    small_norms = [float(gradient_norm_of_rows(trainer, batch, 1)) for _ in range(2)]
    step = GradientNoise(every=1).around(trainer, trainer.launch_step)
    records = [step(batches)() for _ in range(run.training.steps)]
    trajectory = [(record["loss"], record["grad_norm"]) for record in records]
    return small_norms, trajectory, [record.get("gradient_noise_scale") for record in records]


def norm_of_one_row(run: RunSpec) -> float:
    """Return the gradient norm of a step of one row, the first one of the run."""
    training = run.training.replace(tokens_per_step=run.training.seq_len)
    return training_trajectory(run.replace(training=training))[0][1]


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"data_parallel": "ddp"},
    {"data_parallel": "zero2", "micro_batch_size": 2},
    {"data_parallel": "zero3"},
    {"pp": 2, "micro_batch_size": 1},
    {"tp": 2},
    {"cp": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}={v}" for k, v in layout.items()) or "one")
def test_norms_are_those_of_one_row_and_training_is_unchanged(
    layout: dict[str, Any], documents: Path, tmp_path: Path
) -> None:
    run = small_run(documents, tmp_path, {"layout": layout, "training.steps": 3, "optimizer.max_grad_norm": 0.3})
    alone = small_run(documents, tmp_path, {"training.steps": 3, "optimizer.max_grad_norm": 0.3})
    norm = norm_of_one_row(alone)
    trajectory = training_trajectory(alone)
    expected_scales = train_with_noise(alone)[2]
    assert any(expected_scales)
    for small_norms, measured, scales in rank_pool(2 if layout else 1).run(train_with_noise, run):
        assert small_norms == pytest.approx([norm, norm], rel=1e-9)
        assert measured == [pytest.approx(values, rel=1e-9) for values in trajectory]
        assert scales == [scale if scale is None else pytest.approx(scale, rel=1e-6) for scale in expected_scales]


def test_noise_is_measured_with_batches_of_each_phase(documents: Path, tmp_path: Path) -> None:
    run = phased_run(documents, tmp_path, {"model": DENSE})
    assert train_with_noise(run)[1] == [pytest.approx(values, rel=1e-12) for values in training_trajectory(run)]


def test_noise_scale_is_in_metrics_and_its_mean_survives_a_resume(text: Path, tmp_path: Path) -> None:
    def scales_of(folder: str, *lengths: int) -> list[tuple[int, float]]:
        for number, steps in enumerate(lengths):
            changes = {"training.steps": steps, "evaluation.tokens": 64, "metrics.gradient_noise_every": 3}
            changes |= {"optimizer.learning_rate": 1e-4, "optimizer.warmup_steps": 0, "optimizer.lr_schedule": "none"}
            run = small_run(text, tmp_path / folder, changes)
            directory = create_run(run, 1, resume=number > 0)
            assert worker.run_rank(directory, RankOptions(resume=True, trust=True)) == 0
        records = read_metrics(directory)
        return [(line["step"], line["gradient_noise_scale"]) for line in records if "gradient_noise_scale" in line]

    uninterrupted = scales_of("whole", 12)
    # The first estimates of |G|² may be negative: they are part of the mean, which has no scale yet.
    assert {12} < {step for step, _ in uninterrupted} <= {3, 6, 9, 12}
    assert all(second != first for (_, first), (_, second) in pairwise(uninterrupted))
    assert scales_of("resumed", 7, 12) == [(step, pytest.approx(scale, rel=1e-9)) for step, scale in uninterrupted]
