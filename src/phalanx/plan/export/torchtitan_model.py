"""Model as Python source for torchtitan, based on its Llama 3, its Qwen3 or its DeepSeek-V3.

torchtitan has no other format for models.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from textwrap import indent

from phalanx.plan.export.common import ExportJob
from phalanx.spec.model import ModelSpec, MoESpec, yarn_mscale
from phalanx.spec.parts.mixers import LatentAttention, MixerSpec
from phalanx.spec.parts.mixers.latent_attention import LATENT_NORM_EPS

LINE_LENGTH = 100
BIAS_UPDATE_RATE = 1e-3
"""DeepSeek-V3's (arXiv 2412.19437, section 4.2), and torchtitan's default."""


class PythonSource(str):
    """Expression that `repr` writes to source without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class ModelFamily:
    """Names of one of torchtitan's models."""

    name: str
    class_prefix: str
    parallelize: str
    rope: str


LLAMA3 = ModelFamily("llama3", "Llama3", "parallelize_llama", rope="ComplexRoPE")
QWEN3 = ModelFamily("qwen3", "Qwen3", "parallelize_qwen3", rope="CosSinRoPE")
DEEPSEEK_V3 = ModelFamily("deepseek_v3", "DeepSeekV3", "parallelize_deepseekv3", rope="ComplexRoPE")


def model_family(spec: ModelSpec) -> ModelFamily:
    """Return DeepSeek-V3 for latent attention, Qwen3 for other models with experts or query/key norms, else Llama 3."""
    if spec.mixer:
        return DEEPSEEK_V3
    return QWEN3 if spec.moe or spec.qk_norm == "head" else LLAMA3


def python_call(name: str, /, **arguments: object) -> PythonSource:
    """Return a call with keyword arguments, on one line if it fits."""
    words = [f"{key}={value!r}" for key, value in arguments.items()]
    line = f"{name}({', '.join(words)})"
    if len(line) <= LINE_LENGTH and "\n" not in line:
        return PythonSource(line)
    return PythonSource(f"{name}(\n" + "".join(indent(f"{word},\n", "    ") for word in words) + ")")


def model_source(job: ExportJob) -> str:
    """Return the source of the functions `layer` and `model_spec`, with imports and helpers."""
    spec = job.run.model
    family = model_family(spec)
    prefix = family.class_prefix
    output_std = job.init_std / sqrt(2 * spec.num_layers)
    head = f"""\
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import {family.rope}, Embedding, FeedForward, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.{family.name}.model import Attention, {prefix}Model, {prefix}TransformerBlock
from torchtitan.models.{family.name}.parallelize import {family.parallelize}
from torchtitan.models.{family.name}.state_dict_adapter import {prefix}StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
{EXPERT_IMPORTS if spec.moe else ""}
MATRIX = {{"weight": partial(nn.init.normal_, std={job.init_std:.6g})}}
# Matrices that write into the residual stream.
OUTPUT = {{"weight": partial(nn.init.normal_, std={output_std:.6g})}}
EMBEDDING = {{"weight": {"skip_param_init" if spec.tie_embeddings else 'MATRIX["weight"]'}}}


def norm(width: int, eps: float = {spec.norm_eps!r}) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=eps, param_init={{"weight": nn.init.ones_}})


def linear(inputs: int, outputs: int, init: dict = MATRIX) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=init)


def feed_forward(width: int) -> FeedForward.Config:
    return FeedForward.Config(
        w1=linear({spec.hidden_size}, width),
        w2=linear(width, {spec.hidden_size}, OUTPUT),
        w3=linear({spec.hidden_size}, width),
    )
"""
    layer = indent(f"return {_build_layer_config(job, family)!r}", "    ")
    model = indent(f"return {_build_model_spec(job, family)!r}", "    ")
    return (
        f"{head}\n\ndef layer(index: int) -> {family.class_prefix}TransformerBlock.Config:\n{layer}\n"
        f"\n\ndef model_spec() -> ModelSpec:\n{model}\n"
    )


EXPERT_IMPORTS = """\
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
"""


def _build_layer_config(job: ExportJob, family: ModelFamily) -> PythonSource:
    spec = job.run.model
    attention = _build_latent_attention(job, spec.mixer) if spec.mixer else _build_attention(job, family)
    return python_call(
        f"{family.class_prefix}TransformerBlock.Config",
        attention_norm=PythonSource(f"norm({spec.hidden_size})"),
        ffn_norm=PythonSource(f"norm({spec.hidden_size})"),
        attention=attention,
        **_mlp_arguments(spec),
    )


def _build_rope(job: ExportJob, kind: str, width: int) -> PythonSource:
    spec = job.run.model
    scaling: dict[str, object] = {}
    if spec.rope.scaling == "yarn":
        scaling = {
            "scaling": "yarn",
            "rope_factor": spec.rope.factor,
            "beta_fast": spec.rope.beta_fast,
            "beta_slow": spec.rope.beta_slow,
            "original_seq_len": spec.rope.original_context,
            "truncate": spec.rope.truncate,
        }
    if spec.rope.scaling == "llama3":
        scaling = {
            "scaling": "llama",
            "scaling_factor": spec.rope.factor,
            "low_freq_factor": spec.rope.low_freq_factor,
            "high_freq_factor": spec.rope.high_freq_factor,
            "original_max_position_embeddings": spec.rope.original_context,
        }
    return python_call(
        f"{kind}.Config",
        dim=width,
        max_seq_len=max(spec.max_seq_len, job.run.training.seq_len),
        theta=spec.rope.theta,
        **scaling,
    )


def _build_latent_attention(job: ExportJob, mixer: MixerSpec) -> PythonSource:
    """Return DeepSeek-V3's attention, whose scores have the factor (0.1 mscale ln(factor) + 1)^2 with YaRN."""
    assert isinstance(mixer, LatentAttention)
    spec = job.run.model
    content = spec.head_dim - mixer.rope_dim
    heads = spec.num_heads
    growth = yarn_mscale(spec.rope.factor) - 1
    queries: dict[str, object] = {"wq": linear(spec.hidden_size, heads * spec.head_dim)}
    if mixer.query_rank:
        queries = {
            "wq_a": linear(spec.hidden_size, mixer.query_rank),
            "wq_b": linear(mixer.query_rank, heads * spec.head_dim),
        }
    return python_call(
        "Attention.Config",
        dim=spec.hidden_size,
        n_heads=heads,
        **queries,
        # Not built without a latent of queries.
        q_norm=PythonSource(f"norm({mixer.query_rank or 1}, {LATENT_NORM_EPS!r})"),
        wkv_a=linear(spec.hidden_size, mixer.latent_rank + mixer.rope_dim),
        kv_norm=PythonSource(f"norm({mixer.latent_rank}, {LATENT_NORM_EPS!r})"),
        wkv_b=linear(mixer.latent_rank, heads * (content + mixer.value_dim)),
        wo=PythonSource(f"linear({heads * mixer.value_dim}, {spec.hidden_size}, OUTPUT)"),
        q_lora_rank=mixer.query_rank or 0,
        kv_lora_rank=mixer.latent_rank,
        qk_nope_head_dim=content,
        qk_rope_head_dim=mixer.rope_dim,
        v_head_dim=mixer.value_dim,
        mscale=round((spec.query_scale**0.5 - 1) / growth, 9) if growth else 1.0,
        inner_attention=python_call("get_attention_config", backend="flex"),
        rope=_build_rope(job, "ComplexRoPE", mixer.rope_dim),
    )


def linear(inputs: int, outputs: int) -> PythonSource:
    """Return a call of the module's `linear`."""
    return PythonSource(f"linear({inputs}, {outputs})")


def _build_attention(job: ExportJob, family: ModelFamily) -> PythonSource:
    spec = job.run.model
    return python_call(
        "make_gqa_config",
        dim=spec.hidden_size,
        n_heads=spec.num_heads,
        n_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        wqkv_param_init=PythonSource("MATRIX"),
        wo_param_init=PythonSource("OUTPUT"),
        inner_attention=python_call("get_attention_config", backend="flex"),
        fuse_qkv=True,
        qk_norm=PythonSource(f"norm({spec.head_dim})") if spec.qk_norm == "head" else None,
        rope=_build_rope(job, family.rope, spec.head_dim),
    )


def _mlp_arguments(spec: ModelSpec) -> dict[str, PythonSource]:
    dense = PythonSource(f"feed_forward({spec.ffn_hidden_size})")
    if spec.moe is None:
        return {"feed_forward": dense}
    experts = _build_moe_config(spec, spec.moe)
    leading = spec.moe.num_leading_dense_layers
    if not leading:
        return {"moe": experts}
    return {
        "feed_forward": PythonSource(f"{dense} if index < {leading} else None"),
        "moe": PythonSource(f"None if index < {leading} else {experts}"),
    }


def _build_moe_config(spec: ModelSpec, moe: MoESpec) -> PythonSource:
    groups = {"num_expert_groups": moe.num_groups, "num_limited_groups": moe.top_groups} if moe.num_groups > 1 else {}
    router = python_call(
        "make_router_config",
        dim=spec.hidden_size,
        num_experts=moe.num_experts,
        gate_param_init=PythonSource("MATRIX"),
        top_k=moe.top_k,
        score_func=moe.router_score,
        route_norm=moe.normalize_top_k,
        route_scale=moe.routed_scale,
        **groups,
    )
    matrix = PythonSource('MATRIX["weight"]')
    output = PythonSource('OUTPUT["weight"]')
    routed = python_call(
        "make_routed_experts_config",
        dim=spec.hidden_size,
        hidden_dim=moe.expert_ffn_size,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        param_init={"w1_EFD": matrix, "w2_EDF": output, "w3_EFD": matrix},
        comm_backend="standard",
    )
    shared = moe.shared_width
    return python_call(
        "make_moe_config",
        num_experts=moe.num_experts,
        router=router,
        routed_experts=routed,
        shared_experts=PythonSource(f"feed_forward({shared})") if shared else None,
        load_balance_coeff=bias_update_rate(moe) or None,
    )


def bias_update_rate(moe: MoESpec) -> float:
    """Return the step of the biases of experts: torchtitan has no biases without one."""
    return moe.bias_update_rate or (BIAS_UPDATE_RATE if moe.choice_bias else 0.0)


def _build_model_spec(job: ExportJob, family: ModelFamily) -> PythonSource:
    spec = job.run.model
    embedding = python_call(
        "Embedding.Config",
        num_embeddings=spec.vocab_size,
        embedding_dim=spec.hidden_size,
        param_init=PythonSource("EMBEDDING"),
    )
    model = python_call(
        f"{family.class_prefix}Model.Config",
        dim=spec.hidden_size,
        vocab_size=spec.vocab_size,
        enable_weight_tying=spec.tie_embeddings,
        tok_embeddings=embedding,
        norm=PythonSource(f"norm({spec.hidden_size})"),
        lm_head=PythonSource(f"linear({spec.hidden_size}, {spec.vocab_size})"),
        layers=PythonSource(f"[layer(index) for index in range({spec.num_layers})]"),
    )
    return python_call(
        "ModelSpec",
        name=family.name,
        flavor=job.run.name,
        model=model,
        parallelize_fn=PythonSource(family.parallelize),
        pipelining_fn=PythonSource("pipeline_llm"),
        post_optimizer_build_fn=PythonSource("register_moe_load_balancing_hook") if spec.moe else None,
        state_dict_adapter=PythonSource(f"{family.class_prefix}StateDictAdapter"),
    )
