"""Bytes that depend on the kind of a block."""

from phalanx.cost.exact.derive.temporary import fp8_cast_bytes
from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.spec.files.load import run_from_table
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.parts.block import blocks

SHAPE = ForwardShape(batch=1, sequence=64, precision="fp8", layout=Layout(), autocast=False, masked=False, on_cuda=True)


def experts_after_dense_block(num_experts: int) -> ModelSpec:
    moe = {"num_experts": num_experts, "top_k": 2, "expert_ffn_size": 32, "num_leading_dense_layers": 1}
    return run_from_table({"model": {"preset": "tiny", "num_layers": 2, "moe": moe}}).model


def test_fp8_casts_of_experts_and_of_dense_blocks_are_counted_apart() -> None:
    few, many = experts_after_dense_block(4), experts_after_dense_block(8)
    (dense, few_experts), (same_dense, many_experts) = (
        [fp8_cast_bytes(block[-1].part, SHAPE) for block in blocks(spec)] for spec in (few, many)
    )
    assert dense == same_dense
    assert many_experts - few_experts == 4 * 32 * few.hidden_size
