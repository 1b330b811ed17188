"""Llama 4, its text model: attention in chunks, layers without positions, experts with weighted inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Read, Rows, Table, any_value, require_supported
from phalanx.spec.families.forms import Rope
from phalanx.spec.families.llama import INTERLEAVED_TENSORS, LLAMA, query_heads
from phalanx.spec.layer_pattern import write_layers
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec

CHUNKED, FULL = "chunked_attention", "full_attention"
TEMPERATURE = ("attn_temperature_tuning", "attn_scale", "floor_scale")


class Layers(Field):
    """Lists of which layers have positions (1, in no_rope_layers), chunks, and experts; each choice is a kind's.

    Queries have a factor that grows with their position where there are no positions, and norms where there are."""

    dials = any_value("layers", "kinds", "qk_norm", "attention_chunk")
    other_names = (
        *("no_rope_layer_interval", "layer_types", "moe_layers", "interleave_moe_layer_step"),
        *("attention_chunk_size", "use_qk_norm", *TEMPERATURE),
    )

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of the layers."""
        num_layers = dials["num_layers"]
        chunk = config.get("attention_chunk_size", 8192)
        interval = config.get("no_rope_layer_interval", 4)
        rotates = config.get(name) or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
        types = config.get("layer_types") or [CHUNKED if rotary and chunk else FULL for rotary in rotates]
        for field, values in ((name, rotates), ("layer_types", types)):
            if len(values) < num_layers:
                fix = f"use a list of {num_layers} values"
                raise UserError(f"config.json {field}", list(values), "has too few layers", fix)
        step = config.get("interleave_moe_layer_step", 1)
        sparse = config.get("moe_layers")
        sparse = range(step - 1, num_layers, step) if sparse is None else sparse
        kinds: dict[str, Table] = {}
        names = []
        for layer in range(num_layers):
            require_supported(name, rotates[layer], (0, 1))
            require_supported("layer_types", types[layer], (CHUNKED, FULL))
            if types[layer] == CHUNKED and not chunk:
                problem = f"requires chunks of a number of tokens, not attention_chunk_size = {chunk}"
                raise UserError("config.json layer_types", CHUNKED, problem, f"use {FULL}, or set the number")
            words = [
                "rotary" if rotates[layer] else "nope",
                *([] if types[layer] == CHUNKED else ["full"]),
                *([] if layer in sparse else ["dense"]),
            ]
            names.append("_".join(words))
            kinds[names[-1]] = {
                **({} if rotates[layer] else _without_positions(config)),
                **({} if types[layer] == CHUNKED or not chunk else {"attention_chunk": False}),
                **({} if layer in sparse else {"moe": False}),
            }
        of_kinds = {f"kinds.{kind}.{dial}": value for kind, table in kinds.items() for dial, value in table.items()}
        qk_norm = "rotated_plain" if config.get("use_qk_norm", True) else "none"
        return {"layers": write_layers(names), "qk_norm": qk_norm, "attention_chunk": chunk, **of_kinds}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the lists, and what they switch on."""
        layers = layer_specs(spec)
        temperature = next((layer.query_temperature for layer in layers if layer.query_temperature), None)
        chunk = next((layer.attention_chunk for layer in layers if layer.attention_chunk), None)
        return {
            name: [int(layer.position_embedding == "rope") for layer in layers],
            "layer_types": [CHUNKED if layer.attention_chunk else FULL for layer in layers],
            "moe_layers": [index for index, layer in enumerate(layers) if layer.moe],
            "attention_chunk_size": chunk,
            "use_qk_norm": any(layer.qk_norm != "none" for layer in layers),
            "attn_temperature_tuning": temperature is not None,
            **({"attn_scale": temperature.scale, "floor_scale": temperature.interval} if temperature else {}),
        }


def _without_positions(config: Table) -> Table:
    """Return the dials of layers without positions."""
    factor: Any = False
    if config.get("attn_temperature_tuning", True):
        factor = {"scale": config.get("attn_scale", 0.1), "interval": config.get("floor_scale", 8192), "offset": 1}
    return {"position_embedding": "none", "qk_norm": "none", "query_temperature": factor}


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
        "no_rope_layers": Layers(),
        # A field of published models that transformers does not read.
        "for_llm_compressor": Field(),
    },
    constants={
        "moe.num_shared_experts": 1,
        "moe.router_score": "sigmoid",
        "moe.normalize_top_k": False,
        "moe.weighs_inputs": True,
        "moe.num_leading_dense_layers": 0,
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
        **{
            f"model.layers.{{i}}.feed_forward.shared_expert.{name}_proj.weight": f"mlp.shared.{name}.weight"
            for name in ("gate", "up", "down")
        },
    },
)
