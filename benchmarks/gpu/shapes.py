"""Models and batches of the speed benchmark, for every trainer."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.harness import real_or_dry
from benchmarks.shapes import OPTIMIZER, SEED, llama
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import DataSpec, RunSpec, TrainingSpec

WARM_UP, STEPS = 4, 12
"""Number of warm-up steps and of timed steps."""


@dataclass(frozen=True)
class Shape:
    """Llama model and its batch."""

    model: ModelSpec
    seq_len: int
    micro_batch: int
    accumulation: int = 2

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.seq_len * self.micro_batch * self.accumulation

    def run(self, compile: bool, documents: bool = False, precision: str = "bf16") -> RunSpec:
        """Return the run of these steps; `documents` masks the documents of a row."""
        return RunSpec(
            model=self.model,
            data=DataSpec(mask_documents=documents),
            training=TrainingSpec(
                steps=WARM_UP + STEPS,
                seq_len=self.seq_len,
                tokens_per_step=self.tokens,
                precision=precision,
                compile=compile,
                seed=SEED,
            ),
            optimizer=OPTIMIZER,
            layout=Layout(micro_batch_size=self.micro_batch),
        )


SHAPES = {
    "1.1B": Shape(llama(16, 2048, 16, 8, 8192, 32000, 4096), seq_len=4096, micro_batch=4),
    "124M": Shape(llama(12, 768, 12, 12, 2048, 50304, 1024), seq_len=1024, micro_batch=32),
}
SHAPES = real_or_dry(SHAPES, {"dry": Shape(llama(2, 256, 4, 2, 512, 1024, 128), seq_len=128, micro_batch=4)})
