"""Cohere (Command R) and Cohere 2 (Command R7B, Command A): attention and MLP in parallel, after one norm."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.errors import UserError
from phalanx.spec.families.family import Field, Fixed, Read, Table, rotated_pairs
from phalanx.spec.families.forms import FULL_NOPE, WINDOW, LayerTypes, Rope, every_nth_full
from phalanx.spec.families.llama import INTERLEAVED_TENSORS, LLAMA, each_head_norm_tensors, query_heads
from phalanx.spec.model import ModelSpec


class LogitScale(Read):
    """Factor of the logits, by whose inverse the model divides."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the divisor."""
        return {self.dial: 1 / super().read(name, config, dials)[self.dial]}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the factor."""
        return {name: 1 / spec.logits_divisor}


class Window(Read):
    """Window of the layers with positions."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the window. Raises UserError if there is none, because layers then have no positions."""
        window = super().read(name, config, dials)
        if window[self.dial] is None:
            raise UserError(f"config.json {name}", None, "is not supported", "set the window of published models, 4096")
        return window


COHERE = replace(
    LLAMA,
    model_type="cohere",
    architecture="CohereForCausalLM",
    fields={name: field for name, field in LLAMA.fields.items() if name != "rms_norm_eps"}
    | {
        "vocab_size": Read("vocab_size", 256000),
        "hidden_size": Read("hidden_size", 8192),
        "intermediate_size": Read("ffn_hidden_size", 22528),
        "num_hidden_layers": Read("num_layers", 40),
        "num_attention_heads": Read("num_heads", 64),
        "num_key_value_heads": Read("num_kv_heads", None, unset=query_heads),
        "max_position_embeddings": Read("max_seq_len", 8192),
        "layer_norm_eps": Read("norm_eps", 1e-5),
        "rope_parameters": Rope(theta=500_000.0),
        "logit_scale": LogitScale("logits_divisor", 0.0625),
        "tie_word_embeddings": Read("tie_embeddings", True),
        "use_qk_norm": Read("qk_norm", False, words={False: "none", True: "each_head"}),
    },
    constants={"norm": "layernorm", "norm_parameters": "weight", "parallel_residual": "one_norm"},
    tensors={name: stored for name, stored in LLAMA.tensors.items() if "post_attention_layernorm" not in name}
    | INTERLEAVED_TENSORS
    | each_head_norm_tensors("q_norm", "k_norm", order=rotated_pairs),
)

COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    fields=COHERE.fields
    | {
        "rope_parameters": Rope(),
        "use_qk_norm": Fixed(False),
        "sliding_window": Window("sliding_window", 4096),
        "layer_types": LayerTypes(
            {"sliding_attention": WINDOW, "full_attention": FULL_NOPE},
            every_nth_full(4, "sliding_window_pattern"),
            ("sliding_window_pattern",),
        ),
        # Fields of published files, which transformers does not read.
        "use_gated_activation": Fixed(True),
        "use_parallel_block": Fixed(True),
        "order_of_interleaved_layers": Fixed("local_attn_first"),
        "position_embedding_type": Fixed("rope_gptj"),
        "rotary_pct": Fixed(1.0),
        **dict.fromkeys(
            ("layer_switch", "use_embedding_sharing", "use_parallel_embedding", "cache_implementation"), Field()
        ),
    },
)
