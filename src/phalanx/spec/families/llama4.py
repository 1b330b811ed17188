"""Llama 4, its text model: attention in chunks, layers without positions, experts with weighted inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Read, Rows, Table, any_value
from phalanx.spec.families.forms import DENSE, NOPE, ROTARY, SPARSE, LayerKind, LayerLists, LayerTypes, Rope
from phalanx.spec.families.llama import INTERLEAVED_TENSORS, LLAMA, query_heads, shared_expert_tensors
from phalanx.spec.families.smollm3 import rotary_layers
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec

CHUNKED = LayerKind("chunked", lambda layer: layer.attention_chunk is not None)
FULL = LayerKind("full", lambda layer: layer.attention_chunk is None, {"attention_chunk": False})
NOPE_WITHOUT_NORMS = replace(NOPE, dials={**NOPE.dials, "qk_norm": "none"})


@dataclass(frozen=True)
class Chunk(Read):
    """Tokens of a chunk."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the number. Raises UserError if there is none, but layers with chunks."""
        chunk = super().read(name, config, dials)
        if chunk[self.dial] is None and "chunked_attention" in (config.get("layer_types") or ()):
            problem = "is missing, but layer_types has chunked_attention"
            raise UserError(f"config.json {name}", None, problem, "use the config.json of a complete model")
        return chunk


def chunked_layers(config: Table, dials: Table) -> list[str]:
    """Return the types of layers, of which those with positions have chunks."""
    rotates = config.get("no_rope_layers") or rotary_layers(config, dials)
    has_chunks = dials["attention_chunk"] is not None
    return ["chunked_attention" if rotary and has_chunks else "full_attention" for rotary in rotates]


@dataclass(frozen=True)
class ExpertLayers(LayerTypes):
    """List of the layers with experts."""

    def words(self, name: str, config: Table, dials: Table) -> Sequence[object]:
        """Return the type of each layer: the last of each interval has experts, if there is no list."""
        step = config.get("interleave_moe_layer_step", 1)
        sparse = config.get(name)
        sparse = range(step - 1, dials["num_layers"], step) if sparse is None else sparse
        return [layer in sparse for layer in range(dials["num_layers"])]

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the list."""
        return {name: [index for index, layer in enumerate(layer_specs(spec)) if layer.moe]}


class Temperature(Field):
    """Switch of the factor of queries that grows with their position, in layers without positions."""

    other_names: tuple[str, ...] = ("attn_scale", "floor_scale")

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dial of these layers."""
        return any_value("kinds.nope.query_temperature")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the factor, if it is on."""
        factor = {"scale": config.get("attn_scale", 0.1), "interval": config.get("floor_scale", 8192), "offset": 1}
        return {"kinds.nope.query_temperature": factor} if config.get(name, True) else {}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the switch and the factor, if there is one."""
        factor = next(filter(None, (layer.query_temperature for layer in layer_specs(spec))), None)
        return (
            {name: False}
            if factor is None
            else {name: True, "attn_scale": factor.scale, "floor_scale": factor.interval}
        )


LLAMA4 = replace(
    LLAMA,
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    wrapper="llama4",
    wrapper_ties_embeddings=False,
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 202_048),
        "hidden_size": Read("hidden_size", 5120),
        "num_hidden_layers": Read("num_layers", 48),
        "num_attention_heads": Read("num_heads", 40),
        "num_key_value_heads": Read("num_kv_heads", 8, unset=query_heads),
        "head_dim": Read("head_dim", 128),
        "intermediate_size": Read("moe.expert_ffn_size", 8192),
        "intermediate_size_mlp": Read("ffn_hidden_size", 16384),
        "max_position_embeddings": Read("max_seq_len", 131_072),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "rope_parameters": Rope(theta=500_000.0),
        "num_local_experts": Read("moe.num_experts", 16),
        "num_experts_per_tok": Read("moe.top_k", 1),
        "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.001),
        "attention_chunk_size": Chunk("attention_chunk", 8192),
        "use_qk_norm": Read("qk_norm", True, words={True: "rotated_plain", False: "none"}),
        "attn_temperature_tuning": Temperature(),
        "no_rope_layers": LayerLists(
            {
                "no_rope_layers": LayerTypes(
                    {1: ROTARY, 0: NOPE_WITHOUT_NORMS}, rotary_layers, ("no_rope_layer_interval",)
                ),
                "layer_types": LayerTypes({"chunked_attention": CHUNKED, "full_attention": FULL}, chunked_layers),
                "moe_layers": ExpertLayers({True: SPARSE, False: DENSE}, other_names=("interleave_moe_layer_step",)),
            }
        ),
        # A field of published models that transformers does not read.
        "for_llm_compressor": Field(),
    },
    constants={
        "moe.num_shared_experts": 1,
        "moe.router_score": "sigmoid",
        "moe.normalize_top_k": False,
        "moe.weighs_inputs": True,
        "moe.z_loss_coef": 0.0,
    },
    tensors={
        name.replace(".mlp.", ".feed_forward."): stored
        for name, stored in (LLAMA.tensors | INTERLEAVED_TENSORS).items()
    }
    | {
        "model.layers.{i}.feed_forward.router.weight": "mlp.router.gate.weight",
        "model.layers.{i}.feed_forward.experts.gate_up_proj": Rows(
            "mlp.experts.gate", "mlp.experts.up", stacked=True, transposed=True
        ),
        "model.layers.{i}.feed_forward.experts.down_proj": Rows("mlp.experts.down", stacked=True, transposed=True),
        **shared_expert_tensors("model.layers.{i}.feed_forward.shared_expert"),
    },
)
