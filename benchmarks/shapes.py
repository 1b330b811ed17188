"""Models, batches and optimizer of the comparison of trainers."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import DataSpec, OptimizerSpec, RunSpec, TrainingSpec

RANKS = 2
"""World size of layouts that are not in MORE_RANKS."""
MORE_RANKS = {"hsdp": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"data_parallel": "ddp"},
    "zero1": {"data_parallel": "zero1"},
    "zero2": {"data_parallel": "zero2"},
    "fsdp": {"data_parallel": "zero3"},
    "hsdp": {"data_parallel": "hsdp", "dp_shard": 2},
    "zero2, CPU offload": {"data_parallel": "zero2", "offload": "cpu"},
    "zero2, disk offload": {"data_parallel": "zero2", "offload": "nvme", "offload_directory": tempfile.gettempdir()},
    "parameter server": {"data_parallel": "parameter_server"},
    "tp2": {"tp": 2},
    "tp2, no sequence parallelism": {"tp": 2, "sequence_parallel": False},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
}
"""Layouts of Phalanx by their names in the tables."""
OPTIMIZER = OptimizerSpec(learning_rate=1e-3, warmup_steps=0, lr_schedule="none")
SEED = 1234
STEPS = 1_000_000
"""Maximum number of steps, which no benchmark reaches."""


@dataclass(frozen=True)
class Shape:
    """A Llama-like model in fp32 and its batch."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    micro_batch: int
    """Sequences per rank in one forward pass."""
    sequences: int
    """Sequences in one optimizer update, over all ranks."""
    sequence: int = 512

    @cached_property
    def model(self) -> ModelSpec:
        return llama(self.layers, self.width, self.heads, self.kv_heads, self.ffn, self.vocab, self.sequence)

    @property
    def tokens(self) -> int:
        """Tokens in one optimizer update, over all ranks."""
        return self.sequences * self.sequence

    @property
    def accumulation(self) -> int:
        return self.sequences // RANKS // self.micro_batch

    def run(self, layout: str) -> RunSpec:
        """Return the run of Phalanx with this shape."""
        return RunSpec(
            model=self.model,
            data=DataSpec(mask_documents=False),
            training=TrainingSpec(
                steps=STEPS, seq_len=self.sequence, tokens_per_step=self.tokens, precision="fp32", seed=SEED
            ),
            optimizer=OPTIMIZER,
            layout=Layout(**LAYOUTS[layout], micro_batch_size=self.micro_batch),
        )


def llama(layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int) -> ModelSpec:
    """Return the model of this shape."""
    return ModelSpec(
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_seq_len=seq_len,
    )


SHAPES = {
    "tiny": Shape(layers=6, width=256, heads=16, kv_heads=16, ffn=768, vocab=2048, micro_batch=4, sequences=16),
    "small": Shape(layers=8, width=512, heads=8, kv_heads=4, ffn=1536, vocab=8192, micro_batch=2, sequences=8),
}
