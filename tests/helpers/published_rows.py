"""Published runs, as rows of a planner's table."""

from __future__ import annotations

MEGATRON_22B_ROW = {
    "id": "row-1",
    "model": "gpt-22b",
    "params_b": "22",
    "layers": "48",
    "hidden": "6144",
    "heads": "64",
    "kv_heads": "64",
    "ffn": "24576",
    "vocab": "51200",
    "seq": "2048",
    "gpus": "8",
    "gpus_per_node": "8",
    "gpu_type": "A100-80GB-SXM",
    "intra_bw": "300",
    "inter_bw": "25",
    "tp": "8",
    "pp": "1",
    "vpp": "1",
    "dp": "1",
    "cp": "1",
    "zero": "0",
    "micro_batch": "4",
    "global_batch": "4",
    "recompute": "full",
    "seq_parallel": "0",
    "precision": "fp16",
    "schedule": "no-pipeline",
    "facts": "",
}
"""Megatron's 22B model, whose step took 1.42 s (arXiv 2205.05198, table 5)."""
L40S_ROW = {
    **MEGATRON_22B_ROW,
    "gpu_type": "L40S",
    "intra_bw": "",
    "tp": "1",
    "dp": "8",
    "zero": "3",
    "global_batch": "32",
}
"""The same model with ZeRO-3 on a node of eight L40S, which have no NVLink."""
