"""Bytes that depend on the kind of a block."""

from phalanx.cost.exact.forward_shape import ForwardShape
from phalanx.cost.exact.saved_tensors import fp8_cast_bytes
from phalanx.spec.files.load import run_from_table
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec

SHAPE = ForwardShape(batch=1, sequence=64, precision="fp8", layout=Layout(), autocast=False, masked=False, on_cuda=True)


def experts_after_dense_block(num_experts: int) -> ModelSpec:
    moe = {"num_experts": num_experts, "top_k": 2, "expert_ffn_size": 32, "num_leading_dense_layers": 1}
    return run_from_table({"model": {"preset": "tiny", "num_layers": 2, "moe": moe}}).model


def test_fp8_casts_of_experts_and_of_dense_blocks_are_counted_apart() -> None:
    few, many = experts_after_dense_block(4), experts_after_dense_block(8)
    assert fp8_cast_bytes(few, 0, SHAPE) == fp8_cast_bytes(many, 0, SHAPE)
    assert fp8_cast_bytes(many, 1, SHAPE) - fp8_cast_bytes(few, 1, SHAPE) == 4 * 32 * few.hidden_size
