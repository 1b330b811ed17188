"""Modules of a block do what its declaration says: names, saved bytes, FLOPs, messages, memory of the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import pytest

from phalanx.spec.layers import layer_specs
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts import attention, block, experts
from phalanx.spec.parts.mixers import GatedDelta, KimiDelta
from phalanx.spec.parts.operations import Part
from phalanx.spec.tuning import AdapterSpec, TuningSpec

pytest.importorskip("torch")

from tests.helpers.traced_block import (
    BlockCase,
    BlockNumbers,
    Numerics,
    declared_numbers,
    trace_block,
)

DENSE = ModelSpec(
    vocab_size=100, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_hidden_size=160, max_seq_len=64
)
GPT2 = DENSE.replace(num_kv_heads=4, norm="layernorm", activation="gelu_tanh", position_embedding="learned", bias=True)
SIX_EXPERTS = {"num_experts": 6, "top_k": 3, "expert_ffn_size": 96}
SPARSE = DENSE.replace(moe=SIX_EXPERTS)
SHARED = SIX_EXPERTS | {"num_shared_experts": 2}
SHARED_KEYS = {"num_layers": 2, "num_shared_kv_layers": 1}
CONVOLUTION = {"kind": "short_convolution", "kernel_size": 3}
LATENT = {
    "num_kv_heads": 4,
    "head_dim": 12,
    "mixer": {"kind": "latent_attention", "latent_rank": 20, "rope_dim": 4, "value_dim": 6},
}
INDEXER = {"num_heads": 3, "head_dim": 8, "top_k": 64}
GATED_DELTA = {
    "kind": "gated_delta",
    "num_key_heads": 4,
    "num_value_heads": 8,
    "key_head_dim": 8,
    "value_head_dim": 24,
}
KIMI_DELTA = {"kind": "kimi_delta", "num_heads": 4, "head_dim": 24}
MAMBA = {"kind": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 4, "chunk_size": 8}
MAMBA_OF_GROUPS = MAMBA | {"num_groups": 4, "bias": True}
MODELS = {
    "grouped heads": DENSE,
    "wide heads": DENSE.replace(head_dim=10, ffn_hidden_size=400),
    "norms of heads": DENSE.replace(qk_norm="head", num_heads=6, head_dim=10),
    "as many key/value heads": DENSE.replace(num_kv_heads=4),
    "one key/value head": DENSE.replace(qk_norm="head", num_kv_heads=1),
    "norms of each head": DENSE.replace(qk_norm="each_head", norm="layernorm", norm_parameters="weight"),
    "clipped heads": DENSE.replace(attention_clip=0.5),
    "clipped norms of all heads": DENSE.replace(attention_clip=0.5, qk_norm="full"),
    "norms of all heads": DENSE.replace(qk_norm="full", position_embedding="learned"),
    "biases": GPT2,
    "gelu": GPT2.replace(activation="gelu", position_embedding="rope", norm="rmsnorm", bias=False),
    "layernorm": DENSE.replace(norm="layernorm", qk_norm="head"),
    "biases of attention": DENSE.replace(attention_bias="all", rope={"fraction": 0.5}),
    "scales": DENSE.replace(attention_bias="qkv", attention_scale=0.3, residual_scale=0.7, activation="geglu_tanh"),
    "norms with offsets": DENSE.replace(norm_offset=True, qk_norm="head", norm_position="both"),
    "norms of outputs with an epsilon of their own": DENSE.replace(
        norm_position="both", norm_after_eps=0.1, qk_norm="rotated_plain", norm_offset="layers"
    ),
    "gate of attention": DENSE.replace(attention_gate="channel", qk_norm="head", norm_offset=True),
    "gate of attention and biases": DENSE.replace(attention_gate="channel", attention_bias="all", num_kv_heads=4),
    "gate of heads": DENSE.replace(attention_gate="head", qk_norm="head", norm_offset=True, attention_bias="all"),
    "gate of a head of a rank": DENSE.replace(attention_gate="head", num_heads=2, head_dim=20),
    "gate of heads by a softplus": DENSE.replace(attention_gate="head_softplus", num_kv_heads=4),
    "xIELU": DENSE.replace(activation="xielu", qk_norm="head"),
    "limits of a SwiGLU": DENSE.replace(silu_limit=0.3),
    "limits of experts": SPARSE.replace(moe=SHARED, silu_limit=0.3, shared_silu_limit=0.5),
    "capped scores": DENSE.replace(attention_softcap=3.0),
    "parallel residual": DENSE.replace(parallel_residual="two_norms"),
    "parallel residual with one norm": DENSE.replace(
        parallel_residual="one_norm", norm="layernorm", norm_parameters="weight"
    ),
    "norms without parameters": DENSE.replace(norm_parameters="none", qk_norm="head"),
    "layernorm without parameters": DENSE.replace(norm="layernorm", norm_parameters="none"),
    "experts and attention in parallel": SPARSE.replace(parallel_residual="one_norm"),
    "narrow values": DENSE.replace(value_head_dim=6, qk_norm="head"),
    "narrow, scaled values and a gate": DENSE.replace(
        value_head_dim=4, value_scale=0.7, attention_gate="channel", attention_sinks=True
    ),
    "scaled values": DENSE.replace(value_scale=0.7),
    "norm of values": DENSE.replace(value_norm=True),
    "values from keys": DENSE.replace(value_norm=True, values_from_keys=True, qk_norm="head", attention_scale=1.0),
    "values from keys without norms of these": DENSE.replace(value_norm=True, values_from_keys=True),
    "rotation of a part of all frequencies": DENSE.replace(rope={"scaling": "proportional", "fraction": 0.5}),
    "scaled layer": DENSE.replace(layer_scalars=True),
    "query temperature": DENSE.replace(query_temperature={"scale": 0.5, "interval": 4}),
    "query temperature without positions": DENSE.replace(
        query_temperature={"scale": 0.5, "interval": 4, "offset": 1}, position_embedding="none", qk_norm="head"
    ),
    "window": DENSE.replace(sliding_window=5),
    "chunks": DENSE.replace(attention_chunk=12),
    "norms of rotated heads": DENSE.replace(qk_norm="rotated", attention_scale=0.3),
    "norms of rotated heads without weights": DENSE.replace(
        qk_norm="rotated_plain", query_temperature={"scale": 0.5, "interval": 4}
    ),
    "indexer of blocks": DENSE.replace(indexer={"num_heads": 2, "head_dim": 8, "block_size": 16, "top_blocks": 4}),
    "sinks": DENSE.replace(attention_sinks=True),
    "window, sinks and capped scores": DENSE.replace(sliding_window=5, attention_sinks=True, attention_softcap=3.0),
    "norms before and after": DENSE.replace(norm_position="both"),
    "norms after": DENSE.replace(norm_position="after"),
    "biases and norms before and after": GPT2.replace(norm_position="both"),
    "no positions": DENSE.replace(position_embedding="none"),
    "prediction": DENSE.replace(mtp={}, norm_offset=True),
    "prediction and experts": SPARSE.replace(mtp={}, norm="layernorm"),
    "inputs of layers": DENSE.replace(per_layer_input_size=8, norm_position="both", activation="geglu_tanh"),
    "inputs of layers and norms before": DENSE.replace(per_layer_input_size=8, num_kv_heads=4),
    "inputs of layers and experts": SPARSE.replace(
        moe=SIX_EXPERTS | {"dense_branch": True}, norm_position="both", per_layer_input_size=8
    ),
    "keys of another layer": DENSE.replace(**SHARED_KEYS, value_norm=True, qk_norm="head", attention_clip=0.5),
    "keys of another layer, gate and sinks": DENSE.replace(
        **SHARED_KEYS, attention_gate="channel", attention_sinks=True, num_kv_heads=4, qk_norm="rotated"
    ),
    "convolution": DENSE.replace(mixer=CONVOLUTION),
    "convolution with biases": DENSE.replace(mixer=CONVOLUTION | {"kernel_size": 5, "bias": True}),
    "convolution and experts": SPARSE.replace(mixer=CONVOLUTION),
    "latent attention": DENSE.replace(**LATENT),
    "latent attention with a latent of queries": DENSE.replace(
        **{**LATENT, "mixer": LATENT["mixer"] | {"query_rank": 24, "value_dim": 12, "indexer": INDEXER}},
        attention_bias="all",
        query_temperature={"scale": 0.2, "interval": 4},
    ),
    "latent attention without positions": DENSE.replace(**LATENT, position_embedding="none", attention_scale=0.3),
    "latent attention with gates of heads": DENSE.replace(**LATENT, attention_gate="head"),
    "latent attention with a latent of queries and gates of heads": DENSE.replace(
        **{**LATENT, "mixer": LATENT["mixer"] | {"query_rank": 24, "value_dim": 12}}, attention_gate="head"
    ),
    "few key heads": DENSE.replace(mixer=GATED_DELTA | {"num_key_heads": 2}),
    "gated delta rule": DENSE.replace(mixer=GATED_DELTA),
    "gated delta rule and experts": SPARSE.replace(mixer=GATED_DELTA, norm_offset=True),
    "gated delta rule with negative eigenvalues": DENSE.replace(
        mixer=GATED_DELTA | {"negative_eigenvalues": True, "norm_eps": 1e-3}
    ),
    "kimi delta rule": DENSE.replace(mixer=KIMI_DELTA),
    "kimi delta rule without latents": DENSE.replace(mixer=KIMI_DELTA | {"has_latents": False, "decay_bound": -5.0}),
    "kimi delta rule and experts": SPARSE.replace(mixer=KIMI_DELTA | {"kernel_size": 3}, norm_offset=True),
    "mamba": DENSE.replace(mixer=MAMBA),
    "mamba of groups": DENSE.replace(mixer=MAMBA_OF_GROUPS | {"min_step": 0.1, "max_step": 0.5}),
    "mamba and experts": SPARSE.replace(mixer=MAMBA | {"convolution_bias": False}),
    "mamba parallel to attention": DENSE.replace(
        side_mixer=MAMBA | {"has_norm": False, "scales": (0.5, 0.7, 1.2, 1.3, 0.8), "output_scale": 0.6}
    ),
    "mamba with a norm parallel to attention": DENSE.replace(
        side_mixer=MAMBA_OF_GROUPS | {"output_scale": 0.6}, num_kv_heads=4, value_scale=0.7
    ),
    "scaled MLP": DENSE.replace(gate_scale=0.7, up_scale=1.3, value_scale=0.7),
    "mamba without a norm": DENSE.replace(mixer=MAMBA | {"has_norm": False, "scales": (0.5, 0.7, 1.2, 1.3, 0.8)}),
    "only mamba": DENSE.replace(mixer=MAMBA_OF_GROUPS, branches="mixer"),
    "only attention": DENSE.replace(branches="mixer", num_kv_heads=4),
    "only an MLP": DENSE.replace(branches="mlp", activation="relu2"),
    "only experts": SPARSE.replace(branches="mlp", activation="relu2", moe=SHARED | {"shared_ffn_size": 112}),
    "latent experts": SPARSE.replace(moe=SHARED | {"latent_size": 24}, activation="relu2"),
    "experts": SPARSE,
    "experts and norms before and after": SPARSE.replace(norm_position="both"),
    "experts and a dense branch": SPARSE.replace(moe=SIX_EXPERTS | {"dense_branch": True}),
    "experts and a dense branch with norms after": SPARSE.replace(
        moe=SIX_EXPERTS | {"dense_branch": True}, norm_position="both"
    ),
    "sigmoid router": DENSE.replace(
        moe=SHARED | {"router_score": "sigmoid", "normalize_top_k": False, "bias_update_rate": 0.1}
    ),
    "weighted inputs of experts": SPARSE.replace(
        moe=SIX_EXPERTS
        | {"router_score": "sigmoid", "normalize_top_k": False, "weighs_inputs": True, "num_shared_experts": 1}
    ),
    "balance per micro-batch": DENSE.replace(moe=SHARED | {"balance_loss_scope": "micro_batch", "top_k": 1}),
    "groups of experts": SPARSE.replace(
        moe=SIX_EXPERTS
        | {"num_groups": 3, "top_groups": 2, "choice_bias": True, "routed_scale": 2.5, "weight_eps": 1e-6}
    ),
    "router with a norm and factors of experts": SPARSE.replace(
        moe=SIX_EXPERTS | {"dense_branch": True, "router_norm": True, "expert_scales": True}, norm_position="both"
    ),
    "shared expert with a gate": SPARSE.replace(
        moe=SIX_EXPERTS | {"num_shared_experts": 1, "shared_gate": True, "shared_ffn_size": 112}
    ),
    "experts with biases": SPARSE.replace(moe=SIX_EXPERTS | {"bias": True}, activation="clamped_swiglu"),
    "experts with biases and norms before and after": SPARSE.replace(
        moe=SIX_EXPERTS | {"bias": True}, norm_position="both"
    ),
    "shared expert": SPARSE.replace(moe=SHARED | {"num_shared_experts": 1}, qk_norm="full", norm="layernorm"),
}
"""A model for each dial of a part."""
HAS_ATTENTION = tuple(name for name, spec in MODELS.items() if spec.attends)
IN_RING = tuple(
    name
    for name in HAS_ATTENTION
    if not MODELS[name].sliding_window and not MODELS[name].side_mixer and "capped" not in name
)
HAS_EXPERTS = tuple(name for name, spec in MODELS.items() if spec.moe)
# Three heads of eight columns: each of two ranks has one and a half.
THREE_HEADS = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 8}
GATHERED = {"tp": 2, "tp_attention": "gathered"}
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one rank": ({}, tuple(MODELS)),
    "tp": ({"tp": 2}, tuple(MODELS)),
    "tp of whole tokens": ({"tp": 2, "sequence_parallel": False}, tuple(MODELS)),
    "copied heads": (
        {"tp": 4},
        (
            *("grouped heads", "one key/value head", "norms of all heads", "norms of each head", "window"),
            *("experts", "few key heads", "keys of another layer"),
        ),
    ),
    "gathered heads": (
        GATHERED,
        (
            *("grouped heads", "norms of heads", "norms of all heads", "norms of each head", "clipped heads"),
            *("biases", "gate of attention", "experts"),
        ),
    ),
    "gathered heads of whole tokens": (
        GATHERED | {"sequence_parallel": False},
        ("grouped heads", "biases", "experts", "convolution"),
    ),
    "ring": ({"cp": 2, "cp_method": "ring"}, IN_RING),
    "ulysses": ({"cp": 2, "cp_method": "ulysses"}, tuple(MODELS)),
    "ulysses of copied heads": (
        {"cp": 4, "cp_method": "ulysses"},
        ("grouped heads", "one key/value head", "window", "few key heads"),
    ),
    "tp and ulysses": ({"tp": 2, "cp": 2, "cp_method": "ulysses"}, ("grouped heads", "experts")),
    "tp and ring": ({"tp": 2, "cp": 2, "cp_method": "ring"}, ("grouped heads", "experts")),
    "ep": ({"ep": 2}, HAS_EXPERTS),
    "ep and tp": ({"ep": 2, "tp": 2}, HAS_EXPERTS),
    "ep and ring": ({"ep": 2, "cp": 2}, tuple(name for name in HAS_EXPERTS if name in HAS_ATTENTION)),
}
"""Layouts, each with models whose numbers it changes."""
NUMERICS = {
    "fp32": Numerics("fp32"),
    "fp64": Numerics("fp64"),
    "autocast": Numerics("bf16", autocast=True),
    "bf16": Numerics("bf16"),
}
# The plan counts neither the casts of gradients in autocast, nor the copies of experts' rows in fp64, where PyTorch has
# no grouped product.
PEAK_OF = {"fp32": True, "fp64": "dense", "autocast": False, "bf16": True}


def make_case(layout_name: str, model_name: str, numerics: str, masked: bool = False, **changes: Any) -> BlockCase:
    """Return a case by its names."""
    layout, _ = LAYOUTS[layout_name]
    spec = MODELS[model_name]
    spec = spec.replace(**THREE_HEADS) if layout.get("tp_attention") == "gathered" else spec
    return BlockCase(spec=spec, layout=Layout(**layout | changes), numerics=NUMERICS[numerics], masked=masked)


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model_name",
    [
        *("convolution", "convolution with biases", "gated delta rule", "kimi delta rule", "latent attention"),
        *("as many key/value heads", "gate of attention and biases", "only attention", "only mamba"),
    ],
)
@pytest.mark.parametrize("layout_name", ["one rank", "tp", "ulysses", "tp and ulysses"])
def test_peak_is_planned_if_it_is_in_the_mixer(layout_name: str, model_name: str, numerics: str) -> None:
    """Norms compute the many tokens in chunks, and the MLP is narrow."""
    case = make_case(layout_name, model_name, numerics)
    sizes = {"head_dim": 32, "state_size": 16, "chunk_size": 16} if model_name == "only mamba" else {}
    mixer = case.spec.mixer and case.spec.mixer.replace(**sizes)
    narrow = case.spec.replace(hidden_size=256, head_dim=64, ffn_hidden_size=64, max_seq_len=768, mixer=mixer)
    case = replace(case, spec=narrow, sequence=768)
    traced, declared = trace_block(case).peak_bytes, declared_numbers(case, describe(case)).peak_bytes
    assert declared == pytest.approx(traced, rel=0.004)


KNOWN_DEVIATIONS = {
    # A ring has gradients of its heads in fp32, which are wider than this MLP.
    **{
        make_case("ring", model, "bf16", masked): "peak_bytes"
        for model in (
            *("biases and norms before and after", "latent attention", "latent attention without positions"),
            "latent attention with gates of heads",
        )
        for masked in (False, True)
    },
    # In so small a block, the activation of one row in fp32 counts: it has nine tensors of its inner width.
    **{
        make_case(layout, "experts with biases", "bf16", masked): "peak_bytes"
        for layout in ("ring", "ulysses")
        for masked in (False, True)
    },
    # The scaled gradient is freed after it is gathered, but not at once.
    **{
        make_case("tp", "scales", numerics, masked): "peak_bytes"
        for numerics in ("fp32", "fp64", "bf16")
        for masked in (False, True)
    },
    # The products of a latent are planned 1.5 % too large.
    **{
        make_case(layout, "latent experts", "bf16", masked): "peak_bytes"
        for layout in ("ep", "ep and tp", "ep and ring")
        for masked in (False, True)
    },
    # The gradients of keys and values are one tensor, if no copy is needed because a rank has one head.
    **{
        make_case(*names, numerics, masked): "deferred_bytes"
        for names in (("ring", "one key/value head"), ("tp and ring", "grouped heads"), ("tp and ring", "experts"))
        for numerics in NUMERICS
        for masked in (False, True)
    },
}
"""Cases with a number that is not derived exactly, and its name."""


def describe(case: BlockCase) -> block.Block:
    """Return a new declaration of the last block."""
    *_, layer = layer_specs(case.spec)
    return block.describe_block(layer, case.layout)


def differences(case: BlockCase, traced: BlockNumbers, declared: BlockNumbers) -> dict[str, tuple[Any, Any]]:
    """Return the traced and declared numbers that differ, by name."""
    different = {
        field.name: (getattr(traced, field.name), getattr(declared, field.name))
        for field in fields(BlockNumbers)
        if getattr(traced, field.name) != getattr(declared, field.name)
    }
    is_planned = PEAK_OF[next(name for name, numerics in NUMERICS.items() if numerics == case.numerics)]
    # Not planned are the gradients of biases, and of experts the indices of their rows.
    # In small blocks, norms compute all tokens at once.
    tolerance = 0.013 if case.spec.moe or case.spec.norm_position != "before" or case.spec.mtp else 0.003
    tolerance = 0.013 if case.spec.per_layer_input_size else tolerance
    # Scans are planned for segments of several chunks, and for wide values.
    tolerance = 0.02 if isinstance(case.spec.mixer, GatedDelta | KimiDelta) else tolerance
    is_close = declared.peak_bytes == pytest.approx(traced.peak_bytes, rel=tolerance)
    if is_planned == "dense":
        is_planned = case.spec.moe is None
    # The chunks of a mixer are larger than the rest of so small a block.
    has_chunks = any(mixer and mixer.kind == "mamba2" for mixer in (case.spec.mixer, case.spec.side_mixer))
    # So is one row of an activation of several kernels in fp32.
    has_rows = case.spec.silu_limit is not None or case.spec.activation == "xielu"
    is_planned = is_planned and not has_chunks and not has_rows
    if is_close or not is_planned:
        different.pop("peak_bytes", None)
    if case in KNOWN_DEVIATIONS:
        del different[KNOWN_DEVIATIONS[case]]
    return different


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    ("layout_name", "model_name"), [(layout, model) for layout, (_, models) in LAYOUTS.items() for model in models]
)
def test_block_does_what_its_declaration_says(layout_name: str, model_name: str, numerics: str, masked: bool) -> None:
    case = make_case(layout_name, model_name, numerics, masked)
    assert differences(case, trace_block(case), declared_numbers(case, describe(case))) == {}


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("model_name", ["grouped heads", "biases", "shared expert", "parallel residual with one norm"])
@pytest.mark.parametrize("layout_name", ["one rank", "tp"])
def test_block_that_recomputes_norms_saves_what_its_declaration_says(
    layout_name: str, model_name: str, numerics: str
) -> None:
    case = make_case(layout_name, model_name, numerics, activation_checkpointing="norms")
    traced, declared = trace_block(case), declared_numbers(case, describe(case))
    assert (traced.saved_bytes, traced.deferred_bytes) == (declared.saved_bytes, declared.deferred_bytes)


def tuned(case: BlockCase, tuning: TuningSpec) -> BlockCase:
    """Return a case of whose model a part is trained."""
    return replace(case, spec=case.spec.model_copy(update={"tuning": tuning}))


def assert_numbers_of_tuned_block(different: dict[str, tuple[Any, Any]], case: BlockCase) -> None:
    """Assert that only the peak differs, by a few percent: gradients that frozen products lack are not counted one by
    one."""
    traced, declared = different.pop("peak_bytes", (1, 1))
    assert different == {}
    if not case.numerics.autocast:
        assert declared == pytest.approx(traced, rel=0.04)


FREEZE = {
    "products": ("blocks.*.w[qkvog].weight", "blocks.*.mlp.*", "blocks.*.out.weight"),
    "some products": ("blocks.*.w[qo].weight", "blocks.*.down*", "blocks.*.query.weight"),
    "all but norms": ("blocks.*.w?.*", "blocks.*.mlp.*", "blocks.*.projection.*"),
    "norms": ("blocks.*norm.*",),
}
FROZEN_MODELS = (
    *("biases", "gate of attention", "parallel residual with one norm", "shared expert", "latent experts"),
    *("prediction", "norms of all heads"),
)
TUNED_LAYOUTS = ("one rank", "tp", "tp of whole tokens", "ulysses", "ep and tp")


def tuned_cells(models: Sequence[str]) -> list[tuple[str, str]]:
    """Return the layouts and the models whose numbers they change."""
    return [(layout, model) for layout in TUNED_LAYOUTS for model in models if model in LAYOUTS[layout][1]]


@pytest.mark.parametrize("freeze", FREEZE)
@pytest.mark.parametrize("numerics", ["fp32", "autocast"])
@pytest.mark.parametrize(("layout_name", "model_name"), tuned_cells(FROZEN_MODELS))
def test_partly_frozen_block_does_what_its_declaration_says(
    layout_name: str, model_name: str, numerics: str, freeze: str
) -> None:
    case = make_case(layout_name, model_name, numerics)
    case = tuned(case, TuningSpec(freeze=FREEZE[freeze]))
    traced, declared = trace_block(case), declared_numbers(case, block.blocks(case.spec, case.layout)[-1])
    different = differences(case, traced, declared)
    assert_numbers_of_tuned_block(different, case)


ADAPTERS = {
    "all": AdapterSpec(rank=4, alpha=8.0),
    "some": AdapterSpec(rank=2, alpha=8.0, targets=("wq", "wo", "down", "query", "out")),
    "magnitudes": AdapterSpec(rank=4, alpha=8.0, dora=True),
    "dropout": AdapterSpec(rank=4, alpha=8.0, dropout=0.1),
    "experts": AdapterSpec(rank=4, alpha=8.0, targets=("experts.gate", "experts.up", "experts.down", "wo", "out")),
}
ADAPTED_MODELS = (
    *(
        "grouped heads",
        "biases",
        "gate of attention",
        "norms before and after",
        "parallel residual with one norm",
        "xIELU",
    ),
    *("shared expert", "latent experts", "prediction", "few key heads", "latent attention", "mamba", "convolution"),
)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("numerics", ["fp32", "autocast"])
@pytest.mark.parametrize(("layout_name", "model_name"), tuned_cells(ADAPTED_MODELS))
def test_block_with_adapters_does_what_its_declaration_says(
    layout_name: str, model_name: str, numerics: str, adapter: str
) -> None:
    case = tuned(make_case(layout_name, model_name, numerics), TuningSpec(adapter=ADAPTERS[adapter]))
    traced, declared = trace_block(case), declared_numbers(case, block.blocks(case.spec, case.layout)[-1])
    different = differences(case, traced, declared)
    assert_numbers_of_tuned_block(different, case)


Change = Callable[..., Any]


def with_changes(make: Callable[..., Any], **changes: Change) -> Callable[..., Any]:
    """Return a function like `make` that changes the given fields of its result by functions of their values."""

    def make_wrong(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        return replace(made, **{name: change(getattr(made, name)) for name, change in changes.items()})

    return make_wrong


def wrong_linear(part: Part, name: str, *args: Any, bias: bool = False, **kwargs: Any) -> Any:
    """Append a product without its bias."""
    return LINEAR(part, name, *args, **kwargs)


def wrong_norm(part: Part, name: str, x: Any, width: int, *args: Any) -> Any:
    """Append a norm of all heads together."""
    return NORM(part, name, x, x.width, *args)


def wrong_activation(part: Part, function: str, *xs: Any, **kwargs: Any) -> Any:
    """Append an activation that reads one of its inputs only."""
    return ACTIVATE(part, function, xs[0], **kwargs)


def wrong_grouped(part: Part, leaf: str, *args: Any, bias: bool = False, **kwargs: Any) -> Any:
    """Append the products of experts without their biases."""
    return GROUPED(part, leaf, *args, **kwargs)


def never(_: Any) -> None:
    """Return None."""


LINEAR, GROUPED, NORM, ACTIVATE = Part.linear, Part.grouped, Part.norm, Part.activate
WRONG_DECLARATIONS: dict[str, tuple[object, str, Any, BlockCase]] = {
    "a saved tensor is missing": (
        attention,
        "AttentionCore",
        with_changes(attention.AttentionCore, keeps=lambda values: values[1:]),
        make_case("one rank", "grouped heads", "fp32"),
    ),
    "FLOPs count twice": (
        attention,
        "AttentionCore",
        with_changes(attention.AttentionCore, flops_per_key=lambda flops: 2 * flops),
        make_case("ring", "grouped heads", "bf16"),
    ),
    "a window is missing": (
        attention,
        "AttentionCore",
        with_changes(attention.AttentionCore, window=never),
        make_case("ulysses", "window", "fp32"),
    ),
    "chunks are missing": (
        attention,
        "AttentionCore",
        with_changes(attention.AttentionCore, chunk=never),
        make_case("one rank", "chunks", "fp32"),
    ),
    "inputs of experts are not weighted": (
        experts,
        "Dispatch",
        with_changes(experts.Dispatch, weighs=lambda _: False),
        make_case("one rank", "weighted inputs of experts", "fp32"),
    ),
    "limits save nothing": (
        attention,
        "Clip",
        with_changes(attention.Clip, reads=lambda _: ()),
        make_case("one rank", "clipped heads", "fp32"),
    ),
    "sinks are missing": (
        attention,
        "AttentionCore",
        with_changes(attention.AttentionCore, parameters=lambda _: {}),
        make_case("one rank", "sinks", "fp32"),
    ),
    "more ranks than key/value heads": (
        attention,
        "Cut",
        with_changes(attention.Cut, copied_below=lambda _: False),
        make_case("copied heads", "grouped heads", "fp32"),
    ),
    "a view counts as memory of its own": (
        attention,
        "Value",
        with_changes(attention.Value, view_of=never),
        make_case("gathered heads", "grouped heads", "fp32"),
    ),
    "the stream has the precision of products": (
        block,
        "residual_stream",
        with_changes(block.residual_stream, numbers=lambda _: "compute"),
        make_case("one rank", "grouped heads", "autocast"),
    ),
    "ranks have all tokens of the stream": (
        block,
        "residual_stream",
        with_changes(block.residual_stream, tokens=lambda _: "all"),
        make_case("tp", "grouped heads", "fp32"),
    ),
    "a bias is missing": (Part, "linear", wrong_linear, make_case("tp", "biases", "fp32")),
    "biases of experts are missing": (Part, "grouped", wrong_grouped, make_case("ep", "experts with biases", "fp32")),
    "one norm of all heads": (Part, "norm", wrong_norm, make_case("tp", "norms of heads", "fp32")),
    "an input of the activation is missing": (
        Part,
        "activate",
        wrong_activation,
        make_case("one rank", "grouped heads", "fp32"),
    ),
    "tokens have one expert": (
        experts,
        "Value",
        with_changes(experts.Value, copies=lambda _: 1),
        make_case("ep", "experts", "fp32"),
    ),
    "scores are not normalized": (
        experts,
        "Route",
        with_changes(experts.Route, normalizes=lambda _: False),
        make_case("one rank", "experts", "fp32"),
    ),
    "experts are not cut": (
        experts,
        "Cut",
        with_changes(experts.Cut, units=lambda units: 2 * units),
        make_case("tp", "experts", "fp32"),
    ),
}
"""Wrong declarations: what is replaced in which object, and a case that notices it."""


@pytest.mark.parametrize("fault", WRONG_DECLARATIONS)
def test_wrong_declaration_differs_from_traced_block(fault: str) -> None:
    owner, name, wrong, case = WRONG_DECLARATIONS[fault]
    traced = trace_block(case)
    with mock.patch.object(owner, name, wrong):
        declared = declared_numbers(case, describe(case))
    assert differences(case, traced, declared)
