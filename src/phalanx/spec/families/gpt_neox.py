"""GPT-NeoX and Pythia: attention and MLP in parallel, each after a norm of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.spec.families.family import Family, Read, Rows, Table, Written, alternating_groups
from phalanx.spec.families.forms import Rope
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True)
class NeoXRope(Rope):
    """Rotary embedding, with other names of base and fraction in older versions."""

    other_names: tuple[str, ...] = (*Rope.other_names, "rotary_pct", "rotary_emb_base")

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the dials of the embedding."""
        older = {
            "rope_theta": config.get("rotary_emb_base", self.theta),
            "partial_rotary_factor": config.get("rotary_pct", self.fraction),
        }
        return super().read(name, config | older, dials)

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the embedding in the fields of all versions."""
        table = super().write(name, spec)
        older = {"rotary_emb_base": spec.rope.theta, "rotary_pct": spec.rope.fraction}
        return older | {field: table[field] for field in (name, "rope_scaling")}


def rows_by_head(layer: ModelSpec, rows: int) -> Iterator[int]:
    """Yield the rows of queries, keys and values of one head after another."""
    return alternating_groups([layer.head_dim] * 3, rows)


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields={
        "vocab_size": Read("vocab_size", 50432),
        "hidden_size": Read("hidden_size", 6144),
        "num_hidden_layers": Read("num_layers", 44),
        "num_attention_heads": Read("num_heads", 64),
        "intermediate_size": Read("ffn_hidden_size", 24576),
        "max_position_embeddings": Read("max_seq_len", 2048),
        "layer_norm_eps": Read("norm_eps", 1e-5),
        "hidden_act": Read(
            "activation",
            "gelu",
            words={"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"},
        ),
        "tie_word_embeddings": Read("tie_embeddings", False),
        "use_parallel_residual": Read("parallel_residual", True, words={True: "two_norms", False: "none"}),
        "attention_bias": Read("bias", True, words={True: True}),
        "rope_parameters": NeoXRope(has_fraction=True, fraction=0.25),
        "hidden_dropout": Written(0.0),
        "attention_dropout": Written(0.0),
        "torch_dtype": Written("float32"),
        "bos_token_id": Written(None),
        "eos_token_id": Written(None),
        "classifier_dropout": Written(0.0),
    },
    constants={"norm": "layernorm"},
    tensors={
        "gpt_neox.embed_in.weight": "embedding.weight",
        "gpt_neox.final_layer_norm.weight": "norm.weight",
        "gpt_neox.final_layer_norm.bias": "norm.bias",
        "embed_out.weight": "head.weight",
        **{
            f"gpt_neox.layers.{{i}}.{theirs}.{leaf}": f"{ours}.{leaf}"
            for theirs, ours in {
                "input_layernorm": "attention_norm",
                "attention.dense": "attention.wo",
                "post_attention_layernorm": "mlp_norm",
                "mlp.dense_h_to_4h": "mlp.up",
                "mlp.dense_4h_to_h": "mlp.down",
            }.items()
            for leaf in ("weight", "bias")
        },
        **{
            f"gpt_neox.layers.{{i}}.attention.query_key_value.{leaf}": Rows(
                *(f"attention.w{name}.{leaf}" for name in "qkv"), order=rows_by_head
            )
            for leaf in ("weight", "bias")
        },
    },
    prefix="gpt_neox.",
    ignored_tensors=("*rotary_emb.inv_freq", "*.attention.bias", "*.attention.masked_bias"),
)
