"""Error feedback: quantized updates follow the true change over any number of rounds, up to the error of the last
encoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.cost.exact.swarm import encoded_bytes
from phalanx.spec.swarm import Codec
from phalanx.swarm.aggregation.aggregate import ModelState, encode_broadcast
from phalanx.swarm.codec import decode, encode
from phalanx.swarm.pieces import ModelPiece
from phalanx.swarm.tensor_files import TensorFile
from phalanx.swarm.update_files import Feedback, decode_piece, encode_piece
from tests.helpers.quantization import quantization_error_bound

ROUNDS = 12
PIECE = ModelPiece("some.weight", (4, 300))
QUANTIZED_CODECS = pytest.mark.parametrize("codec", ["int8", "int4"])


def random_piece(seed: int, item: ModelPiece = PIECE) -> Tensor:
    return torch.randn(item.shape, generator=torch.Generator().manual_seed(seed))


def zero(item: ModelPiece) -> Tensor:
    return torch.zeros(item.shape)


@QUANTIZED_CODECS
@pytest.mark.parametrize("steady", [True, False])
def test_encode_piece_error_feedback_tracks_accumulated_changes(codec, steady):
    """A node continues from the common weights in each round, and changes them by the same amount or by another one."""
    base, learned, without_feedback = zero(PIECE), zero(PIECE), zero(PIECE)
    feedback: Feedback = {}
    for number in range(ROUNDS):
        change = random_piece(0 if steady else number)
        local, common = base + change, base
        data = encode_piece(PIECE, codec, lambda _, local=local: local, lambda _, common=common: common, feedback)
        base = decode_piece(PIECE, data, codec, lambda _, common=common: common)
        learned += change
        without_feedback += decode(encode(change, codec), PIECE.shape, codec)
        bound = quantization_error_bound(data, PIECE, codec) + 1e-5
        assert ((base - learned).abs() <= bound).all()
        assert torch.allclose(base + feedback[PIECE.key], learned, atol=1e-4)
    assert ((without_feedback - learned).abs() > bound).any()  # without feedback, the error exceeds the bound


def test_encode_piece_fp32_round_trips_exactly_without_error_feedback():
    feedback: Feedback = {}
    data = encode_piece(PIECE, "fp32", lambda _: random_piece(1), zero, feedback)
    assert torch.equal(decode_piece(PIECE, data, "fp32", zero), random_piece(1))
    assert not feedback


class BroadcastState:
    """A model of one piece, and the updates that nodes receive."""

    def __init__(self, folder: Path, codec: Codec) -> None:
        self.folder, self.codec, self.number = folder, codec, 0
        self.state = self._fresh()

    def _fresh(self) -> ModelState:
        shapes = {PIECE.name: PIECE.shape}
        base, feedback = (TensorFile.create(self.folder / f"{kind}-{self.number}", shapes) for kind in ("base", "left"))
        return ModelState(base=base, error_feedback=feedback)

    @property
    def base(self) -> Tensor:
        return self.state.base.read(PIECE)

    def apply_round(self, change: Tensor | None) -> bytearray:
        """Run a round that changes this piece, or with None only others; return the update that nodes receive."""
        self.number += 1
        new, piece_senders = self._fresh(), {} if change is None else {PIECE.key: ""}
        new.base.write(PIECE, self.base if change is None else self.base + change)
        shapes = {key: (encoded_bytes(PIECE.num_elements, self.codec),) for key in piece_senders}
        with TensorFile.create(self.folder / "down", shapes, "U8") as down:
            encode_broadcast([PIECE], [], piece_senders, self.codec, self.state, new, down)
            self.state = new
            return down.raw(PIECE.key) if piece_senders else bytearray()


@QUANTIZED_CODECS
@pytest.mark.parametrize("every", [1, 3])
def test_encode_broadcast_error_feedback_syncs_nodes_with_coordinator(tmp_path, codec, every):
    """Rounds of other pieces keep the feedback."""
    model, expected, received = BroadcastState(tmp_path, codec), zero(PIECE), zero(PIECE)
    for number in range(ROUNDS):
        if number % every:
            model.apply_round(None)
            continue
        data = model.apply_round(random_piece(0))
        expected += random_piece(0)
        received += decode(data, PIECE.shape, codec)
        assert torch.equal(model.base, received)
        assert ((model.base - expected).abs() <= quantization_error_bound(data, PIECE, codec) + 1e-5).all()
