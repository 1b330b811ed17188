"""The text model of MiniMax-M3: block-sparse attention, which is dense in short sequences, and gpt-oss's activation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Fixed, Read, Rows, Table, require_supported
from phalanx.spec.families.forms import DENSE, SPARSE, LayerKind, LayerLists, LayerTypes, OfKind, Rope
from phalanx.spec.families.llama import LLAMA, QK_NORM_TENSORS, SIGMOID_ROUTER
from phalanx.spec.model import ModelSpec

INDEXED = LayerKind("indexed", lambda layer: layer.indexer is not None)
FULL = LayerKind("full", lambda layer: layer.indexer is None)
HUB_TABLE = "sparse_attention_config"
"""Table of published files with the sizes of the indexer, and a switch of it for each layer."""
HUB_TABLE_VALUES: dict[str, tuple[object, ...] | None] = {
    "use_sparse_attention": (True,),
    "sparse_score_type": ("max",),
    **dict.fromkeys(("sparse_num_index_heads", "sparse_index_dim", "sparse_block_size", "sparse_topk_blocks")),
    **dict.fromkeys(("sparse_attention_freq", "sparse_disable_index_value")),
    # Without effect if all blocks are chosen.
    **dict.fromkeys(("sparse_init_block", "sparse_local_block")),
}
"""Supported values of its fields; None for all."""


class HubTable(Field):
    """The table of published files, which other fields read."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for an unknown field or value."""
        for field, value in (config.get(name) or {}).items():
            require_supported(f"{name} field", field, HUB_TABLE_VALUES)
            values = HUB_TABLE_VALUES[field]
            if values is not None:
                require_supported(f"{name}.{field}", value, values)
        return {}


@dataclass(frozen=True)
class IndexerSize(OfKind):
    """A size of the indexer, which published files have in a table."""

    hub_name: str

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the size."""
        table = config.get(HUB_TABLE) or {}
        return super().read(name, config | ({name: table[self.hub_name]} if self.hub_name in table else {}), dials)


class PartialRope(Rope):
    """Rotary embedding of the first channels, by partial_rotary_factor. Files also have their number, as rotary_dim.

    transformers does not read the number, and rotates all channels without the factor."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of the embedding. Raises UserError if the number contradicts the factor."""
        rope = super().read(name, {**config, "rotary_dim": None}, dials)
        fraction = rope["rope.fraction"]
        width = int(dials["head_dim"] * fraction)
        if fraction != 1 and config.get("rotary_dim", width) != width:
            problem = f"contradicts partial_rotary_factor = {fraction}, by which transformers rotates {width} channels"
            raise UserError("config.json rotary_dim", config["rotary_dim"], problem, f"set it to {width}")
        return rope

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the embedding in the fields of all versions."""
        return super().write(name, spec) | {"rotary_dim": spec.rotary_width}


def layer_types(config: Table, dials: Table) -> list[str]:
    """Return the type of attention of each layer."""
    switches = (config.get(HUB_TABLE) or {}).get("sparse_attention_freq") or [0] * dials["num_layers"]
    return ["minimax_m3_sparse" if is_sparse else "full_attention" for is_sparse in switches]


def mlp_types(config: Table, dials: Table) -> list[str]:
    """Return the type of each layer's MLP."""
    switches = config.get("moe_layer_freq") or [1] * dials["num_layers"]
    return ["sparse" if is_sparse else "dense" for is_sparse in switches]


LAYER = "model.layers.{i}."
HUB_EXPERTS = f"{LAYER}block_sparse_moe."
INDEXER = {"q_proj": "queries", "k_proj": "keys", "q_norm": "query_norm", "k_norm": "key_norm"}

MINIMAX_M3 = replace(
    LLAMA,
    model_type="minimax_m3_vl_text",
    architecture="MiniMaxM3VLForCausalLM",
    wrapper="minimax_m3_vl",
    wrapper_ties_embeddings=False,
    fields=LLAMA.fields
    | {
        "vocab_size": Read("vocab_size", 200064),
        "hidden_size": Read("hidden_size", 6144),
        "num_hidden_layers": Read("num_layers", 60),
        "num_attention_heads": Read("num_heads", 64),
        "num_key_value_heads": Read("num_kv_heads", 4),
        "head_dim": Read("head_dim", 128),
        "dense_intermediate_size": Read("ffn_hidden_size", 12288),
        "max_position_embeddings": Read("max_seq_len", 524288),
        "hidden_act": Field(),  # "swigluoai" in published files; transformers has that of the two dials below
        "swiglu_alpha": Read("swiglu_alpha", 1.702),
        "swiglu_limit": Read("swiglu_limit", 7.0),
        "attention_bias": Fixed(False),
        "rope_parameters": PartialRope(theta=5_000_000.0, has_fraction=True),
        "partial_rotary_factor": Field(),
        "intermediate_size": Read("moe.expert_ffn_size", 3072),
        "shared_intermediate_size": Read("moe.shared_ffn_size", 3072),
        "num_local_experts": Read("moe.num_experts", 128, other_names=("num_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 4),
        "routed_scaling_factor": Read("moe.routed_scale", 2.0),
        "router_aux_loss_coef": Read("moe.balance_loss_coef", 0.001),
        "index_n_heads": IndexerSize(INDEXED, Read("indexer.num_heads", 4), "sparse_num_index_heads"),
        "index_head_dim": IndexerSize(INDEXED, Read("indexer.head_dim", 128), "sparse_index_dim"),
        "index_block_size": IndexerSize(INDEXED, Read("indexer.block_size", 128), "sparse_block_size"),
        "index_topk_blocks": IndexerSize(INDEXED, Read("indexer.top_blocks", 16), "sparse_topk_blocks"),
        "index_local_blocks": Field(),
        HUB_TABLE: HubTable(),
        "layer_types": LayerLists(
            {
                "layer_types": LayerTypes({"minimax_m3_sparse": INDEXED, "full_attention": FULL}, layer_types),
                "mlp_layer_types": LayerTypes({"sparse": SPARSE, "dense": DENSE}, mlp_types, ("moe_layer_freq",)),
            }
        ),
        # Fields of published files, which transformers does not read.
        **dict.fromkeys(("use_gemma_norm", "use_qk_norm", "use_routing_bias"), Fixed(True)),
        "qk_norm_type": Fixed("per_head"),
        "scoring_func": Fixed("sigmoid"),
        "n_shared_experts": Fixed(1),
        "num_mtp_modules": Field(),
    },
    constants={
        "qk_norm": "head",
        "norm_offset": True,
        "activation": "clamped_swiglu",
        "moe.num_shared_experts": 1,
        **SIGMOID_ROUTER,
        "moe.normalize_top_k": True,
    },
    unused=("moe.bias_update_rate",),
    tensors={name: stored for name, stored in LLAMA.tensors.items() if ".mlp." not in name}
    | QK_NORM_TENSORS
    | {f"{LAYER}self_attn.indexer.{name}.weight": f"attention.indexer_{tensor}" for name, tensor in INDEXER.items()}
    | {
        f"{LAYER}mlp.gate_up_proj.weight": Rows("mlp.gate.weight", "mlp.up.weight"),
        f"{LAYER}mlp.down_proj.weight": "mlp.down.weight",
        f"{LAYER}mlp.gate.weight": "mlp.router.gate.weight",
        f"{LAYER}mlp.gate.e_score_correction_bias": "mlp.router.bias",
        f"{LAYER}mlp.experts.gate_up_proj": Rows("mlp.experts.gate", "mlp.experts.up", stacked=True),
        f"{LAYER}mlp.experts.down_proj": Rows("mlp.experts.down", stacked=True),
        f"{LAYER}mlp.shared_experts.gate_up_proj.weight": Rows("mlp.shared.gate.weight", "mlp.shared.up.weight"),
        f"{LAYER}mlp.shared_experts.down_proj.weight": "mlp.shared.down.weight",
    },
    # Those of published files, in which the model is the text part of a multimodal one.
    other_tensors={
        **{f"{LAYER}self_attn.index_{name}.weight": f"attention.indexer_{tensor}" for name, tensor in INDEXER.items()},
        **{f"{LAYER}mlp.{name}_proj.weight": f"mlp.{name}.weight" for name in ("gate", "up")},
        f"{HUB_EXPERTS}gate.weight": "mlp.router.gate.weight",
        f"{HUB_EXPERTS}e_score_correction_bias": "mlp.router.bias",
        **{
            f"{HUB_EXPERTS}experts.{{e}}.{word}.weight": f"mlp.experts.{name}"
            for word, name in {"w1": "gate", "w3": "up", "w2": "down"}.items()
        },
        **{
            f"{HUB_EXPERTS}shared_experts.{name}_proj.weight": f"mlp.shared.{name}.weight"
            for name in ("gate", "up", "down")
        },
    },
    ignored_tensors=(*LLAMA.ignored_tensors, "*mtp.*"),
)
