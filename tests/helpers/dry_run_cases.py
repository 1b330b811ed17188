"""Layouts and small models for dry runs and benchmarks of ranks."""

from __future__ import annotations

from typing import Any

Table = dict[str, Any]
DENSE: Table = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 384,
    "max_seq_len": 256,
    "tie_embeddings": False,
}
MOE: Table = {
    **DENSE,
    "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 96, "num_shared_experts": 1, "bias_update_rate": 0.01},
}
FEW_EXPERTS: Table = {**DENSE, "moe": {"num_experts": 2, "top_k": 1, "expert_ffn_size": 96}}
TIED: Table = {**DENSE, "tie_embeddings": True}
FEW_HEADS: Table = {**DENSE, "num_kv_heads": 2, "qk_norm": "full"}
WINDOWS: Table = {**DENSE, "sliding_window": 40, "full_attention_layers": [0], "attention_sinks": True}
KINDS: Table = {
    **MOE,
    "layers": "window full dense nope",
    "norm_position": "both",
    "sliding_window": 40,
    "kinds": [
        {"name": "full", "sliding_window": False, "head_dim": 64, "rope": {"theta": 1e6}},
        {"name": "dense", "moe": False, "ffn_hidden_size": 512, "num_heads": 8},
        {"name": "nope", "position_embedding": "none", "qk_norm": "full"},
    ],
}
"""Layers of four kinds."""
SIDE_BY_SIDE: Table = {
    **DENSE,
    "value_scale": 0.7,
    "gate_scale": 0.6,
    "side_mixer": {"kind": "mamba2", "num_heads": 4, "head_dim": 32, "state_size": 16, "chunk_size": 32},
}
"""Attention and Mamba-2 in each layer."""
UNEQUAL: Table = {**DENSE, "layers": "wide narrow*3", "kinds": [{"name": "wide", "ffn_hidden_size": 6000}]}
"""A wide layer, whose backward pass comes last, before narrow ones."""
SHARED_KEYS: Table = {
    **DENSE,
    "num_layers": 4,
    "layers": "window full",
    "sliding_window": 40,
    "kinds": [{"name": "full", "sliding_window": False, "head_dim": 64}],
    "num_shared_kv_layers": 2,
    "shared_kv_ffn_size": 512,
    "per_layer_input_size": 32,
    "norm_position": "both",
    "layer_scalars": True,
}
"""Layers that read the keys and values of others, and inputs of each layer."""
INDEXERS: Table = {
    **DENSE,
    "mixer": {
        "kind": "latent_attention",
        "query_rank": 64,
        "latent_rank": 32,
        "rope_dim": 8,
        "value_dim": 24,
        "indexer": {"num_heads": 8, "head_dim": 32, "top_k": 128},
    },
}
BASE_SETTINGS = {"training.seq_len": 128, "training.precision": "fp32", "data.mask_documents": False}


def dry_run_case(world_size: int, model: Table = DENSE, **layout: Any) -> tuple[int, Table]:
    """Return a run of two micro-batches per rank, or of eight in a pipeline.
    Names without a dot are fields of the layout."""
    changes = {name if "." in name else f"layout.{name}": value for name, value in layout.items()}
    shared = layout.get("pp", 1) * layout.get("tp", 1) * layout.get("cp", 1)
    computing = world_size - (layout.get("num_servers", 1) if layout.get("data_parallel") == "parameter_server" else 0)
    micro_batch, count = (1, 8) if "pp" in layout else (2, 2)
    tokens = computing // shared * micro_batch * count * 128
    if "pp" in layout or ("tp" in layout and "ep" not in layout):  # for four stages, and for estimates of the peak
        model = {**model, "num_layers": 4}
    return world_size, {
        **BASE_SETTINGS,
        "model": model,
        "layout.micro_batch_size": micro_batch,
        "training.tokens_per_step": tokens,
        **changes,
    }


SCHEDULES = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
BF16 = {"training.precision": "bf16"}
SGD = {"optimizer.name": "sgd"}
MUON = {"optimizer.name": "muon"}
FROZEN: Table = {"training.freeze": ["embedding.*", "blocks.0.*", "*norm.weight"]}
ADAPTER: Table = {"adapter.rank": 8, "adapter.alpha": 16.0}
NF4: Table = {"adapter.base_dtype": "nf4"}
QUANTIZED: Table = {**MOE, "hidden_size": 128, "moe": {**MOE["moe"], "expert_ffn_size": 128}}
LAYOUTS: list[tuple[int, Table]] = [
    *[dry_run_case(1, activation_checkpointing=mode) for mode in ("none", "norms", "selective", "full", "offload")],
    dry_run_case(1, activation_checkpointing="full", recomputed_blocks=1),
    *[dry_run_case(n, data_parallel=data) for n in (2, 4) for data in ("ddp", "zero1", "zero2", "zero3")],
    *[dry_run_case(2, data_parallel=data, **BF16) for data in ("ddp", "zero1", "zero2", "zero3")],
    dry_run_case(8, data_parallel="zero2", bucket_mb=0.2),
    *[dry_run_case(2, data_parallel=data, **MUON) for data in ("zero1", "zero3")],
    dry_run_case(2, bucket_mb=0.2),
    dry_run_case(2, bucket_mb=0.2, ddp_static_graph=True, **{"training.tokens_per_step": 512}),
    dry_run_case(2, gradient_compression="bf16"),
    dry_run_case(4, MOE, data_parallel="hsdp", dp_shard=2),
    dry_run_case(8, data_parallel="hsdp", dp_shard=4, fsdp_unit="sublayer"),
    dry_run_case(2, data_parallel="zero3", fsdp_unit="model", activation_checkpointing="full"),
    dry_run_case(2, MOE, data_parallel="parameter_server"),
    dry_run_case(4, data_parallel="parameter_server", num_servers=2),
    *[dry_run_case(2, data_parallel=data, offload="cpu") for data in ("zero1", "zero3")],
    *[dry_run_case(n, tp=n) for n in (2, 4)],
    dry_run_case(4, FEW_HEADS, tp=4, data_parallel="zero1"),
    dry_run_case(2, MOE, tp=2, sequence_parallel=False),
    dry_run_case(2, {**DENSE, "num_heads": 3, "num_kv_heads": 3, "hidden_size": 96}, tp=2, tp_attention="gathered"),
    *[dry_run_case(4, FEW_HEADS, tp=2, data_parallel=data) for data in ("ddp", "zero3")],
    dry_run_case(8, MOE, tp=4, data_parallel="zero1"),
    *[dry_run_case(2, cp=2, cp_method=kind, **BF16) for kind in ("ring", "ulysses")],
    dry_run_case(2, WINDOWS, cp=2, cp_method="ulysses"),
    dry_run_case(4, WINDOWS, tp=2, data_parallel="zero1"),
    dry_run_case(2, KINDS, data_parallel="zero3", activation_checkpointing="norms"),
    dry_run_case(4, INDEXERS, tp=2, data_parallel="zero3"),
    *[dry_run_case(2, SHARED_KEYS, data_parallel=data) for data in ("ddp", "zero3")],
    dry_run_case(1, SHARED_KEYS, activation_checkpointing="full"),
    dry_run_case(2, SHARED_KEYS, tp=2),
    dry_run_case(2, {**SHARED_KEYS, "tie_embeddings": True}, data_parallel="zero3", fsdp_unit="sublayer"),
    dry_run_case(4, KINDS, pp=2, schedule="1f1b"),
    dry_run_case(2, SIDE_BY_SIDE, data_parallel="zero1", activation_checkpointing="selective"),
    dry_run_case(2, SIDE_BY_SIDE, cp=2, cp_method="ulysses", fsdp_unit="sublayer", data_parallel="zero3"),
    dry_run_case(2, {**UNEQUAL, "num_layers": 4}, data_parallel="zero3"),
    dry_run_case(2, {**UNEQUAL, "num_layers": 4}, data_parallel="ddp"),
    dry_run_case(8, MOE, cp=2, tp=2, data_parallel="zero2"),
    *[dry_run_case(4, FEW_EXPERTS, data_parallel=data) for data in ("zero1", "zero2", "zero3")],
    dry_run_case(8, FEW_EXPERTS, data_parallel="hsdp", dp_shard=4, **SGD),
    dry_run_case(8, FEW_EXPERTS, data_parallel="zero1", tp=2, **BF16),
    dry_run_case(8, FEW_EXPERTS, data_parallel="zero3", pp=2),
    dry_run_case(2, MOE, ep=2),
    dry_run_case(4, MOE, ep=4, data_parallel="zero1", **BF16),
    dry_run_case(8, MOE, ep=4, tp=2, data_parallel="zero3"),
    dry_run_case(4, MOE, ep=2, data_parallel="zero3", activation_checkpointing="full"),
    *[dry_run_case(2, pp=2, schedule=schedule) for schedule in SCHEDULES],
    dry_run_case(2, pp=2, schedule="interleaved", virtual_stages=2, **BF16),
    dry_run_case(2, pp=2, activation_checkpointing="full", recomputed_blocks=[2, 1]),
    dry_run_case(2, pp=2, activation_checkpointing="offload", recomputed_blocks=[2, 1]),
    dry_run_case(2, MOE, tp=2, activation_checkpointing="selective", recomputed_blocks=3),
    dry_run_case(2, MOE, tp=2, activation_checkpointing="norms", recomputed_blocks=3),
    dry_run_case(2, pp=2, schedule="zb-h1", activation_checkpointing="norms", **BF16),
    dry_run_case(4, TIED, pp=4),
    dry_run_case(4, TIED, pp=2, data_parallel="zero1", schedule="zb-h1"),
    dry_run_case(4, pp=2, data_parallel="zero3", schedule="zb-v"),
    dry_run_case(4, MOE, pp=2, cp=2, schedule="gpipe"),
    dry_run_case(8, pp=2, tp=2, data_parallel="zero1", rank_order="pipeline_outer"),
    dry_run_case(8, pp=4, tp=2, schedule="zb-h1", **BF16),
    dry_run_case(8, MOE, pp=2, ep=2, data_parallel="zero1"),
    dry_run_case(2, data_parallel="zero3", **FROZEN),
    dry_run_case(2, data_parallel="zero3", **BF16, **ADAPTER),
    dry_run_case(2, MOE, data_parallel="zero2", **ADAPTER),
    dry_run_case(4, tp=2, data_parallel="zero3", **ADAPTER),
    dry_run_case(2, pp=2, schedule="zb-h1", **ADAPTER),
    dry_run_case(4, QUANTIZED, tp=2, data_parallel="zero3", **ADAPTER, **NF4),
]
