"""A transformer language model, described: GPT-2/3, Llama 2/3, Qwen3 and their mixtures of experts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from phalanx.spec.base import Spec, divisors, require

MAX_FLASH_HEAD_DIM = 256


class RopeSpec(Spec):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and the published ways of stretching it."""

    theta: float = Field(10_000.0, gt=0)
    """Base of the rotation frequencies."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """linear: position interpolation (arXiv 2306.15595); llama3: Llama 3.1's; yarn: arXiv 2309.00071."""
    factor: float = Field(1.0, ge=1)
    """How many times longer the context is than in the first training."""
    original_context: int = Field(8192, gt=0)
    """Context of the first training, in tokens (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """Frequencies that turn less often than this within the original context are stretched whole (llama3)."""
    high_freq_factor: float = 4.0
    """Frequencies that turn more often than this within the original context are kept (llama3)."""
    beta_fast: float = 32.0
    """Turns within the original context from which on a frequency is kept (yarn)."""
    beta_slow: float = 1.0
    """Turns within the original context below which a frequency is stretched whole (yarn)."""


class MoESpec(Spec):
    """A mixture of experts in place of the MLP."""

    num_experts: int = Field(gt=1, examples=[8])
    """Routed experts per layer (E)."""
    top_k: int = Field(gt=0, examples=[2])
    """Experts that each token is sent to."""
    expert_ffn_size: int = Field(gt=0, examples=[256])
    """Inner width of one expert."""
    num_shared_experts: int = Field(0, ge=0)
    """Experts that every token passes through (DeepSeekMoE, arXiv 2401.06066)."""
    num_leading_dense_layers: int = Field(0, ge=0)
    """Leading layers that keep a dense MLP."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Router score: softmax over experts, or sigmoid per expert (DeepSeek-V3)."""
    normalize_top_k: bool = True
    """Whether the chosen experts' weights are scaled to sum to one."""
    balance_loss_coef: float = Field(0.01, ge=0)
    """Weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961, eq. 4)."""
    balance_loss_scope: Literal["sequence", "micro_batch"] = "sequence"
    """Tokens over which the balance is measured. "sequence" gives the same loss in every layout; "micro_batch"
    is the paper's, and depends on how the batch is cut."""
    z_loss_coef: float = Field(0.001, ge=0)
    """Weight of the router z-loss (ST-MoE, arXiv 2202.08906, eq. 5)."""
    capacity_factor: float | None = Field(None, gt=0, examples=[1.25])
    """Choices of an expert in a sequence beyond this many times an even share of them are dropped: the latest tokens
    lose (GShard, arXiv 2006.16668, section 2.2). By default none is."""
    bias_update_rate: float = Field(0.0, ge=0)
    """Step of the auxiliary-loss-free balancing by a bias on the router (arXiv 2408.15664); 0 is off."""

    @model_validator(mode="after")
    def _check(self) -> MoESpec:
        require(
            self.top_k <= self.num_experts,
            "top_k",
            self.top_k,
            problem=f"is more than moe.num_experts ({self.num_experts})",
            fix="lower it",
        )
        return self


class ModelSpec(Spec):
    """A decoder-only transformer.

    Symbols in docstrings: D width, H heads, F ffn, V vocab, L layers, T tokens.
    """

    preset: str | None = Field(None, examples=["tiny"])
    """A known model (`phalanx info --list`) whose values the other fields override."""
    from_hf: str | None = Field(None, examples=["path/to/model"])
    """A directory with a Hugging Face config.json and safetensors: the shape, and the weights training starts from.
    With model.moe over a dense model every expert begins as its MLP (sparse upcycling, arXiv 2212.05055): at first it
    says the same with normalize_top_k; without, each such layer says that times the sum of the chosen scores."""
    upcycle_reinit_fraction: float = Field(0.0, ge=0, le=1)
    """Of a dense from_hf: the part of each expert's inner width that is drawn anew, so that experts differ
    (Drop-Upcycling, arXiv 2502.19261); 0 copies."""
    vocab_size: int = Field(gt=1)
    """Rows of the embedding (V); at least the tokenizer's vocabulary."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream (D)."""
    num_layers: int = Field(gt=0)
    """Blocks of attention and MLP (L)."""
    num_heads: int = Field(gt=0)
    """Query heads (H)."""
    num_kv_heads: int = Field(0, ge=0)
    """Key/value heads (grouped-query attention); 0 means as many as query heads."""
    head_dim: int = Field(0, ge=0)
    """Width of one head; 0 means width / heads."""
    ffn_hidden_size: int = Field(gt=0)
    """Inner width of the MLP (F)."""
    max_seq_len: int = Field(gt=0)
    """Longest sequence the model is made for, in tokens."""
    sliding_window: int | None = Field(None, gt=0, examples=[4096])
    """Tokens that attention looks back over in layers with a window (Mistral). There is no windowed attention yet:
    longer sequences cannot be trained."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Before attention, before the MLP, and before the head."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance that a norm divides by."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """Of the MLP: gated (swiglu: three matrices), or plain GELU, exact or by tanh (GPT-2)."""
    position_embedding: Literal["rope", "learned"] = "rope"
    """Rotary (rope), or an embedding learned for each of `max_seq_len` positions (GPT-2)."""
    rope: RopeSpec = RopeSpec()
    """The rotary embedding's numbers."""
    bias: bool = False
    """Biases in every linear layer but the head (GPT-2); not with SwiGLU."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm on queries and keys: per head (Qwen3) or over all heads together (OLMoE)."""
    tie_embeddings: bool = False
    """Whether the head uses the embedding's matrix."""
    moe: MoESpec | None = None
    """Experts in place of the MLP; without this table there are none."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, table: object) -> object:
        """Fill kv_heads and head_dim, so that every reader sees their true values."""
        if not isinstance(table, dict):
            return table
        table = dict(table)
        heads = table.get("num_heads")
        width = table.get("hidden_size")
        if type(heads) is int and heads > 0:
            table["num_kv_heads"] = table.get("num_kv_heads") or heads
            if type(width) is int and not table.get("head_dim"):
                allowed = [d for d in divisors(width) if d <= 2 * heads] if width > 0 else []
                require(
                    width % heads == 0,
                    "num_heads",
                    heads,
                    problem=f"does not divide model.hidden_size ({width})",
                    fix=f"use one of {', '.join(map(str, allowed))}, or set model.head_dim",
                )
                table["head_dim"] = width // heads
        return table

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        allowed = ", ".join(map(str, divisors(self.num_heads)))
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            problem=f"does not divide model.num_heads ({self.num_heads})",
            fix=f"use one of {allowed}",
        )
        if self.activation == "swiglu":
            require(
                not self.bias, "bias", self.bias, problem="is not supported with SwiGLU", fix="set model.bias = false"
            )
        if self.position_embedding == "rope":
            is_even = self.head_dim % 2 == 0
            require(is_even, "head_dim", self.head_dim, problem="must be even for rotary positions", fix="make it even")
        require(
            not self.upcycle_reinit_fraction or (self.from_hf is not None and self.moe is not None),
            "upcycle_reinit_fraction",
            self.upcycle_reinit_fraction,
            problem="is of experts that begin as a dense model's MLP",
            fix="set model.from_hf and model.moe, or remove it",
        )
        if self.moe is not None:
            require(
                self.moe.num_leading_dense_layers < self.num_layers,
                "moe.num_leading_dense_layers",
                self.moe.num_leading_dense_layers,
                problem=f"leaves no layer of model.num_layers ({self.num_layers}) with experts",
                fix=f"use at most {self.num_layers - 1}",
            )
            require(
                self.activation == "swiglu",
                "activation",
                self.activation,
                problem="experts are SwiGLU",
                fix='set model.activation = "swiglu"',
            )
        return self

    def is_moe_layer(self, layer: int) -> bool:
        """Whether this layer (from 0) has experts in place of an MLP."""
        return self.moe is not None and layer >= self.moe.num_leading_dense_layers


def is_flash_head_dim(head_dim: int) -> bool:
    """Return whether flash attention on GPUs takes heads of this size (PyTorch's
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    return head_dim % 8 == 0 and head_dim <= MAX_FLASH_HEAD_DIM
