"""Sizes of a forward pass on one rank, which determine its activations and traffic."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.precision import COMPUTE_BYTES
from phalanx.spec.attention_backend import AttentionBackend, model_backend
from phalanx.spec.batch import needs_all_logits
from phalanx.spec.chunks import logits_chunk_rows
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.operations import Value
from phalanx.spec.precision import BF16_PRECISIONS, Precision
from phalanx.spec.resolved_run import ResolvedRun

INDEX_BYTES = 8
"""Bytes of an index of a token, target, position or rank in an order: int64."""
STATISTIC_BYTES = 4
"""Bytes of a mean, 1 / std or log-sum-exp that a CUDA kernel saves: fp32."""


@dataclass(frozen=True, kw_only=True)
class ForwardShape:
    """Sizes of a forward pass on one rank; those of numbers are in bytes."""

    batch: int
    sequence: int
    """Tokens of full sequences, of which context-parallel ranks have shards."""
    precision: Precision
    layout: Layout
    autocast: bool
    """True if bf16 is autocast over fp32 parameters (several replicas of DDP), not parameters in bf16 (ZeRO)."""
    masked: bool
    """True if documents in a sequence are hidden from each other."""
    on_cuda: bool = False
    """True for CUDA's kernels, which save other tensors than a CPU's."""
    all_logits: bool = False
    """True if the loss is a function of all logits (`spec.batch.needs_all_logits`)."""
    recomputes_logits: bool = False
    """True if the backward pass computes logits again if there are chunks, as that of a loss of preferences."""

    has_teacher: bool = False
    """True if the loss is one of distillation, which computes the gradients of the head in the forward pass."""

    @property
    def tp(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.layout.tp

    @property
    def tokens(self) -> int:
        """N, the tokens that products and attention process."""
        return self.batch * self.sequence // self.layout.cp

    @property
    def residual_tokens(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.tokens // self.tp if self.layout.sequence_parallel else self.tokens

    def max_local_count(self, count: int) -> int:
        """Return the maximum over ranks of local heads, columns or rows of the vocabulary."""
        return max(1, -(-count // self.tp))

    def logits_rows(self, spec: ModelSpec) -> int:
        """Return the number of tokens whose logits are in memory at once."""
        if self.all_logits:
            return self.tokens
        return logits_chunk_rows(self.tokens, self.max_local_count(spec.vocab_size), self.compute_bytes)

    def computes_head_gradients(self, spec: ModelSpec) -> bool:
        """Return whether the forward pass computes the gradients of the head's input and matrix with the loss."""
        return self.has_teacher or self.num_logits_chunks(spec) > 1

    def num_logits_chunks(self, spec: ModelSpec) -> int:
        """Return the number of chunks in which the head and the loss are computed."""
        return -(-self.tokens // self.logits_rows(spec))

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        return COMPUTE_BYTES[self.precision]

    @property
    def high_precision_bytes(self) -> int:
        """Bytes of a number where accuracy counts: norms, softmax, rotary tables, the router. At least fp32."""
        return max(4, self.compute_bytes)

    def has_dense_mask(self, spec: ModelSpec, head_dim: int, chunk: int | None) -> bool:
        """Return whether attention with heads of a width hides documents, or chunks, by a mask of all pairs of tokens.

        `chunk` is the number of tokens of a chunk, if there are several in a document."""
        is_ring = self.layout.cp > 1 and self.layout.cp_method == "ring"
        backend = model_backend(
            spec,
            self.sequence,
            "cuda" if self.on_cuda else "cpu",
            half_precision=self.compute_bytes <= 2,
            head_dim=head_dim,
            documents=self.masked or (chunk is not None and chunk < self.sequence),
        )
        return backend == AttentionBackend.SDPA_MASKED and not is_ring

    @property
    def residual_bytes(self) -> int:
        """Bytes of a number in the residual stream, which autocast leaves in the parameters' fp32."""
        return self.high_precision_bytes if self.autocast else self.compute_bytes

    def num_tokens(self, value: Value) -> int:
        """Return the number of tokens of a value on this rank, with copies."""
        return value.copies * (self.residual_tokens if value.tokens == "residual" else self.tokens)

    def width(self, value: Value) -> int:
        """Return the numbers per token of a value on this rank."""
        return value.cut.width_on_rank(self.tp) if value.cut else value.width

    def number_bytes(self, value: Value) -> int:
        """Return the bytes of one of a value's numbers."""
        sizes = {"residual": self.residual_bytes, "compute": self.compute_bytes, "high": self.high_precision_bytes}
        return sizes[value.numbers]

    def value_bytes(self, value: Value) -> int:
        """Return the bytes of a value on this rank."""
        return self.num_tokens(value) * self.width(value) * self.number_bytes(value)

    def operand_bytes(self, value: Value) -> int:
        """Return the bytes of a value in a product, whose inputs autocast casts."""
        return self.num_tokens(value) * self.width(value) * self.compute_bytes

    def weight_copies(self, count: int) -> int:
        """Return the bytes of the casts of `count` fp32 weights, which products save under autocast."""
        return count * self.compute_bytes if self.autocast else 0


def forward_shape(resolved: ResolvedRun) -> ForwardShape:
    """Return the sizes of the forward pass of a run's micro-batch."""
    run = resolved.run
    return ForwardShape(
        batch=resolved.batch.micro_batch_size,
        sequence=run.training.seq_len,
        precision=run.training.precision,
        layout=run.layout,
        autocast=resolved.strategy in ("ddp", "parameter_server") and run.training.precision in BF16_PRECISIONS,
        masked=run.data.mask_documents,
        on_cuda=run.cluster.uses_cuda,
        all_logits=needs_all_logits(run),
        recomputes_logits=run.preference is not None,
        has_teacher=run.distillation is not None,
    )
