"""DeepSeek-V3, and other families with latent attention: Kimi K2, GLM-4.7-Flash, Youtu."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from phalanx.spec.families.family import (
    Field,
    Fixed,
    Read,
    Rows,
    SameAs,
    StoredTensors,
    Table,
    alternating_groups,
    any_value,
    pairs_of_halves,
    require_supported,
)
from phalanx.spec.families.forms import EqualLayers, LayersWithExperts, Rope
from phalanx.spec.families.glm4_moe import GLM4_MOE
from phalanx.spec.families.llama import LLAMA
from phalanx.spec.model import ModelSpec, yarn_mscale
from phalanx.spec.parts.mixers import LatentAttention


class WidthWithoutRotation(Read):
    """Channels of a head that are not rotated; `head_dim` has the others too."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the width of a head."""
        (width,) = super().read(name, config, dials).values()
        return {self.dial: width + dials["mixer.rope_dim"]}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the width of the channels that are not rotated."""
        return {name: spec.head_dim - spec.rotary_width}


class LatentRope(Rope):
    """Rotary embedding whose YaRN also changes the scale of scores, by the square of a factor of the context."""

    @property
    def dials(self) -> Mapping[str, Collection[object] | None]:
        """Dials of `model.rope`, and the scale of scores."""
        return dict(super().dials) | any_value("attention_scale")

    def read_table(self, rope: Table, config: Table, dials: Table) -> Table:
        """Return the dials of the embedding, and the scale of scores if it is not the default."""
        table = super().read_table(rope, config, dials)
        scale = rope.get("mscale_all_dim")
        if not scale or table["rope.scaling"] == "none":
            return table
        return table | {"attention_scale": dials["head_dim"] ** -0.5 * yarn_mscale(table["rope.factor"], scale) ** 2}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the embedding in the fields of all versions."""
        fields = super().write(name, spec)
        if spec.attention_scale is not None and spec.rope.factor > 1:
            square = spec.attention_scale * spec.head_dim**0.5
            scale = round((math.sqrt(square) - 1) / (yarn_mscale(spec.rope.factor) - 1), 9)
            for table in (fields[name], fields["rope_scaling"]):
                if table:
                    table["mscale_all_dim"] = scale
        return fields


class GroupLimit(Field):
    """Choice among all experts, or among those of the groups with the largest scores."""

    dials = any_value("moe.num_groups", "moe.top_groups")
    other_names = ("n_group", "topk_group")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the numbers of groups."""
        method = config.get(name, "greedy")
        require_supported(name, method, ("greedy", "group_limited_greedy"))
        if method == "greedy":
            return {}
        return {"moe.num_groups": config.get("n_group"), "moe.top_groups": config.get("topk_group")}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the method and the numbers of groups."""
        assert spec.moe
        method = "group_limited_greedy" if spec.moe.num_groups > 1 else "greedy"
        return {name: method, "n_group": spec.moe.num_groups, "topk_group": spec.moe.top_groups}


class IndexerTypes(Field):
    """List of layers with an indexer of their own. In others, queries would see the keys that one before has chosen."""

    other_names = ("index_topk_pattern", "index_topk_freq")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for a layer without an indexer."""
        if config.get(name) is None and config.get("index_topk_pattern") is None:
            require_supported("index_topk_freq", config.get("index_topk_freq", 1), (1,))
        for field in (name, "index_topk_pattern"):
            for layer in config.get(field) or ():
                require_supported(field, layer, ("full", "F"))
        return {}


def rotated_last(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of heads that are stored with the rotated channels last, in neighboring pairs."""
    rotated = layer.rotary_width
    channels = [*range(rotated, layer.head_dim), *pairs_of_halves(rotated)]
    for first in range(0, rows, layer.head_dim):
        yield from (first + channel for channel in channels)


def latent_and_key(layer: ModelSpec, rows: int) -> list[int]:
    """Return the rows of the latent of keys and values, and those of the rotated key, in neighboring pairs."""
    rank = rows - layer.rotary_width
    return [*range(rank), *(rank + channel for channel in pairs_of_halves(layer.rotary_width))]


def keys_and_values(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of keys and values, head by head."""
    assert isinstance(layer.mixer, LatentAttention)
    return alternating_groups((layer.head_dim - layer.rotary_width, layer.mixer.value_dim), rows)


ATTENTION = "model.layers.{i}.self_attn."
LATENT_TENSORS: StoredTensors = {
    f"{ATTENTION}q_proj.weight": Rows("attention.wq.weight", order=rotated_last),
    f"{ATTENTION}q_a_proj.weight": "attention.wq_a.weight",
    f"{ATTENTION}q_a_proj.bias": "attention.wq_a.bias",
    f"{ATTENTION}q_a_layernorm.weight": "attention.q_latent_norm.weight",
    f"{ATTENTION}q_b_proj.weight": Rows("attention.wq_b.weight", order=rotated_last),
    **{
        f"{ATTENTION}kv_a_proj_with_mqa.{leaf}": Rows(
            f"attention.wkv_a.{leaf}", f"attention.wk_rope.{leaf}", order=latent_and_key
        )
        for leaf in ("weight", "bias")
    },
    f"{ATTENTION}kv_a_layernorm.weight": "attention.latent_norm.weight",
    f"{ATTENTION}kv_b_proj.weight": Rows("attention.wk_b.weight", "attention.wv_b.weight", order=keys_and_values),
}
INDEXER_TENSORS: StoredTensors = {
    f"{ATTENTION}indexer.wq_b.weight": "attention.indexer_queries",
    f"{ATTENTION}indexer.wk.weight": "attention.indexer_keys",
    f"{ATTENTION}indexer.k_norm.weight": "attention.indexer_key_norm",
    f"{ATTENTION}indexer.k_norm.bias": "attention.indexer_key_bias",
    f"{ATTENTION}indexer.weights_proj.weight": "attention.indexer_weights",
}
LATENT_FIELDS: dict[str, Field] = {
    "vocab_size": Read("vocab_size", 129280),
    "hidden_size": Read("hidden_size", 7168),
    "num_hidden_layers": Read("num_layers", 61),
    "num_attention_heads": Read("num_heads", 128),
    "num_key_value_heads": SameAs("num_heads"),
    "q_lora_rank": Read("mixer.query_rank", 1536),
    "kv_lora_rank": Read("mixer.latent_rank", 512),
    "qk_rope_head_dim": Read("mixer.rope_dim", 64),
    "qk_nope_head_dim": WidthWithoutRotation("head_dim", 128),
    "v_head_dim": Read("mixer.value_dim", 128),
    "head_dim": SameAs("mixer.rope_dim"),
    "qk_head_dim": SameAs("head_dim"),
    "intermediate_size": Read("ffn_hidden_size", 18432),
    "max_position_embeddings": Read("max_seq_len", 4096),
    "rms_norm_eps": Read("norm_eps", 1e-6),
    "attention_bias": Read("attention_bias", False, words={False: "none", True: "all", None: "none"}),
    "rope_parameters": LatentRope(),
    "rope_interleave": Fixed(True),
}
"""Fields of a model with latent attention. Rotated channels are neighbors in checkpoints."""
LATENT = {"mixer.kind": "latent_attention", "qk_norm": "none"}
GLM_FIELDS = {
    name: field for name, field in GLM4_MOE.fields.items() if name not in ("use_qk_norm", "partial_rotary_factor")
}

DEEPSEEK_V3 = replace(
    GLM4_MOE,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    other_types=("kimi_k2",),
    wrapper="kimi_k25",
    fields=LATENT_FIELDS
    | GLM_FIELDS
    | LATENT_FIELDS
    | {
        "moe_intermediate_size": Read("moe.expert_ffn_size", 2048),
        "n_routed_experts": Read("moe.num_experts", 256, other_names=("num_local_experts",)),
        "routed_scaling_factor": Read("moe.routed_scale", 2.5),
        "n_group": Read("moe.num_groups", 8),
        "topk_group": Read("moe.top_groups", 4),
        "first_k_dense_replace": Read("moe.num_leading_dense_layers", 3),
        "moe_layer_freq": Fixed(1),
        **dict.fromkeys(("ep_size", "aux_loss_alpha", "seq_aux"), Field()),
    },
    constants=GLM4_MOE.constants | LATENT,
    tensors=GLM4_MOE.tensors | LATENT_TENSORS,
)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    mtp=None,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    other_types=(),
    wrapper=None,
    fields={name: field for name, field in DEEPSEEK_V3.fields.items() if name != "first_k_dense_replace"}
    | {
        "max_position_embeddings": Read("max_seq_len", 163840),
        **dict.fromkeys(("head_dim", "qk_head_dim"), Field()),  # not read: they follow from the parts
        "n_routed_experts": Read("moe.num_experts", 256, other_names=("num_experts", "num_local_experts")),
        "mlp_layer_types": LayersWithExperts(3, other_names=("first_k_dense_replace",)),
        "index_topk": Read("mixer.indexer.top_k", 2048),
        "index_n_heads": Read("mixer.indexer.num_heads", 64),
        "index_head_dim": Read("mixer.indexer.head_dim", 128),
        "layer_types": EqualLayers("indexed_attention"),
    },
    tensors=DEEPSEEK_V3.tensors | INDEXER_TENSORS,
)

GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    fields=DEEPSEEK_V32.fields
    | {
        "vocab_size": Read("vocab_size", 154880),
        "hidden_size": Read("hidden_size", 6144),
        "num_hidden_layers": Read("num_layers", 78),
        "num_attention_heads": Read("num_heads", 64),
        "q_lora_rank": Read("mixer.query_rank", 2048),
        "qk_nope_head_dim": WidthWithoutRotation("head_dim", 192),
        "v_head_dim": Read("mixer.value_dim", 256),
        "intermediate_size": Read("ffn_hidden_size", 12288),
        "max_position_embeddings": Read("max_seq_len", 202752),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "n_group": Read("moe.num_groups", 1),
        "topk_group": Read("moe.top_groups", 1),
        "index_n_heads": Read("mixer.indexer.num_heads", 32),
        "indexer_types": IndexerTypes(),
        **dict.fromkeys(("indexer_rope_interleave", "index_skip_topk_offset"), Field()),
    },
    constants=DEEPSEEK_V32.constants | {"mixer.indexer.rotates_neighbors": True},
)

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    mtp=None,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    other_types=(),
    wrapper=None,
    fields={
        name: field
        for name, field in DEEPSEEK_V3.fields.items()
        if name not in ("rope_interleave", "n_group", "topk_group")
    }
    | {
        "vocab_size": Read("vocab_size", 102400),
        "hidden_size": Read("hidden_size", 4096),
        "num_hidden_layers": Read("num_layers", 32),
        "num_attention_heads": Read("num_heads", 32),
        "intermediate_size": Read("ffn_hidden_size", 11008),
        "max_position_embeddings": Read("max_seq_len", 2048),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1407),
        "num_experts_per_tok": Read("moe.top_k", None),
        "n_routed_experts": Read("moe.num_experts", 64, other_names=("num_experts",)),
        "n_shared_experts": Read("moe.num_shared_experts", 2),
        "routed_scaling_factor": Read("moe.routed_scale", 1.0),
        "first_k_dense_replace": Read("moe.num_leading_dense_layers", 0),
        "norm_topk_prob": Field(),  # not read: weights are never normalized
        "scoring_func": Fixed("softmax"),
        "topk_method": GroupLimit(),
    },
    constants=LATENT | {"moe.normalize_top_k": False, "moe.group_scores": 1, "moe.z_loss_coef": 0.0},
    unused=("moe.balance_loss_coef",),
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    other_types=(),
    wrapper=None,
    fields={name: field for name, field in DEEPSEEK_V3.fields.items() if name != "first_k_dense_replace"}
    | {
        "vocab_size": Read("vocab_size", 154880),
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 47),
        "num_attention_heads": Read("num_heads", 20),
        "q_lora_rank": Read("mixer.query_rank", 768),
        "qk_nope_head_dim": WidthWithoutRotation("head_dim", 192),
        "v_head_dim": Read("mixer.value_dim", 256),
        "intermediate_size": Read("ffn_hidden_size", 10240),
        "max_position_embeddings": Read("max_seq_len", 202752),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1536),
        "n_routed_experts": Read("moe.num_experts", 64, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 4),
        "routed_scaling_factor": Read("moe.routed_scale", 1.8),
        "n_group": Read("moe.num_groups", 1),
        "topk_group": Read("moe.top_groups", 1),
        "mlp_layer_types": LayersWithExperts(),
    },
)

YOUTU = replace(
    LLAMA,
    model_type="youtu",
    architecture="YoutuForCausalLM",
    fields=LATENT_FIELDS
    | LLAMA.fields
    | LATENT_FIELDS
    | {
        "vocab_size": Read("vocab_size", 128256),
        "hidden_size": Read("hidden_size", 2048),
        "num_hidden_layers": Read("num_layers", 32),
        "num_attention_heads": Read("num_heads", 16),
        "intermediate_size": Read("ffn_hidden_size", 6144),
        "max_position_embeddings": Read("max_seq_len", 131072),
        "tie_word_embeddings": Read("tie_embeddings", True),
        "embedding_initializer_range": Field(),
    },
    constants=LLAMA.constants | LATENT,
    tensors=LLAMA.tensors | LATENT_TENSORS,
)
