"""The layers of a model, each described like a model of which all layers are equal.

Why: `docs/design/decisions/kinds-of-layers.md`."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import cycle, islice

from phalanx.spec.errors import UserError
from phalanx.spec.layer_pattern import parse_layers
from phalanx.spec.model import ModelSpec


@lru_cache
def layer_specs(spec: ModelSpec) -> tuple[ModelSpec, ...]:
    """Return the description of each layer: the model's, with the values of the layer's kind.

    Those for multi-token prediction follow the others; only they have `mtp`. Equal layers are one object. A layer has
    no experts if its `moe` is None, and no window if that is None. It reads the keys and values of another one if its
    `num_shared_kv_layers` is 1."""
    layers = _model_layers(spec)
    if spec.num_shared_kv_layers:
        shared = cache(lambda layer: _reading_other_keys(layer, spec.shared_kv_ffn_size))
        first = spec.num_layers - spec.num_shared_kv_layers
        layers = (*layers[:first], *map(shared, layers[first:]))
    if spec.mtp is None:
        return layers
    kind = next((kind for kind in spec.kinds if kind.name == spec.mtp.kind), None)
    layer = spec.layer_of_kind(kind) if spec.mtp.kind else layers[-1]
    return layers + (layer.model_copy(update={"mtp": spec.mtp, "layer_scalars": False}),) * spec.mtp.layers


def _reading_other_keys(layer: ModelSpec, ffn_size: int | None) -> ModelSpec:
    values = {"num_shared_kv_layers": 1, "ffn_hidden_size": ffn_size or layer.ffn_hidden_size}
    return layer.model_copy(update=values)


def _model_layers(spec: ModelSpec) -> tuple[ModelSpec, ...]:
    kinds = {kind.name: kind for kind in spec.kinds}
    leading = spec.moe.num_leading_dense_layers if spec.moe else 0
    if spec.layers is not None:
        of_kind = cache(lambda name: spec.layer_of_kind(kinds.get(name)))
        dense = cache(lambda layer: layer.model_copy(update={"moe": None}))
        names = islice(cycle(parse_layers(spec.layers)), spec.num_layers)
        layers = [of_kind(name) for name in names]
        return (*map(dense, layers[:leading]), *layers[leading:])
    full = set(spec.full_attention_layers)
    of_form = cache(
        lambda has_window, has_experts: spec.one_layer(
            sliding_window=spec.sliding_window if has_window else None,
            moe=spec.moe if has_experts else None,
        )
    )
    return tuple(of_form(layer not in full, layer >= leading) for layer in range(spec.num_layers))


@lru_cache
def distinct_layers(spec: ModelSpec) -> tuple[ModelSpec, ...]:
    """Return the descriptions of the kinds of layers, each once, in the order of the first layer of each."""
    return tuple(dict.fromkeys(layer_specs(spec)))


@lru_cache
def expert_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Return the layers (from 0) that have experts in place of an MLP."""
    return tuple(index for index, layer in enumerate(layer_specs(spec)) if layer.moe is not None)


def longest_sequence(spec: ModelSpec) -> int:
    """Return the tokens of the longest sequence for which a model is made, and which its mixers compute."""
    limits = [layer.max_tokens for layer in distinct_layers(spec)]
    return min([spec.max_seq_len, *filter(None, limits)])


def check_sequence(spec: ModelSpec, field: str, tokens: int) -> None:
    """Raise UserError if a model cannot compute sequences of some tokens, which `field` has."""
    if spec.position_embedding == "learned" and tokens > spec.max_seq_len:
        problem = f"is longer than the model's learned positions (model.max_seq_len = {spec.max_seq_len})"
        raise UserError(field, tokens, problem, f"use at most {spec.max_seq_len}")
    for layer in distinct_layers(spec):
        limit = layer.max_tokens
        if limit and tokens > limit:
            name = "model.mixer.indexer.top_k" if layer.mixer else "model.indexer.block_size x top_blocks"
            problem = f"exceeds {name} ({limit}): of more tokens, sparse attention skips some"
            raise UserError(field, tokens, f"{problem}, which Phalanx does not compute", f"use at most {limit}")
