"""EXAONE 4 and K-EXAONE: windows with positions in three of four layers, and full attention without."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.families.family import Field, Fixed, Read, Table
from phalanx.spec.families.forms import FULL_NOPE, WINDOW, LayersWithExperts, LayerTypes, every_nth_full
from phalanx.spec.families.glm4_moe import GLM4_MOE
from phalanx.spec.families.llama import query_heads
from phalanx.spec.families.olmo import OLMO2


class HybridLayers(LayerTypes):
    """List of the type of each layer; without a window, all have full attention and positions."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the kinds of layers, if there is a window."""
        return {} if dials["sliding_window"] is None else super().read(name, config, dials)


EXAONE4 = replace(
    OLMO2,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    fields=OLMO2.fields
    | {
        "vocab_size": Read("vocab_size", 102400),
        "num_key_value_heads": Read("num_kv_heads", 32, unset=query_heads),
        "intermediate_size": Read("ffn_hidden_size", 16384),
        "attention_bias": Fixed(False),
        "sliding_window": Read("sliding_window", 4096),
        # Published files have letters, such as "LLLG", and the list of types.
        "layer_types": HybridLayers(
            {"sliding_attention": WINDOW, "full_attention": FULL_NOPE},
            every_nth_full(4, "sliding_window_pattern"),
            ("sliding_window_pattern",),
        ),
    },
    constants={"qk_norm": "head", "norm_position": "after"},
)

EXAONE_MOE = replace(
    GLM4_MOE,
    mtp=None,
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    fields=EXAONE4.fields
    | {
        "num_experts": Read("moe.num_experts", 64, other_names=("num_local_experts",)),
        "num_experts_per_tok": Read("moe.top_k", 8),
        "moe_intermediate_size": Read("moe.expert_ffn_size", 1024),
        "num_shared_experts": Read("moe.num_shared_experts", 1),
        "mlp_layer_types": LayersWithExperts(1, other_names=("first_k_dense_replace",)),
        "routed_scaling_factor": Read("moe.routed_scale", 2.5),
        "norm_topk_prob": Read("moe.normalize_top_k", True),
        "n_group": Read("moe.num_groups", 1),
        "topk_group": Read("moe.top_groups", 1),
        "num_nextn_predict_layers": Field(),
    },
    constants=GLM4_MOE.constants | {"qk_norm": "head"},
    tensors={name: stored for name, stored in GLM4_MOE.tensors.items() if not name.endswith("correction_bias")}
    | {"model.layers.{i}.mlp.e_score_correction_bias": "mlp.router.bias"},
    ignored_tensors=(*GLM4_MOE.ignored_tensors, "mtp.*"),
)
