"""Completion of a table row's model by the shapes of its published family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.cost.estimate.job_table import JobRow
from phalanx.cost.exact.parameters import count_parameters
from phalanx.plan.tables.cells import MAX_LAYERS, read_count, read_number
from phalanx.plan.tables.csv_rows import Row
from phalanx.plan.tables.job_columns import model_columns
from phalanx.spec.base import parse_table, require
from phalanx.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MLAShape:
    """Multi-head latent attention and fine-grained experts of DeepSeek (arXiv 2412.19437, section 4.2)."""

    expert_ffn: int
    shared_experts: int
    first_dense: int
    ffn: int
    heads: int = 128
    query_rank: int = 1536
    key_rank: int = 512
    head: int = 128
    rotary: int = 64

    def attention_parameters(self, width: int) -> int:
        """Return the parameters of a layer's attention: down- and up-projections of q and kv, and output."""
        queries = self.query_rank * (width + self.heads * (self.head + self.rotary))
        keys = width * (self.key_rank + self.rotary) + self.key_rank * self.heads * 2 * self.head
        return queries + keys + self.heads * self.head * width


MLA_SHAPES = {
    "deepseek-v3": MLAShape(expert_ffn=2048, shared_experts=1, first_dense=3, ffn=18432),
    "deepseekv3": MLAShape(expert_ffn=2048, shared_experts=1, first_dense=1, ffn=18432),
    "deepseekv2": MLAShape(expert_ffn=1536, shared_experts=2, first_dense=1, ffn=12288),
    "kimi-k2": MLAShape(expert_ffn=2048, shared_experts=1, first_dense=1, ffn=18432, heads=64),
}
"""Models whose attention no column describes, by prefix of their names.

A truncated model has one dense layer.
"""


HEAD_DIM = {"qwen3": 128, "gpt-oss": 64}
"""Head widths that differ from width / heads, by prefix of the model's name."""


SHARED_FFN = {"qwen2-57b": 20480}


def model_from_row(row: Row, sequence: int) -> tuple[ModelSpec, JobRow]:
    """Return the model of a row as Phalanx describes it, and its columns."""
    name = row.get("model", "").lower()
    latent = next((shape for start, shape in MLA_SHAPES.items() if name.startswith(start)), None)
    width, layers, heads = (read_count(row, column) for column in ("hidden", "layers", "heads"))
    require(layers <= MAX_LAYERS, "layers", layers, problem=f"is more than {MAX_LAYERS:,}", fix="correct the cell")
    experts = read_count(row, "experts", 0)
    ffn = read_count(row, "ffn")
    common: dict[str, Any] = {
        "hidden_size": width,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": read_count(row, "kv_heads", heads),
        "vocab_size": read_count(row, "vocab"),
        "max_seq_len": sequence,
        "position_embedding": "learned",
        "head_dim": next((dim for start, dim in HEAD_DIM.items() if name.startswith(start)), max(width // heads, 1)),
    }
    if not experts:
        spec = _find_nearest_model(common, ffn, read_number(row, "params_b", 0) * 1e9, gated="llama" in name)
        return spec, model_columns(spec, sequence)
    moe: dict[str, Any] = {"num_experts": experts, "top_k": read_count(row, "topk"), "expert_ffn_size": ffn}
    if latent:
        moe |= {
            "num_shared_experts": latent.shared_experts,
            "num_leading_dense_layers": latent.first_dense,
            "expert_ffn_size": latent.expert_ffn,
        }
        common |= {"num_heads": latent.heads, "num_kv_heads": latent.heads, "head_dim": latent.head + latent.rotary}
    spec = parse_table(ModelSpec, {**common, "ffn_hidden_size": latent.ffn if latent else ffn, "moe": moe})
    columns = model_columns(spec, sequence)
    columns["shared_ffn"] += next((ffn for start, ffn in SHARED_FFN.items() if name.startswith(start)), 0)
    if latent:
        attention = latent.attention_parameters(width)
        columns["parameters"] += layers * (attention - columns["attention_parameters"])
        columns |= {"attention_parameters": attention, "value_dim": latent.head}
    return spec, columns


def _find_nearest_model(common: dict[str, Any], ffn: int, stated: float, gated: bool) -> ModelSpec:
    """Return the dense model whose parameter count is closest to the stated one, by kind of MLP and tying."""
    specs = [
        parse_table(ModelSpec, {**common, "ffn_hidden_size": ffn, "activation": activation, "tie_embeddings": tied})
        for activation in ("swiglu", "gelu")
        for tied in (False, True)
    ]
    if not stated:
        return specs[0 if gated else 3]
    return min(specs, key=lambda spec: abs(count_parameters(spec).total - stated))
