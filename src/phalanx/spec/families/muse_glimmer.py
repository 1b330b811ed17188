"""Muse Glimmer, its text model: gated attention, norms of heads without weights, full attention without positions.

transformers has it inside muse_glimmer only, and so have exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.spec.errors import UserError
from phalanx.spec.families.cohere import LogitScale
from phalanx.spec.families.family import Fixed, Read, Table
from phalanx.spec.families.forms import FULL, NOPE, ROTARY, WINDOW, LayerLists, LayerTypes, Rope, score_factor
from phalanx.spec.families.gemma import GEMMA2
from phalanx.spec.families.llama import LLAMA, even_head_dim, query_heads
from phalanx.spec.layers import layer_specs
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True)
class NormedHeadScale(Read):
    """Factor of attention's scores besides 1 / sqrt(head_dim)."""

    def read(self, name: str, config: Table, dials: Table) -> Table:
        """Return the scale of the scores."""
        return {self.dial: super().read(name, config, dials)[self.dial] * dials["head_dim"] ** -0.5}

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the factor that is read as the same scale, which is rounded."""
        return {name: score_factor(spec)}


class RopeOfNormedHeads(Rope):
    """Rotary embedding of queries and keys after their norms."""

    def read_table(self, rope: Table, config: Table, dials: Table) -> Table:
        """Return the dials of a table. YaRN's factor would change the norms, which here are those of rotated heads."""
        read = super().read_table(rope, config, dials)
        if read["rope.scaling"] == "yarn":
            raise UserError("config.json rope_type", "yarn", "is not supported", 'use a model with "default"')
        return read


def full_every_fourth(config: Table, dials: Table) -> list[str]:
    """Return the types of layers: from the last one back, every fourth has full attention."""
    last = dials["num_layers"] - 1
    return ["sliding_attention" if (last - layer) % 4 else "full_attention" for layer in range(last + 1)]


class RotatedLayers(LayerTypes):
    """List of the base of each layer, which is that of the model, or 0 in layers without positions."""

    def words(self, name: str, config: Table, dials: Table) -> Sequence[object]:
        """Return whether each layer has positions."""
        bases = config.get(name) or [kind != "full_attention" for kind in full_every_fourth(config, dials)]
        return [bool(base) for base in bases]

    def write(self, name: str, spec: ModelSpec) -> Table:
        """Return the list."""
        return {name: [spec.rope.theta if layer.position_embedding == "rope" else 0 for layer in layer_specs(spec)]}


MUSE_GLIMMER = replace(
    LLAMA,
    model_type="muse_glimmer_text",
    architecture="MuseGlimmerForConditionalGeneration",
    wrapper="muse_glimmer",
    wrapper_ties_embeddings=False,
    exported_tower={
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "pos_emb_height": 1,
        "pos_emb_width": 1,
    },
    fields={name: field for name, field in LLAMA.fields.items() if name != "hidden_act"}
    | {
        "vocab_size": Read("vocab_size", 202_048),
        "hidden_size": Read("hidden_size", 6656),
        "num_hidden_layers": Read("num_layers", 52),
        "num_key_value_heads": Read("num_kv_heads", 2, unset=query_heads),
        "head_dim": Read("head_dim", 128, unset=even_head_dim),
        "intermediate_size": Read("ffn_hidden_size", 19968),
        "max_position_embeddings": Read("max_seq_len", 131_072),
        "rms_norm_eps": Read("norm_eps", 1e-5),
        "post_norm_eps": Read("norm_after_eps", 1e-8),
        "hidden_activation": Fixed("silu"),
        "attention_bias": Fixed(False),
        "rope_parameters": RopeOfNormedHeads(),
        "qk_scale_factor": NormedHeadScale("attention_scale", 3.87),
        "sliding_window": Read("sliding_window", 2048),
        "layer_types": LayerLists(
            {
                "layer_types": LayerTypes({"sliding_attention": WINDOW, "full_attention": FULL}, full_every_fourth),
                "layer_rope_theta": RotatedLayers({True: ROTARY, False: NOPE}),
            }
        ),
        "output_multiplier": LogitScale("logits_divisor", 0.19611613513818404),
        "final_logit_softcapping": Read("logits_softcap", 20.0),
    },
    constants={
        # A rotation does not change the root mean square of a head.
        "qk_norm": "rotated_plain",
        "norm_position": "both",
        "norm_offset": "layers",
        "embedding_norm": True,
        "attention_gate": "channel",
    },
    prefix="model.language_model.",
    tensors={
        name.replace("model.", "model.language_model."): stored
        for name, stored in (
            GEMMA2.tensors | {"model.layers.{i}.self_attn.gate_proj.weight": "attention.wg.weight"}
        ).items()
    },
)
