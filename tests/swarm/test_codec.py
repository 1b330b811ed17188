"""Tensors encoded as bytes and decoded: exact sizes, errors within a quantization step, and rejection of other
bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.spec.swarm import CODEC_BLOCK_SIZE, Codec
from phalanx.swarm.codec import MAX_CODE, CodecError, decode, encode

CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8", "int4")


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(3, 5), (256,), (257,), (2, 256, 4), (1,), (), (0,), (511,)])
def test_codec_output_size_equals_encoded_bytes(codec, shape):
    data = encode(random_tensor(*shape), codec)
    assert len(data) == encoded_bytes(int(torch.Size(shape).numel()), codec)
    assert decode(data, shape, codec).shape == torch.Size(shape)


def test_fp32_codec_round_trips_exactly():
    tensor = random_tensor(7, 9)
    assert torch.equal(decode(encode(tensor, "fp32"), (7, 9), "fp32"), tensor)


def test_bf16_codec_equals_torch_bfloat16_rounding():
    tensor = random_tensor(7, 9)
    assert torch.equal(decode(encode(tensor, "bf16"), (7, 9), "bf16"), tensor.bfloat16().float())


@given(
    numbers=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=3 * CODEC_BLOCK_SIZE),
    codec=st.sampled_from(["int8", "int4"]),
)
@settings(deadline=None)
def test_int_codec_error_is_at_most_half_a_quantization_step(numbers, codec):
    tensor = torch.tensor(numbers)
    decoded = decode(encode(tensor, codec), tensor.shape, codec)
    for block, decoded_block in zip(tensor.split(CODEC_BLOCK_SIZE), decoded.split(CODEC_BLOCK_SIZE), strict=True):
        step = block.abs().max().double() / MAX_CODE[codec]
        assert float((block.double() - decoded_block.double()).abs().max()) <= float(step) * 0.5001 + 1e-38


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_int_codec_is_idempotent_and_preserves_block_maximum_and_zero(codec):
    tensor = random_tensor(4, CODEC_BLOCK_SIZE)
    once = decode(encode(tensor, codec), tensor.shape, codec)
    torch.testing.assert_close(once.abs().amax(1), tensor.abs().amax(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(decode(encode(once, codec), once.shape, codec), once, rtol=1e-6, atol=0)
    assert not decode(encode(torch.zeros(300), codec), (300,), codec).any()


def test_int4_codec_round_trips_all_integer_levels():
    tensor = torch.arange(-7, 8).float()
    assert torch.equal(decode(encode(tensor, "int4"), (15,), "int4"), tensor)


@pytest.mark.parametrize("codec", CODECS)
def test_codec_preserves_nonfinite_values(codec):
    """The receiver must be able to reject such values."""
    for bad in (float("nan"), float("inf")):
        tensor = random_tensor(600)
        tensor[300] = bad
        assert not decode(encode(tensor, codec), (600,), codec).isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("change", [-1, 1])
def test_decode_rejects_bytes_of_wrong_length(codec, change):
    data = bytes(encode(random_tensor(300), codec))
    with pytest.raises(CodecError):
        decode(data[:change] if change < 0 else data + b"x", (300,), codec)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_codec_error_feedback_reduces_accumulated_error(codec):
    """With feedback, the sum of the encoded changes follows a steady change; without it, a codec of few bits loses a
    part."""
    change = random_tensor(1024)
    feedback, with_feedback, without_feedback = torch.zeros(3, 1024)
    for _ in range(50):
        sent = decode(encode(change + feedback, codec), (1024,), codec)
        feedback, with_feedback = change + feedback - sent, with_feedback + sent
        without_feedback += decode(encode(change, codec), (1024,), codec)
    error, error_without_feedback = (
        (total / 50 - change).norm() / change.norm() for total in (with_feedback, without_feedback)
    )
    assert error < error_without_feedback / 5
