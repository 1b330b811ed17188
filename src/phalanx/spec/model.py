"""Description of a decoder-only transformer, dense or with experts."""

from __future__ import annotations

import math
from itertools import cycle, islice
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic.json_schema import SkipJsonSchema

from phalanx.spec.activations import NUM_INPUTS, ActivationName
from phalanx.spec.base import LocalPath, Spec, divisors
from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from phalanx.spec.layer_pattern import parse_layers
from phalanx.spec.parts.mixers import Mamba2, MixerSpec
from phalanx.spec.tuning import TuningSpec

MAX_FLASH_HEAD_DIM = 256


class RopeSpec(Spec):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its published context extensions."""

    theta: float = Field(10_000.0, gt=0)
    """Base of the rotation frequencies."""
    fraction: float = Field(1.0, gt=0, le=1)
    """Share of a head's channels, the first ones, that are rotated (GPT-NeoX, Phi-4-mini)."""
    scaling: Literal["none", "linear", "llama3", "yarn", "proportional"] = "none"
    """linear: position interpolation (arXiv 2306.15595); llama3: Llama 3.1's; yarn: arXiv 2309.00071. proportional:
    frequencies are those of all channels, and `fraction` of these are rotated, from both halves (Gemma 4)."""
    factor: float = Field(1.0, ge=1)
    """Ratio of the context length to that of the first training."""
    original_context: int = Field(8192, gt=0)
    """Context length of the first training, in tokens (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer rotations than this within the original context are fully scaled (llama3)."""
    high_freq_factor: float = 4.0
    """Frequencies with more rotations than this within the original context are unchanged (llama3)."""
    beta_fast: float = 32.0
    """Minimum rotations within the original context of an unchanged frequency (yarn)."""
    beta_slow: float = 1.0
    """Rotations within the original context below which a frequency is fully scaled (yarn)."""
    attention_factor: float | None = Field(None, gt=0, examples=[1.0])
    """Factor of queries and keys (yarn); by default 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Round the channels between which frequencies are partly scaled to whole ones (yarn)."""

    def width(self, head_dim: int) -> int:
        """Return the number of a head's channels that are rotated."""
        return head_dim if self.scaling == "proportional" else int(head_dim * self.fraction)


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """Return the factor of queries and keys for a context that is `factor` times as long (arXiv 2309.00071, 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


class QueryTemperatureSpec(Spec):
    """Factor of queries at position p of a document, 1 + scale log(1 + floor((p + offset) / interval)) (Llama 4).

    It keeps attention sharp over long contexts."""

    scale: float = Field(gt=0, examples=[0.1])
    """Growth with the logarithm."""
    interval: int = Field(gt=0, examples=[8192])
    """Positions with one factor; it is 1 in the first interval."""
    offset: int = Field(0, ge=0)
    """Number added to positions: 1 in Llama 4."""


class BlockIndexerSpec(Spec):
    """The indexer of sparse attention, which chooses the blocks of keys that a query sees (MiniMax-M3).

    In sequences of up to `top_blocks` blocks it chooses all of them, and attention is dense. Phalanx trains such
    sequences only. The tensors of the indexer are then loaded and saved with the model, and not trained."""

    num_heads: int = Field(gt=0, examples=[4])
    """Heads of its queries, each of which chooses for some heads of attention; they have one key together."""
    head_dim: int = Field(gt=0, examples=[128])
    """Width of a head."""
    block_size: int = Field(gt=0, examples=[128])
    """Keys of a block."""
    top_blocks: int = Field(gt=0, examples=[16])
    """Blocks that a query sees at most."""

    @property
    def max_tokens(self) -> int:
        """Tokens up to which sparse attention is dense."""
        return self.block_size * self.top_blocks


NO_ATTENTION: dict[str, object] = {
    "sliding_window": None,
    "attention_chunk": None,
    "attention_sinks": False,
    "attention_bias": "none",
    "attention_scale": None,
    "attention_clip": None,
    "attention_gate": "none",
    "attention_softcap": None,
    "qk_norm": "none",
    "values_from_keys": False,
    "value_norm": False,
    "value_head_dim": None,
    "value_scale": 1.0,
    "side_mixer": None,
    "query_temperature": None,
    "indexer": None,
    "position_embedding": "none",
    "rope": RopeSpec(),
}
"""Values of attention's fields in a layer with another mixer."""
QkNorm = Literal["none", "head", "full", "each_head", "rotated", "rotated_plain"]
"""Norms of queries and keys."""
NormPosition = Literal["before", "after", "both"]
"""Norms of the input of a residual branch, of its output, or of both."""
ACTIVATION_FIELDS = {
    "swiglu_alpha": "clamped_swiglu",
    "swiglu_limit": "clamped_swiglu",
    "silu_limit": "swiglu",
    "shared_silu_limit": "swiglu",
}
"""Fields of one activation."""
ATTENTION_FIELDS = {*NO_ATTENTION, "num_heads", "num_kv_heads", "head_dim"}
"""Fields of a kind of layers that describe attention."""


class MoESpec(Spec):
    """A mixture of experts in place of the MLP."""

    num_experts: int = Field(gt=1, examples=[8])
    """Routed experts per layer (E)."""
    top_k: int = Field(gt=0, examples=[2])
    """Experts per token."""
    expert_ffn_size: int = Field(gt=0, examples=[256])
    """Inner width of one expert."""
    num_shared_experts: int = Field(0, ge=0)
    """Experts that every token passes through (DeepSeekMoE, arXiv 2401.06066)."""
    shared_ffn_size: int | None = Field(None, gt=0, examples=[5632])
    """Inner width of a shared expert; by default that of the others."""
    shared_gate: bool = False
    """Multiply the output of shared experts by a sigmoid of the token (Qwen2-MoE)."""
    latent_size: int | None = Field(None, gt=0, examples=[1024])
    """Width of the tokens that routed experts receive and return, between two products; by default that of the model
    (Nemotron 3 Super)."""
    num_leading_dense_layers: int = Field(0, ge=0)
    """Leading layers that keep a dense MLP."""
    dense_branch: bool = False
    """A dense MLP on the same input in each layer, with norms of its own, whose output is added to that of the experts
    (Gemma 4)."""
    bias: bool = False
    """Biases of the router's product and of the routed experts' (gpt-oss)."""
    router_norm: bool = False
    """The router reads a norm of its own of the layer's input, and its logits are divided by the square root of D
    (Gemma 4)."""
    expert_scales: bool = False
    """A trained factor of each expert's weight (Gemma 4)."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Router score: softmax over experts, or sigmoid per expert (DeepSeek-V3)."""
    normalize_top_k: bool = True
    """Normalize the weights of the selected experts to sum to one."""
    weight_eps: float = Field(0.0, ge=0)
    """Added to the sum by which weights are divided to normalize them (LFM2-MoE)."""
    routed_scale: float = Field(1.0, gt=0)
    """Factor of these weights (DeepSeek-V3)."""
    weighs_inputs: bool = False
    """Multiply what the selected experts receive by these weights, not what they return (Llama 4)."""
    num_groups: int = Field(1, gt=0)
    """Equal groups of experts. A token chooses some groups, and among their experts."""
    group_scores: int = Field(2, ge=1, le=2)
    """Largest scores of a group whose sum rates it: 2 in DeepSeek-V3, 1 in DeepSeek-V2."""
    top_groups: int = Field(1, gt=0)
    """Groups per token among whose experts it chooses."""
    choice_bias: bool = False
    """A bias of each expert in the choice, but not in the weights, that is loaded with the model (DeepSeek-V3). It
    changes in training if `bias_update_rate` is set."""
    balance_loss_coef: float = Field(0.01, ge=0)
    """Weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961, eq. 4). Like the loss, it is summed over
    tokens and divided by the number of targets: where 90 % of the targets are ignored, it weighs ten times as much."""
    balance_loss_scope: Literal["sequence", "micro_batch"] = "sequence"
    """Tokens over which the balance is measured. "sequence" gives the same loss in every layout; "micro_batch" is the
    paper's, and depends on how the batch is split."""
    z_loss_coef: float = Field(0.001, ge=0)
    """Weight of the router z-loss (ST-MoE, arXiv 2202.08906, eq. 5)."""
    capacity_factor: float | None = Field(None, gt=0, examples=[1.25])
    """Capacity of an expert per sequence, as a multiple of an even share of the routed tokens. Beyond it, the latest
    tokens are dropped (GShard, arXiv 2006.16668, section 2.2). By default no token is dropped."""
    bias_update_rate: float = Field(0.0, ge=0)
    """Step of the auxiliary-loss-free balancing by a bias on the router (arXiv 2408.15664); 0 is off."""

    @model_validator(mode="after")
    def _check_top_k(self) -> MoESpec:
        if self.top_k > self.num_experts:
            problem = f"exceeds moe.num_experts ({self.num_experts})"
            raise UserError("top_k", self.top_k, problem, f"use at most {self.num_experts}")
        if self.num_groups > 1 and (self.num_experts % self.num_groups or self.num_experts < 2 * self.num_groups):
            problem = f"does not divide moe.num_experts ({self.num_experts}) into groups of two or more"
            raise UserError("num_groups", self.num_groups, problem, "use a divisor")
        if self.top_groups > self.num_groups or self.top_k > self.top_groups * self.num_experts // self.num_groups:
            problem = f"leaves fewer than moe.top_k ({self.top_k}) experts"
            if self.top_groups > self.num_groups:
                problem = f"exceeds moe.num_groups ({self.num_groups})"
            raise UserError("top_groups", self.top_groups, problem, "use another number of groups")
        if self.shared_gate and self.latent_size:
            problem = "cannot be combined with moe.latent_size"
            raise UserError("shared_gate", True, problem, "remove one of them")
        if not self.num_shared_experts and (self.shared_gate or self.shared_ffn_size):
            field = "shared_gate" if self.shared_gate else "shared_ffn_size"
            problem = "has no effect without shared experts"
            raise UserError(field, getattr(self, field), problem, "set moe.num_shared_experts, or remove it")
        return self

    @property
    def shared_width(self) -> int:
        """Inner width of all shared experts together."""
        return self.num_shared_experts * (self.shared_ffn_size or self.expert_ffn_size)

    @property
    def has_choice_bias(self) -> bool:
        """True if the router has a bias of each expert."""
        return self.choice_bias or self.bias_update_rate > 0


class MtpSpec(Spec):
    """Multi-token prediction: layers after the last one that predict further tokens in training.

    The first reads the output of the model's last norm, each other one that of the layer before, and the embedding of
    the next token. They share embedding and head. Source: DeepSeek-V3, arXiv 2412.19437, section 2.2."""

    layers: int = Field(1, gt=0)
    """Layers, each of which predicts one token further."""
    loss_coef: float = Field(0.1, gt=0)
    """Weight of the mean of their losses: 0.3 in DeepSeek-V3, 0.1 in the last third of its training."""
    kind: str | None = Field(None, examples=["full"])
    """Kind of the layers, as in `layers`; by default that of the last one."""


class KindSpec(Spec):
    """Layers of a kind that `layers` names. A field that is not set is that of the model."""

    name: str = Field(pattern=r"^[A-Za-z_]\w*$", examples=["full"])
    """Name of the kind, of letters, digits and underscores."""
    num_heads: int | None = Field(None, gt=0)
    """Query heads."""
    num_kv_heads: int | None = Field(None, gt=0)
    """Key/value heads."""
    head_dim: int | None = Field(None, gt=0)
    """Width of one head."""
    ffn_hidden_size: int | None = Field(None, gt=0)
    """Inner width of the MLP."""
    sliding_window: Annotated[int, Field(gt=0)] | Literal[False] | None = None
    """Keys that a query sees at most, itself included; false: all earlier tokens of its document."""
    attention_chunk: Annotated[int, Field(gt=0)] | Literal[False] | None = None
    """Tokens of a document that see each other; false: all earlier ones."""
    attention_sinks: bool | None = None
    """A learned logit per head in the denominator of attention's softmax."""
    qk_norm: QkNorm | None = None
    """Norm of queries and keys."""
    position_embedding: Literal["rope", "none"] | None = None
    """Rotary embedding, or none (NoPE, arXiv 2305.19466)."""
    rope: RopeSpec | None = None
    """Parameters of the rotary embedding, in place of all of `[model.rope]`."""
    values_from_keys: bool | None = None
    """Values are the products of keys, before the norm and the rotation of these."""
    norm_position: NormPosition | None = None
    """Norms of the inputs of attention and MLP, of their outputs, or both."""
    query_temperature: QueryTemperatureSpec | Literal[False] | None = None
    """Factor of queries that grows with their position; false: none."""
    indexer: BlockIndexerSpec | None = None
    """Indexer of sparse attention."""
    mixer: MixerSpec | Literal[False] | None = None
    """Mixer of tokens in place of attention; false: attention in place of the model's."""
    branches: Literal["mixer", "mlp"] | None = None
    """The only residual branch of the layer, in place of both (Nemotron-H)."""
    silu_limit: Annotated[float, Field(gt=0)] | None = None
    """Limit of silu(g) and u in the MLP or in routed experts."""
    shared_silu_limit: Annotated[float, Field(gt=0)] | None = None
    """Limit of silu(g) and u in shared experts."""
    moe: Literal[False] | None = None
    """false: an MLP in place of the model's experts."""


class ModelSpec(Spec):
    """A decoder-only transformer.

    Symbols in docstrings: D width, H heads, F ffn, V vocab, L layers, T tokens.

    Example:
        >>> model = phalanx.load_model_spec("llama3-8b")
        >>> model.hidden_size, model.num_layers, model.num_kv_heads
        (4096, 32, 8)
    """

    preset: str | None = Field(None, examples=["tiny"])
    """A known model (`phalanx info --list`) whose values the other fields override."""
    from_hf: LocalPath | None = Field(None, examples=["path/to/model"])
    """Directory with a Hugging Face config.json and safetensors, or a model on the hub, such as "org/name" or
    "org/name@revision": the shape and the initial weights. With model.moe over a dense model, every expert starts as
    its MLP (sparse upcycling, arXiv 2212.05055). With normalize_top_k the initial output equals the dense model's;
    without it, each MoE layer scales its output by the sum of the selected scores."""
    upcycle_reinit_fraction: float = Field(0.0, ge=0, le=1)
    """Share of each expert's inner width that is reinitialized when `from_hf` is dense, so that experts differ
    (Drop-Upcycling, arXiv 2502.19261); 0 copies."""
    vocab_size: int = Field(gt=1)
    """Rows of the embedding (V); at least the tokenizer's vocabulary."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream (D)."""
    num_layers: int = Field(gt=0)
    """Blocks of attention and MLP (L); by default as many as `layers` names."""
    num_heads: int = Field(gt=0)
    """Query heads (H)."""
    num_kv_heads: int = Field(0, ge=0)
    """Key/value heads (grouped-query attention); 0 means the number of query heads."""
    head_dim: int = Field(0, ge=0)
    """Width of one head; 0 means width / heads."""
    ffn_hidden_size: int = Field(gt=0)
    """Inner width of the MLP (F)."""
    max_seq_len: int = Field(gt=0)
    """Maximum sequence length of the model, in tokens."""
    sliding_window: int | None = Field(None, gt=0, examples=[4096])
    """Keys that a query sees at most, itself included (Mistral); by default all earlier tokens of its document."""
    full_attention_layers: tuple[int, ...] = Field((), strict=False, examples=[[5, 11]])
    """Layers (from 0) without the sliding window: every second in gpt-oss, every sixth in Gemma 3."""
    attention_chunk: int | None = Field(None, gt=0, examples=[8192])
    """Tokens of a document that see each other, and none of other chunks (Llama 4); by default a document is one."""
    attention_sinks: bool = False
    """A learned logit per head in the denominator of attention's softmax (gpt-oss)."""
    layers: str | None = Field(None, examples=["(window*5 full)*8"])
    """Names of the kinds of layers in their order, repeated up to `num_layers`; by default there is one kind."""
    kinds: tuple[KindSpec, ...] = Field((), strict=False)
    """Fields of the kinds that `layers` names. A kind without a table is as the model says."""
    mixer: MixerSpec | None = Field(None, examples=[{"kind": "short_convolution"}])
    """Mixer of tokens in place of attention, usually that of a kind of layers."""
    num_shared_kv_layers: int = Field(0, ge=0)
    """Layers, the last ones, whose attention has queries only: they read the keys and values of the last earlier layer
    of their kind (Gemma 4 E2B)."""
    shared_kv_ffn_size: int | None = Field(None, gt=0, examples=[12288])
    """Inner width of the MLP in these layers; by default that of the others."""
    per_layer_input_size: int | None = Field(None, gt=0, examples=[256])
    """Width of an input of each layer, from a second embedding and a product of the first one. After its MLP, the layer
    adds a product of it and of a gate to the residual stream (Gemma 4 E2B); by default there is none."""
    branches: Literal["both", "mixer", "mlp"] = "both"
    """Residual branches of a layer: a mixer and an MLP or experts, or one of these; usually that of a kind."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization of attention, of the MLP, and before the head."""
    norm_position: NormPosition = "before"
    """Norms of the inputs of attention and MLP, of their outputs (OLMo 2, arXiv 2501.00656), or both (Gemma 2)."""
    norm_parameters: Literal["all", "weight", "none"] = "all"
    """Parameters of norms: a weight, and of LayerNorm a bias; no bias (Cohere); or none (OLMo)."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance that a norm divides by."""
    norm_after_eps: float | None = Field(None, gt=0, examples=[1e-8])
    """The same in norms of the outputs of attention and MLP (Muse); by default `norm_eps`."""
    norm_offset: bool | Literal["layers"] = False
    """Norms multiply by 1 + weight, which is 0 at first (Gemma); "layers": all but the norm before the head (Muse)."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases in attention only: of queries, keys and values (Qwen2), or of its output too."""
    attention_scale: float | None = Field(None, gt=0, examples=[0.0884])
    """Factor of attention's scores; by default 1 / sqrt(head_dim)."""
    attention_clip: float | None = Field(None, gt=0, examples=[8.0])
    """Clamp queries, keys and values to this absolute value, after their norms (OLMo)."""
    attention_gate: Literal["none", "channel", "head", "head_softplus"] = "none"
    """Multiply each channel of attention's output by the sigmoid of a product of the layer's input (Qwen3-Next), or
    each head (Step 3.5, LFM3), or a head by the softplus (Laguna)."""
    attention_softcap: float | None = Field(None, gt=0, examples=[50.0])
    """Cap c of attention's scores: s becomes c tanh(s / c) (Gemma 2)."""
    values_from_keys: bool = False
    """Values are the products of keys, before the norm and the rotation of these (Gemma 4); requires `value_norm`."""
    value_norm: bool = False
    """RMSNorm of the values of each head, without a weight (Gemma 4)."""
    value_head_dim: int | None = Field(None, gt=0, examples=[128])
    """Width of a head's values, and of its output (MiMo-V2); by default `head_dim`."""
    query_temperature: QueryTemperatureSpec | None = None
    """Factor of queries that grows with their position (Llama 4, Ministral 3); without this table there is none."""
    indexer: BlockIndexerSpec | None = None
    """Indexer of sparse attention (MiniMax-M3), usually that of a kind; without this table attention is dense."""
    value_scale: float = Field(1.0, gt=0)
    """Factor of values (MiMo-V2, Falcon-H1)."""
    side_mixer: Mamba2 | None = None
    """Mixer of tokens parallel to attention: both read the output of one norm, and their outputs are added
    (Falcon-H1)."""
    embedding_scale: float = Field(1.0, gt=0)
    """Factor of the embedding's output, rounded to its precision (Gemma: the square root of D)."""
    embedding_norm: bool = False
    """RMSNorm of the embedding's output, without a weight (nanochat)."""
    parallel_residual: Literal["none", "one_norm", "two_norms"] = "none"
    """MLP or experts read the input of attention, and the outputs of both are added to it: with one norm of the input
    (Cohere), or two (GPT-NeoX)."""
    residual_scale: float = Field(1.0, gt=0)
    """Factor of what attention and MLP add to the residual stream (Granite)."""
    layer_scalars: bool = False
    """Multiply the output of each layer by a constant, which is loaded with the model and not trained (Gemma 4)."""
    logits_divisor: float = Field(1.0, gt=0)
    """Divisor of the logits (Granite)."""
    logits_softcap: float | None = Field(None, gt=0, examples=[30.0])
    """Cap c of the logits: z becomes c tanh(z / c) (Gemma 2)."""
    activation: ActivationName = "swiglu"
    """Activation of the MLP: gated (swiglu, geglu_tanh, clamped_swiglu: three matrices), or plain GELU, exact or with
    tanh (GPT-2), or the square of ReLU (Nemotron), or xIELU, with two trained numbers in each layer (Apertus).
    clamped_swiglu is g sigmoid(a g) (u + 1), where g is at most a limit, and u within it (gpt-oss)."""
    gate_scale: float = Field(1.0, gt=0)
    """Factor of the MLP's product that is the argument of a gated activation (Falcon-H1)."""
    up_scale: float = Field(1.0, gt=0)
    """Factor of the product that this multiplies, or of the only one."""
    swiglu_alpha: float = Field(1.702, gt=0)
    """Slope of the sigmoid, a (clamped_swiglu)."""
    swiglu_limit: float = Field(7.0, gt=0)
    """Limit of g and u (clamped_swiglu)."""
    silu_limit: float | None = Field(None, gt=0, examples=[7.0])
    """Limit of silu(g) and u in the MLP or in routed experts (swiglu; Step 3.5); by default there is none."""
    shared_silu_limit: float | None = Field(None, gt=0, examples=[16.0])
    """The same in shared experts."""
    position_embedding: Literal["rope", "learned", "none"] = "rope"
    """Rotary embedding (rope), a learned embedding for each of `max_seq_len` positions (GPT-2), or none (NoPE)."""
    rope: RopeSpec = RopeSpec()
    """Parameters of the rotary embedding."""
    bias: bool = False
    """Biases in every linear layer except the head (GPT-2); not with SwiGLU."""
    qk_norm: QkNorm = "none"
    """RMSNorm on queries and keys: per head (Qwen3) or over all heads together (OLMoE). each_head: LayerNorm per head,
    without a bias, whose weight each head has for itself (Cohere). rotated: RMSNorm per head after the rotation
    (Hunyuan), rotated_plain: also without a weight (Llama 4)."""
    tie_embeddings: bool = False
    """Share one matrix between embedding and head."""
    moe: MoESpec | None = None
    """Experts in place of the MLP; without this table the model is dense."""
    mtp: MtpSpec | None = None
    """Multi-token prediction in training; without this table there is none."""
    implementation: ComponentSpec | None = Field(None, examples=["my_model:Network"])
    """Import path of a `torch.nn.Module` to train in place of Phalanx's transformer, "package.module:Class" or a table
    with `class` and its arguments; called with this description (`spec`). The other fields describe its size to the
    planner."""
    tuning: SkipJsonSchema[TuningSpec] = Field(TuningSpec(), exclude=True)
    """The part that is trained, as the run says (`spec.run`): no field of a file."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_sizes(cls, table: object) -> object:
        """Fill in the numbers of layers and key/value heads, and the width of a head."""
        if not isinstance(table, dict):
            return table
        if isinstance(table.get("tuning"), dict):
            raise UserError("tuning", None, "is not a known field", "set training.freeze")
        table = dict(table)
        if isinstance(table.get("layers"), str):
            table.setdefault("num_layers", len(parse_layers(table["layers"])))
        heads = table.get("num_heads")
        width = table.get("hidden_size")
        if type(heads) is int and heads > 0:
            table["num_kv_heads"] = table.get("num_kv_heads") or heads
            if type(width) is int and not table.get("head_dim"):
                allowed = [d for d in divisors(width) if d <= 2 * heads] if width > 0 else []
                if width % heads != 0:
                    problem = f"does not divide model.hidden_size ({width})"
                    fix = f"use one of {', '.join(map(str, allowed))}, or set model.head_dim"
                    raise UserError("num_heads", heads, problem, fix)
                table["head_dim"] = width // heads
        return table

    @model_validator(mode="after")
    def _check_combinations(self) -> ModelSpec:
        if self.num_heads % self.num_kv_heads:
            problem = f"does not divide model.num_heads ({self.num_heads})"
            allowed = ", ".join(map(str, divisors(self.num_heads)))
            raise UserError("num_kv_heads", self.num_kv_heads, problem, f"use one of {allowed}")
        if NUM_INPUTS[self.activation] == 2 and self.bias:
            problem = "is not supported with a gated activation"
            raise UserError("bias", self.bias, problem, "set model.bias = false, or model.attention_bias")
        if self.bias and self.attention_bias != "none":
            problem = "has no effect with model.bias"
            raise UserError("attention_bias", self.attention_bias, problem, "remove one of them")
        if self.values_from_keys and not self.value_norm:
            raise UserError("values_from_keys", True, "requires norms of values", "set model.value_norm = true")
        if self.value_head_dim and self.value_head_dim > self.head_dim:
            fix = "use a smaller value_head_dim"
            raise UserError("value_head_dim", self.value_head_dim, f"exceeds head_dim ({self.head_dim})", fix)
        if self.values_from_keys and self.value_width != self.head_dim:
            problem = "requires values as wide as keys"
            raise UserError("values_from_keys", True, problem, "remove model.value_head_dim")
        if self.attention_chunk and self.sliding_window:
            problem = "cannot be combined with model.sliding_window in a layer"
            raise UserError("attention_chunk", self.attention_chunk, problem, "remove one of them")
        if self.bias and self.moe is not None:
            fix = "set model.attention_bias and model.moe.bias instead"
            raise UserError("bias", True, "is not supported with experts", fix)
        if self.branches != "both" and self.parallel_residual != "none":
            problem = f"requires both branches, not branches = {self.branches!r}"
            raise UserError("parallel_residual", self.parallel_residual, problem, 'set it to "none"')
        if self.branches == "mlp" and self.layers is None:
            of_mixers = ("mixer", *sorted(NO_ATTENTION.keys() - {"position_embedding", "rope"}))
            if unused := [field for field in of_mixers if getattr(self, field) != NO_ATTENTION.get(field)]:
                problem = 'has no effect with branches = "mlp"'
                raise UserError(unused[0], getattr(self, unused[0]), problem, "remove it")
        if self.norm_offset and self.norm == "layernorm":
            raise UserError("norm_offset", self.norm_offset, 'requires model.norm = "rmsnorm"', "remove it")
        if self.norm_offset and self.norm_parameters == "none":
            fix = 'set model.norm_parameters = "all"'
            raise UserError("norm_offset", self.norm_offset, "requires weights of norms", fix)
        has_norms_after = {self.norm_position, *(kind.norm_position for kind in self.kinds)} & {"after", "both"}
        if self.norm_after_eps and not has_norms_after:
            fix = 'remove it, or set model.norm_position = "both"'
            raise UserError("norm_after_eps", self.norm_after_eps, "has no effect without norms of outputs", fix)
        if self.parallel_residual != "none" and self.norm_position != "before":
            problem = f"is not supported with model.norm_position = {self.norm_position!r}"
            raise UserError("parallel_residual", self.parallel_residual, problem, 'set it to "none"')
        if self.mixer and self.layers is None:
            fields = NO_ATTENTION.keys() - {"position_embedding", "rope"} - self.mixer.attention_fields
            if unused := [field for field in sorted(fields) if getattr(self, field) != NO_ATTENTION[field]]:
                problem = "has no effect in a model without attention"
                raise UserError(unused[0], getattr(self, unused[0]), problem, "remove it, or the mixer")
            self.mixer.check(self)
        if self.side_mixer:
            self._check_side_mixer(self.side_mixer)
        for field in ("gate_scale", "up_scale"):
            if getattr(self, field) != 1 and self.moe is not None:
                raise UserError(field, getattr(self, field), "is not supported with experts", "remove it")
        if self.gate_scale != 1 and NUM_INPUTS[self.activation] == 1:
            problem = f"has no effect with model.activation = {self.activation!r}"
            raise UserError("gate_scale", self.gate_scale, problem, 'remove it, or set "swiglu"')
        for field, activation in ACTIVATION_FIELDS.items():
            default = type(self).model_fields[field].default
            if self.activation != activation and getattr(self, field) != default:
                problem = f"has no effect with model.activation = {self.activation!r}"
                raise UserError(field, getattr(self, field), problem, f'remove it, or set "{activation}"')
        if self.activation == "xielu" and self.moe:
            raise UserError("activation", "xielu", "is not supported with experts", "use another, or remove model.moe")
        if self.shared_silu_limit and not (self.moe and self.moe.num_shared_experts):
            problem = "has no effect without shared experts"
            raise UserError("shared_silu_limit", self.shared_silu_limit, problem, "remove it")
        rotated = self.rope.width(self.head_dim)
        if self.position_embedding == "rope" and (rotated % 2 or rotated == 0):
            times = "" if self.rope.fraction == 1 else f"times model.rope.fraction ({self.rope.fraction}) "
            problem = f"{times}must be even for rotary positions"
            raise UserError("head_dim", self.head_dim, problem, "use an even number")
        if self.upcycle_reinit_fraction and (self.from_hf is None or self.moe is None):
            problem = "requires experts that are initialized from a dense model"
            fix = "set model.from_hf and model.moe, or remove it"
            raise UserError("upcycle_reinit_fraction", self.upcycle_reinit_fraction, problem, fix)
        layers = list(self.full_attention_layers)
        if not all(0 <= layer < self.num_layers for layer in layers):
            problem = f"names layers that the model does not have (model.num_layers = {self.num_layers})"
            raise UserError("full_attention_layers", layers, problem, f"use numbers from 0 to {self.num_layers - 1}")
        if layers and self.sliding_window is None:
            problem = "has no effect without a sliding window"
            raise UserError("full_attention_layers", layers, problem, "set model.sliding_window, or remove it")
        self._check_kinds()
        if self.num_shared_kv_layers:
            self._check_shared_kv()
        elif self.shared_kv_ffn_size:
            problem = "has no effect without layers that share keys and values"
            raise UserError("shared_kv_ffn_size", self.shared_kv_ffn_size, problem, "set model.num_shared_kv_layers")
        if self.per_layer_input_size and NUM_INPUTS[self.activation] == 1:
            problem = f"requires a gated activation, not model.activation = {self.activation!r}"
            raise UserError("per_layer_input_size", self.per_layer_input_size, problem, "remove it")
        if self.mtp is not None:
            self._check_mtp(self.mtp)
        if self.moe is not None:
            if self.branches == "mixer" and self.layers is None:
                problem = "leaves no layer with experts"
                raise UserError("branches", "mixer", problem, "set it for a kind of layers, or remove model.moe")
            if self.moe.num_leading_dense_layers >= self.num_layers:
                problem = f"leaves no layer with experts (model.num_layers = {self.num_layers})"
                fix = f"use at most {self.num_layers - 1}"
                raise UserError("moe.num_leading_dense_layers", self.moe.num_leading_dense_layers, problem, fix)
            if self.moe.dense_branch and self.parallel_residual != "none":
                problem = "is not supported with model.parallel_residual"
                raise UserError("moe.dense_branch", True, problem, "set it to false")
            if self.moe.router_norm and self.norm_position == "after":
                problem = "requires norms of the input of experts"
                raise UserError("moe.router_norm", True, problem, 'set model.norm_position = "before" or "both"')
            if self.moe.dense_branch and self.norm_position == "after":
                problem = "requires norms of the inputs of MLP and experts"
                raise UserError("moe.dense_branch", True, problem, 'set model.norm_position = "before" or "both"')
        return self

    def _check_side_mixer(self, mixer: Mamba2) -> None:
        forms = {"norm_position": "before", "parallel_residual": "none", "branches": "both", "residual_scale": 1.0}
        for field, value in forms.items():
            if getattr(self, field) != value:
                problem = "is not supported with model.side_mixer"
                raise UserError(field, getattr(self, field), problem, f"set it to {value!r}")
        mixer.check(self)

    def _check_shared_kv(self) -> None:
        field = "num_shared_kv_layers"
        kinds = {kind.name: kind for kind in self.kinds}
        names = self._kinds_of_layers
        first = self.num_layers - self.num_shared_kv_layers
        for layer in range(max(first, 0), self.num_layers):
            if names[layer] not in names[: max(first, 0)]:
                problem = f"leaves no earlier layer of the kind of layer {layer}, whose keys and values it reads"
                raise UserError(field, self.num_shared_kv_layers, problem, "use a smaller number")
            described = self.layer_of_kind(kinds.get(names[layer]))
            for other in ("value_head_dim", "value_scale", "side_mixer", "indexer"):
                if (value := getattr(described, other)) != NO_ATTENTION[other]:
                    raise UserError(other, value, f"is not supported with model.{field}", "remove one of them")
            if described.mixer or not described.attends:
                problem = f"includes layer {layer}, which has no attention with keys and values of its own"
                raise UserError(field, self.num_shared_kv_layers, problem, "use a smaller number")
        if self.shared_kv_ffn_size and self.moe and not self.moe.dense_branch:
            problem = "has no effect on layers with experts"
            raise UserError("shared_kv_ffn_size", self.shared_kv_ffn_size, problem, "remove it")

    @property
    def _kinds_of_layers(self) -> list[str]:
        """The name of the kind of each layer."""
        if self.layers is not None:
            return list(islice(cycle(parse_layers(self.layers)), self.num_layers))
        full = set(self.full_attention_layers)
        return ["full" if layer in full else "" for layer in range(self.num_layers)]

    @property
    def kv_sources(self) -> dict[int, int]:
        """The layer whose keys and values a layer reads, by the latter: the last earlier one of its kind."""
        names = self._kinds_of_layers
        first = self.num_layers - self.num_shared_kv_layers
        last = {name: layer for layer, name in enumerate(names[:first])}
        return {layer: last[names[layer]] for layer in range(first, self.num_layers)}

    def _check_mtp(self, mtp: MtpSpec) -> None:
        for field in ("num_shared_kv_layers", "per_layer_input_size"):
            if value := getattr(self, field):
                raise UserError(field, value, "is not supported with model.mtp", "remove one of them")
        names = parse_layers(self.layers) if self.layers is not None else []
        if mtp.kind is not None and mtp.kind not in names:
            fix = f"use one of: {', '.join(dict.fromkeys(names))}" if names else "remove it, or set model.layers"
            raise UserError("mtp.kind", mtp.kind, "is not in model.layers", fix)
        if self.position_embedding == "learned":
            problem = 'is not supported with position_embedding = "learned"'
            raise UserError("mtp", mtp.layers, problem, 'remove it, or set position_embedding = "rope"')
        if self.implementation is not None:
            problem = "has no effect on a network of model.implementation"
            raise UserError("mtp", mtp.layers, problem, "remove it")

    def layer_of_kind(self, kind: KindSpec | None) -> ModelSpec:
        """Return the description of one layer of a kind; None: a layer as the model says."""
        values = {name: value for name, value in kind or () if name != "name" and value is not None}
        for name in ("sliding_window", "attention_chunk", "query_temperature", "mixer", "moe"):
            if values.get(name) is False:
                values[name] = None
        return self.one_layer(**values)

    def one_layer(self, **values: object) -> ModelSpec:
        """Return the description of one layer with some values, which are not checked."""
        one_layer: dict[str, object] = {"num_layers": 1, "layers": None, "kinds": (), "full_attention_layers": ()}
        one_layer |= {"num_shared_kv_layers": 0, "shared_kv_ffn_size": None}
        of_whole_model = {"preset": None, "from_hf": None, "upcycle_reinit_fraction": 0.0, "mtp": None}
        moe = self.moe and self.moe.model_copy(update={"num_leading_dense_layers": 0})
        layer = self.model_copy(update={**one_layer, **of_whole_model, "moe": moe, **values})
        if layer.branches == "mixer":
            layer = layer.model_copy(update={"moe": None})
        if layer.moe is None:
            layer = layer.model_copy(update={"shared_silu_limit": None})
        if layer.norm_position == "before":
            layer = layer.model_copy(update={"norm_after_eps": None})
        if layer.branches == "mlp":
            layer = layer.model_copy(update={"mixer": None})
        if layer.mixer is None and layer.attends:
            return layer
        unused = NO_ATTENTION.keys() - (layer.mixer.attention_fields if layer.mixer else set())
        return layer.model_copy(update={field: NO_ATTENTION[field] for field in unused})

    def _check_kinds(self) -> None:
        """Check that `layers` names the kinds, and the values of each."""
        if self.layers is not None and self.full_attention_layers:
            problem = "cannot be combined with model.layers"
            fix = "give a kind of layers sliding_window = false instead"
            raise UserError("full_attention_layers", list(self.full_attention_layers), problem, fix)
        names = parse_layers(self.layers) if self.layers is not None else []
        kinds: dict[str, KindSpec] = {}
        for kind in self.kinds:
            name = kind.name
            if name in kinds:
                raise UserError("kinds", name, "is the name of two kinds", "rename one")
            if name not in names:
                problem = "is not in model.layers" if self.layers else "has no effect without model.layers"
                raise UserError("kinds", name, problem, f'name it in model.layers, such as layers = "{name}*2 other"')
            kinds[name] = kind
            self._check_kind(kind)
        leading = self.moe.num_leading_dense_layers if self.moe else 0
        used = [kinds.get(name) for name in islice(cycle(names), leading, self.num_layers)]
        if self.moe and used and all(kind and (kind.moe is False or kind.branches == "mixer") for kind in used):
            problem = f"leaves no layer with experts (model.num_layers = {self.num_layers})"
            raise UserError("layers", self.layers, problem, "name a kind without moe = false, or remove model.moe")

    def _check_kind(self, kind: KindSpec) -> None:
        layer = self.layer_of_kind(kind)
        field = f"kinds ({kind.name})"
        if kind.mixer is False and self.mixer is None:
            raise UserError(f"{field}.mixer", False, "has no effect without model.mixer", "remove it")
        read = kind.mixer.attention_fields if kind.mixer else ATTENTION_FIELDS if layer.attends else frozenset()
        if unused := sorted(kind.model_fields_set & ATTENTION_FIELDS - read):
            problem = "has no effect on a layer with this mixer" if kind.mixer else "has no effect without attention"
            raise UserError(f"{field}.{unused[0]}", getattr(kind, unused[0]), problem, "remove it, or the mixer")
        of_other_branch = {
            "mixer": ("ffn_hidden_size", "moe", "silu_limit", "shared_silu_limit"),
            "mlp": ("mixer",),
        }.get(kind.branches or "both", ())
        if unused := [name for name in of_other_branch if name in kind.model_fields_set]:
            problem = f"has no effect on a layer with branches = {kind.branches!r}"
            raise UserError(f"{field}.{unused[0]}", getattr(kind, unused[0]), problem, "remove one of them")
        if kind.moe is False and kind.shared_silu_limit:
            problem = "has no effect without experts"
            raise UserError(f"{field}.shared_silu_limit", kind.shared_silu_limit, problem, "remove one of them")
        if kind.moe is False and self.moe is None:
            raise UserError(f"{field}.moe", False, "has no effect without model.moe", "remove it, or set model.moe")
        if kind.rope is not None and layer.position_embedding != "rope":
            problem = f"has no effect with position_embedding = {layer.position_embedding!r}"
            raise UserError(f"{field}.rope", None, problem, 'remove it, or set position_embedding = "rope"')
        try:
            self.model_validate(layer.__dict__)
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            if not isinstance(cause, UserError):
                raise
            raise UserError(f"{field}.{cause.field}", cause.value, cause.problem, cause.fix) from None

    @property
    def without_tuning(self) -> ModelSpec:
        """The model itself: all of it trained, and without adapters."""
        return self.model_copy(update={"tuning": TuningSpec()})

    @property
    def num_blocks(self) -> int:
        """Number of layers in training: those of the model, and those for multi-token prediction."""
        return self.num_layers + self.num_prediction_layers

    @property
    def num_prediction_layers(self) -> int:
        """Number of layers for multi-token prediction."""
        return self.mtp.layers if self.mtp else 0

    @property
    def num_logits(self) -> int:
        """Number of predictions of a token in training: the next one, and those of multi-token prediction."""
        return 1 + self.num_prediction_layers

    @property
    def reuses_embedding(self) -> bool:
        """True if the end of the model reads the embedding: as its head, or for multi-token prediction."""
        return self.tie_embeddings or self.mtp is not None

    @property
    def attends(self) -> bool:
        """True if the mixer of a layer is attention, or a form of it."""
        return self.branches != "mlp" and (self.mixer is None or self.mixer.attends)

    @property
    def rotary_width(self) -> int:
        """Number of a head's channels that are rotated in a layer."""
        return self.mixer.rotary_width if self.mixer else self.rope.width(self.head_dim)

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a sequence up to which a layer is computed exactly; None: any number."""
        if self.mixer:
            return self.mixer.max_tokens
        return self.indexer.max_tokens if self.indexer else None

    @property
    def value_width(self) -> int:
        """Width of a head's values in a layer with attention."""
        return self.value_head_dim or self.head_dim

    @property
    def query_scale(self) -> float:
        """Factor of queries in a layer, because kernels divide scores by sqrt(head_dim)."""
        return self.attention_scale * self.head_dim**0.5 if self.attention_scale else 1.0

    def activation_with(self, silu_limit: float | None) -> tuple[str, tuple[float, ...]]:
        """Return the function of the activation, with a limit if there is one, and the numbers in its formula."""
        if silu_limit is not None:
            return "limited_swiglu", (silu_limit,)
        numbers = (self.swiglu_alpha, self.swiglu_limit) if self.activation == "clamped_swiglu" else ()
        return self.activation, numbers

    @property
    def source_name(self) -> str | None:
        """The preset or Hugging Face directory that the model comes from."""
        return self.preset or self.from_hf


def is_flash_head_dim(head_dim: int) -> bool:
    """Return whether flash attention on GPUs supports this head size.

    Source: PyTorch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    return head_dim % 8 == 0 and head_dim <= MAX_FLASH_HEAD_DIM
