"""Cohere 2 with experts: attention and experts in parallel, after one norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.spec.errors import UserError
from phalanx.spec.families.cohere import COHERE2
from phalanx.spec.families.family import Field, Read, Table, any_value, require_supported
from phalanx.spec.families.forms import DENSE, FULL, NOPE, ROTARY, SPARSE, WINDOW, LayerLists, LayerTypes, leading_dense
from phalanx.spec.families.llama import EXPERT_TENSORS, SHARED_EXPERT_TENSORS
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec


class NormOrRmsNorm(Field):
    """Epsilons of LayerNorm and of RMSNorm, which the model has if the latter is given."""

    dials = {"norm": ("layernorm", "rmsnorm")} | any_value("norm_eps")
    other_names: tuple[str, ...] = ("rms_norm_eps",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the norm."""
        eps = config.get("rms_norm_eps")
        norm = "layernorm" if eps is None else "rmsnorm"
        return {"norm": norm, "norm_eps": config.get(name, 1e-5) if eps is None else eps}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the epsilon of the norm."""
        return {name if spec.norm == "layernorm" else "rms_norm_eps": spec.norm_eps}


class Selection(Field):
    """Scores of experts: a softmax of the chosen logits, or sigmoids, which may be normalized."""

    dials = any_value("moe.router_score", "moe.normalize_top_k")
    other_names: tuple[str, ...] = ("norm_topk_prob",)

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the score, and whether it is normalized."""
        score = config.get(name, "softmax")
        require_supported(name, score, ("softmax", "sigmoid"))
        normalizes = score == "softmax" or config.get("norm_topk_prob", True)
        return {"moe.router_score": score, "moe.normalize_top_k": normalizes}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return both."""
        assert spec.moe
        return {name: spec.moe.router_score, "norm_topk_prob": spec.moe.normalize_top_k}


class Combination(Field):
    """How outputs of shared experts and of others are combined: by their sum."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return no dials. Raises UserError for the average."""
        strategy = config.get(name, "average")
        if dials["moe.num_shared_experts"] and strategy != "sum":
            raise UserError(f"config.json {name}", strategy, "is not supported", 'use a model with "sum"')
        return {}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the sum."""
        return {name: "sum"}


def attention_types(config: Table, dials: Table) -> list[str]:
    """Return the types of layers: the last of each interval has full attention. Leading dense layers count apart."""
    num_dense = config.get("first_k_dense_replace", 0)
    intervals = (config.get("prefix_dense_sliding_window_pattern", 1), config.get("sliding_window_pattern", 4))
    counts = (num_dense, dials["num_layers"] - num_dense)
    return [
        "sliding_attention" if layer % interval else "full_attention"
        for interval, count in zip(intervals, counts, strict=True)
        for layer in range(1, count + 1)
    ]


def mlp_types(config: Table, dials: Table) -> list[str]:
    """Return the types of MLPs, of which leading ones may be dense."""
    return leading_dense(config.get("first_k_dense_replace", 0), dials["num_layers"])


@dataclass(frozen=True)
class Positions(LayerTypes):
    """Interval of full attention among dense layers. If it is 1, dense layers without a window have positions, too."""

    def words(self, name: str, config: Table, dials: Table) -> Sequence[object]:
        """Return for each layer whether it has positions."""
        attention = config.get("layer_types") or attention_types(config, dials)
        mlps = config.get("mlp_layer_types") or mlp_types(config, dials)
        dense_rotate = config.get(name, 1) == 1
        return [
            kind == "sliding_attention" or (dense_rotate and mlp == "dense")
            for kind, mlp in zip(attention, mlps, strict=False)
        ]

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the interval."""
        dense = (layer for layer in layer_specs(spec) if layer.moe is None and layer.sliding_window is None)
        return {name: 1 if all(layer.position_embedding == "rope" for layer in dense) else 2}


COHERE2_MOE = replace(
    COHERE2,
    model_type="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    fields=COHERE2.fields
    | {
        "head_dim": Read("head_dim", 128),
        "layer_norm_eps": NormOrRmsNorm(),
        "intermediate_size": Read("moe.expert_ffn_size", 22528),
        "prefix_dense_intermediate_size": Read(
            "ffn_hidden_size", None, unset=lambda dials: dials["moe.expert_ffn_size"]
        ),
        "num_experts": Read("moe.num_experts", 8),
        "num_experts_per_tok": Read("moe.top_k", 2),
        "num_shared_experts": Read("moe.num_shared_experts", 0),
        "shared_expert_combination_strategy": Combination(),
        "expert_selection_fn": Selection(),
        "layer_types": LayerLists(
            {
                "layer_types": LayerTypes(
                    {"sliding_attention": WINDOW, "full_attention": FULL},
                    attention_types,
                    ("sliding_window_pattern", "first_k_dense_replace"),
                ),
                "prefix_dense_sliding_window_pattern": Positions({True: ROTARY, False: NOPE}),
                "mlp_layer_types": LayerTypes({"dense": DENSE, "sparse": SPARSE}, mlp_types),
            }
        ),
    },
    constants={name: value for name, value in COHERE2.constants.items() if name != "norm"} | {"moe.z_loss_coef": 0.0},
    unused=("moe.balance_loss_coef",),
    tensors=COHERE2.tensors | EXPERT_TENSORS | SHARED_EXPERT_TENSORS,
)
